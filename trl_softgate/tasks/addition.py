"""Multi-digit addition with a column scratchpad: a verifiable task small enough for a CPU.

A problem reads ``4821+0937=`` without its quotes, both numbers written with the same number of digits. The expected
completion works through the columns from the right, each as *digit, digit, carry in = two-digit sum*, and ends with
the answer::

    170=08;230=05;891=18;...;05758

Fifteen single-character tokens are enough (ten digits, ``+``, ``=``, ``;``, padding and end of sequence), so a model
of half a million parameters learns the task in about a minute. The verifier looks at the final answer alone.

Splits never share a problem: the split is a fixed function of the unordered pair of numbers, so ``a+b`` and ``b+a``
always fall on the same side, whatever the seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Split = Literal["train", "validation", "test"]

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
VOCABULARY = (PAD_TOKEN, EOS_TOKEN, *"0123456789", "+", "=", ";")

# Shares in percent: train is the rest.
_VALIDATION_PERCENT = 10
_TEST_PERCENT = 10

_ANSWER = re.compile(r"(?:[^;]*;)*([0-9]+)")


@dataclass(frozen=True)
class Problem:
    """One addition: `a` + `b`, both written with `digits` digits."""

    a: int
    b: int
    digits: int = 4

    @property
    def prompt(self) -> str:
        """The text the model continues, `2 * digits + 2` tokens."""
        return f"{self.a:0{self.digits}d}+{self.b:0{self.digits}d}="

    @property
    def answer(self) -> str:
        """The sum in plain decimal notation."""
        return str(self.a + self.b)

    @property
    def solution(self) -> str:
        """The scratchpad and the answer, `completion_length(digits)` tokens with the end of sequence."""
        columns = []
        carry = 0
        for place in range(self.digits):
            left, right = self.a // 10**place % 10, self.b // 10**place % 10
            total = left + right + carry
            columns.append(f"{left}{right}{carry}={total:02d};")
            carry = total // 10
        return "".join(columns) + f"{self.a + self.b:0{self.digits + 1}d}"


def completion_length(digits: int) -> int:
    """Number of tokens of a complete solution, the end of sequence included (34 for four digits)."""
    return 7 * digits + (digits + 1) + 1


def split_of(a: int, b: int) -> Split:
    """The split that owns the unordered pair (`a`, `b`): train 80 %, validation 10 %, test 10 %."""
    low, high = min(a, b), max(a, b)
    # A multiplicative hash, and not Python's own, which is not promised to stay the same.
    bucket = ((low * 1_000_003 + high) * 2_654_435_761 % 2**32 >> 12) % 100
    if bucket < _TEST_PERCENT:
        return "test"
    if bucket < _TEST_PERCENT + _VALIDATION_PERCENT:
        return "validation"
    return "train"


def iterate_problems(seed: int, split: Split, *, digits: int = 4) -> Iterator[Problem]:
    """Endless random problems of one split, the same for the same arguments. Problems may repeat.

    Args:
        seed: Seed of the draw; it does not change which problems belong to the split.
        split: `"train"`, `"validation"` or `"test"`.
        digits: Digits of each number, at least 1. Leading zeros occur.

    Raises:
        ValueError: If `split` is unknown or `digits` is below 1.
    """
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {', '.join(get_args(Split))}, got {split!r}.")
    if digits < 1:
        raise ValueError(f"digits must be at least 1, got {digits}.")
    return _draw(random.Random(f"{split}-{digits}-{seed}"), split, digits)


def _draw(generator: random.Random, split: Split, digits: int) -> Iterator[Problem]:
    bound = 10**digits
    while True:
        a, b = generator.randrange(bound), generator.randrange(bound)
        if split_of(a, b) == split:
            yield Problem(a, b, digits)


def sample_problems(n: int, seed: int, split: Split, *, digits: int = 4) -> list[Problem]:
    """`n` distinct random problems of one split, the same list for the same arguments.

    Raises:
        ValueError: If `n` is below 1 or more than a fiftieth of all problems with that many digits: distinct
            problems are drawn by rejection, which needs room. Also as in `iterate_problems`.
    """
    room = 10 ** (2 * digits) // 50
    if not 1 <= n <= room:
        raise ValueError(f"n must be between 1 and {room} for {digits}-digit problems, got {n}.")
    problems: dict[Problem, None] = {}
    for problem in iterate_problems(seed, split, digits=digits):
        problems[problem] = None
        if len(problems) == n:
            break
    return list(problems)


def build_dataset(n: int, seed: int, split: Split = "train", *, digits: int = 4) -> Dataset:
    """`n` distinct problems as a dataset for a GRPO-style trainer.

    Columns: `prompt` (text), `answer` (the sum as text, handed to `reward_exact` by the trainer). Arguments and
    errors are those of `sample_problems`.
    """
    from datasets import Dataset

    problems = sample_problems(n, seed, split, digits=digits)
    return Dataset.from_dict({"prompt": [p.prompt for p in problems], "answer": [p.answer for p in problems]})


def extract_answer(completion: str) -> str | None:
    """The number after the last `;` without leading zeros, or None where the completion does not end in one."""
    match = _ANSWER.fullmatch(completion)
    return None if match is None else match.group(1).lstrip("0") or "0"


def reward_exact(completions: Sequence[str], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """Reward function: 1.0 where the final answer is the right sum, else 0.0. The scratchpad is not judged.

    Args:
        completions: B texts without special tokens.
        answer: B right sums as text.
        **kwargs: The trainer's other columns, unused.
    """
    return [float(extract_answer(text) == right) for text, right in zip(completions, answer, strict=True)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The 15-token tokenizer: one token per character, left padding, pad and end of sequence distinct."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(VOCABULARY)}
    # Without an unknown token WordLevel drops foreign characters silently; pad stands for them, and is never scored.
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # pyright: ignore
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        model_max_length=1024,
    )


def evaluate_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 250,
    on_progress: Callable[[int], None] | None = None,
) -> float:
    """Share of `problems` whose single completion ends in the right sum.

    The caller's random state and the model's train or eval mode are left as they were.

    Args:
        model: A causal language model over the tokens of `tokenizer`.
        tokenizer: From `build_tokenizer`.
        problems: All with the same number of digits.
        temperature: 1.0 samples from the policy itself, the accuracy that reinforcement learning raises; 0 decodes
            greedily.
        seed: Seed of the sampling.
        batch_size: Problems per call of `generate`.
        on_progress: Called after each batch with the number of problems done so far.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: If `problems` is empty or `temperature` is negative.
    """
    import torch
    from transformers import GenerationConfig

    if not problems:
        raise ValueError("problems is empty: pass at least one problem.")
    if temperature < 0:
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {temperature}.")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    config = GenerationConfig(
        max_new_tokens=completion_length(problems[0].digits),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    was_training = model.training
    model.eval()
    right = 0
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            for start in range(0, len(problems), batch_size):
                batch = list(problems[start : start + batch_size])
                inputs = tokenizer([p.prompt for p in batch], return_tensors="pt", padding=True).to(model.device)
                with torch.no_grad():
                    output = model.generate(  # pyright: ignore[reportCallIssue]
                        input_ids=inputs["input_ids"],
                        attention_mask=inputs["attention_mask"],
                        generation_config=config,
                    )
                completions = tokenizer.batch_decode(
                    output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
                )
                right += int(sum(reward_exact(completions, [p.answer for p in batch])))
                if on_progress is not None:
                    on_progress(start + len(batch))
    finally:
        model.train(was_training)
    return right / len(problems)
