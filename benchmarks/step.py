"""What an optimizer step costs beside stock TRL's, with the same gradient.

    make bench
    make bench BENCH_ARGS="--cases equal exponential --threads 1"
    python benchmarks/step.py --size tiny --repeat 1
    python benchmarks/step.py --size smollm2 --model runs/smollm2/base

Our trainers and `trl.GRPOTrainer` take turns in this process, on the same rollouts and weights; generation is free. A
step's time runs from its rollout to its gradient: rewards, teacher, forward and backward. `ratio` is ours over the
other's, the median over neighbouring pairs. With one thread, seconds are those of the processor, so other programs
disturb little; with more, ratios of time mean something only on a machine with nothing else to do.

FLOP utilisation counts 6 * parameters * tokens and the attention of the valid tokens of rows that have a signal, over
the speed of a matrix product measured here. Memory is the most that a step has allocated at a time beyond the weights,
counted in a step of its own, not what the process holds. Prints a table and writes
`benchmarks/out/bench.json`.
"""

import argparse
import gc
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import loss_cost
import torch
import transformers
import trl
from datasets import Dataset
from memory import PeakMemory
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer
from trl_softgate.fusion import FusionSchedule
from trl_softgate.teachers.packing import fused_log_probs

PROMPT, GROUP, MICRO_BATCH, SEED = 64, 4, 4, 0
FIRST_TOKEN = 100  # special tokens come first


@dataclass(frozen=True)
class Size:
    """The model, None where a folder is given, and rows and longest completion of either kind of rollout."""

    model: dict[str, int] | None
    equal_rows: int
    equal_tokens: int
    rows: int = 64
    # of rows with prompts of 64 tokens and a mean of a quarter, 0.34 is not padding
    max_tokens: int = 446


SIZES = {
    "tiny": Size(
        dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=2, vocab_size=1024),
        equal_rows=8,
        equal_tokens=32,
        rows=8,
    ),
    "30m": Size(
        dict(hidden_size=384, num_hidden_layers=12, intermediate_size=1024, num_attention_heads=6, vocab_size=24000),
        equal_rows=8,
        equal_tokens=192,
    ),
    "smollm2": Size(None, equal_rows=8, equal_tokens=192),
}

_CLIP = dict(loss_type="grpo", epsilon=0.2, epsilon_high=0.27)
_SEQUENCE = dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
_NO_TEACHER = dict(opd_coef=0.0, policy_objective="grpo", aggregation="seq_mean_token_mean")
# trainer, config, its settings, and those of stock TRL for the same loss
PAIRS: dict[str, tuple[Any, type, dict[str, Any], dict[str, Any]]] = {
    "SAPO": (SAPOTrainer, SAPOConfig, {}, dict(loss_type="sapo")),
    "GSPO": (GSPOTrainer, GSPOConfig, {}, _SEQUENCE),
    "GRPO": (SAFDistillTrainer, SAFDistillConfig, _NO_TEACHER, _CLIP),
}


class Rollouts:
    """Fixed prompts, completions and rewards: every trainer sees the same rows in the same order.

    Args:
        lengths: tokens of each row's completion; `GROUP` rows that follow each other share a prompt.
        flat: whether every other group has equal rewards, and so no signal.
    """

    def __init__(self, lengths: list[int], vocab_size: int, flat: bool = False) -> None:
        generator = torch.Generator().manual_seed(SEED)

        def tokens(count: int) -> list[int]:
            return torch.randint(FIRST_TOKEN, vocab_size, (count,), generator=generator).tolist()

        self.prompts = [tokens(PROMPT) for _ in range(len(lengths) // GROUP)]
        self.completions = [tokens(length) for length in lengths]
        self.signal = [not (flat and i // GROUP % 2) for i in range(len(lengths))]

    @property
    def rows(self) -> list[list[int]]:
        return [self.prompts[i // GROUP] + ids for i, ids in enumerate(self.completions)]

    @property
    def max_tokens(self) -> int:
        return max(map(len, self.completions))

    @property
    def valid_share(self) -> float:
        lengths = list(map(len, self.rows))
        return sum(lengths) / (len(lengths) * max(lengths))

    def dataset(self) -> Dataset:
        return Dataset.from_dict({"prompt": [str(i) for i in range(len(self.prompts))]})

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """As TRL's `rollout_func`: each prompt comes `GROUP` times; the rewards travel as a column."""
        rows = [int(prompt) * GROUP + i % GROUP for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [self.prompts[i // GROUP] for i in rows],
            "completion_ids": [self.completions[i] for i in rows],
            "logprobs": None,
            "reward": [float(self.signal[i] and i % 2) for i in rows],
        }


def read_reward(completions: list[str], reward: list[float], **kwargs: Any) -> list[float]:
    return reward


def exponential_lengths(rows: int, longest: int) -> list[int]:
    """The quantiles of an exponential distribution whose mean is a quarter of `longest`, in random order."""
    lengths = [max(1, min(longest, round(-math.log(1 - (i + 0.5) / rows) * longest / 4))) for i in range(rows)]
    random.Random(SEED).shuffle(lengths)
    return lengths


def now() -> float:
    """Seconds; of the processor where it is one thread that works."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Clock(TrainerCallback):
    """Looks at the one step of each `train()`, without loading, updating, logging and saving."""

    def __init__(self) -> None:
        self.examine = True
        self.seconds, self.peak = 0.0, 0
        self.gradient: list[torch.Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(SEED)  # TRL shuffles the rows of a rollout
        gc.collect()
        self._memory = PeakMemory() if self.examine else None
        if self._memory is not None:
            self._memory.__enter__()
        self._begin = now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.seconds = now() - self._begin
        if self._memory is None:
            return
        self._memory.__exit__(None, None, None)
        self.peak = self._memory.bytes
        # a parameter without gradient, such as a frozen one, is as good as one with zeros
        self.gradient = [torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters()]


class Side:
    """A trainer that repeats one step; the learning rate is 0, so its weights stay."""

    def __init__(
        self,
        trainer_class: Any,
        config_class: type,
        model: str,
        rollouts: Rollouts,
        settings: dict[str, Any],
        callbacks: tuple[TrainerCallback, ...] = (),
        **kwargs: Any,
    ) -> None:
        names = {field.name for field in fields(config_class)}
        # renamed in the course of the transformers versions that the package admits
        checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
        self._folder = tempfile.TemporaryDirectory()
        config = config_class(
            self._folder.name,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=len(rollouts.completions) // MICRO_BATCH,
            num_generations=GROUP,
            max_completion_length=rollouts.max_tokens,
            max_steps=1,
            learning_rate=0.0,
            optim="sgd",
            max_grad_norm=0.0,
            shuffle_dataset=False,
            seed=SEED,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
            **{checkpointing: False},
            **settings,
        )
        self.clock = Clock()
        self.trainer = trainer_class(
            model,
            read_reward,
            config,
            rollouts.dataset(),
            rollout_func=rollouts,
            **kwargs,
        )
        self.trainer.remove_callback(PrinterCallback)
        for callback in (*callbacks, self.clock):
            self.trainer.add_callback(callback)

    def step(self) -> float:
        """Seconds of a step; the first call also takes the gradient and the memory, and its time means nothing."""
        self.trainer.train()
        self.clock.examine = False
        return self.clock.seconds


def distance(ours: Side, other: Side) -> float:
    """Norm of the gradients' difference over that of the other's gradient."""
    pairs = list(zip(ours.clock.gradient, other.clock.gradient, strict=True))
    difference = math.hypot(*((a.double() - b.double()).norm().item() for a, b in pairs))
    return difference / math.hypot(*(b.double().norm().item() for _, b in pairs))


def progress(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


class Bench:
    """The models, and the cases by name."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.repeat: int = args.repeat
        self.quick: bool = args.size == "tiny"
        self.student, self.teacher = make_models(args, folder)
        self.adapter = str(folder / "adapter")
        config = AutoConfig.from_pretrained(self.student)
        self.vocab_size: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.attention: int = config.num_attention_heads * head
        self.parameters: int = load(self.student).num_parameters()
        self.gemm = gemm_flops()
        lengths = exponential_lengths(args.rows, args.max_tokens)
        self.equal = Rollouts([args.equal_tokens] * args.equal_rows, self.vocab_size)
        self.equal_flat = Rollouts([args.equal_tokens] * args.equal_rows, self.vocab_size, flat=True)
        self.ragged = Rollouts(lengths, self.vocab_size)
        self.ragged_flat = Rollouts(lengths, self.vocab_size, flat=True)
        # against our own step, a few of them will do
        self.taught = Rollouts(exponential_lengths(min(args.rows, 16), args.max_tokens), self.vocab_size)
        self.cases: dict[str, Callable[[str], list[dict[str, Any]]]] = {
            **{
                f"equal lengths, {method}": lambda case, method=method: self.beside_stock(
                    case, method, self.equal, 1.02
                )
                for method in PAIRS
            },
            "exponential lengths": lambda case: self.beside_stock(case, "SAPO", self.ragged, 0.45),
            "half of the groups without reward spread, equal lengths": lambda case: self.beside_stock(
                case, "SAPO", self.equal_flat, 0.55
            ),
            "both: exponential lengths, half of the groups without reward spread": lambda case: self.beside_stock(
                case, "SAPO", self.ragged_flat, 0.27
            ),
            "SAF teacher, per generation batch": self.teacher_time,
            "SAF after the multiplier has reached 0": self.no_teacher_left,
            "LoRA student, adapter teacher: memory over LoRA-GRPO": self.adapter_memory,
        }
        self.cases["the loss alone"] = self.loss_alone

    def utilisation(self, rollouts: Rollouts, seconds: float) -> float:
        lengths = [len(row) for row, signal in zip(rollouts.rows, rollouts.signal, strict=True) if signal]
        # causal attention: two products of L^2 / 2 by width, forward and twice backward
        flops = sum(6 * self.parameters * n + 6 * self.layers * self.attention * n**2 for n in lengths)
        return flops / seconds / self.gemm

    def alternate(self, case: str, *steps: Callable[[], float]) -> list[tuple[float, ...]]:
        """Seconds of each, taking turns."""
        progress(f"{case}: warm-up")
        for step in steps:
            step()
        rounds = []
        for i in range(self.repeat):
            rounds.append(tuple(step() for step in steps))
            progress(f"{case}: {i + 1} of {self.repeat}, {' '.join(f'{value:.2f}' for value in rounds[-1])} s")
        return rounds

    def compare(self, case: str, bar: float, rollouts: Rollouts, ours: Side, other: Side) -> dict[str, Any]:
        rounds = self.alternate(case, other.step, ours.step)
        theirs, own = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [mine / their for their, mine in rounds]
        return {
            "case": case,
            "ratio": statistics.median(ratios),
            "bar": bar,
            "grad_rel_diff": distance(ours, other),
            "spread": [min(ratios), max(ratios)],
            "seconds": own,
            "other_seconds": theirs,
            "utilisation": self.utilisation(rollouts, own),
            "other_utilisation": self.utilisation(rollouts, theirs),
            "bytes": ours.clock.peak,
            "other_bytes": other.clock.peak,
            "rounds": rounds,
            "rows": len(rollouts.completions),
            "valid_share": rollouts.valid_share,
        }

    def beside_stock(self, case: str, method: str, rollouts: Rollouts, bar: float) -> list[dict[str, Any]]:
        trainer, config, settings, stock = PAIRS[method]
        result = self.compare(
            case,
            bar,
            rollouts,
            Side(trainer, config, self.student, rollouts, settings),
            Side(GRPOTrainer, GRPOConfig, self.student, rollouts, stock),
        )
        memory = {
            "case": f"{case}: memory of a step",
            "ratio": result["bytes"] / result["other_bytes"],
            "bar": 1.0,
            "grad_rel_diff": None,
        }
        return [result, memory]

    def teacher_time(self, case: str) -> list[dict[str, Any]]:
        """A SAF step's extra time, in forwards of the bare teacher over the same tokens without padding."""
        teacher = load(self.teacher).eval()
        add_fused_lm_head(teacher)
        batches = batches_without_padding(self.taught)

        @torch.no_grad()
        def bare() -> float:
            begin = now()
            for batch in batches:
                score(teacher, batch)
            return now() - begin

        grpo = Side(SAFDistillTrainer, SAFDistillConfig, self.student, self.taught, _NO_TEACHER)
        # untrained models find permuted completions as likely as any, which the self-test takes for an error
        settings = _NO_TEACHER | dict(opd_coef=1.0, opd_warmup_steps=0, teacher_self_test=False)
        saf = Side(
            SAFDistillTrainer, SAFDistillConfig, self.student, self.taught, settings, teacher_model=self.teacher
        )
        rounds = self.alternate(case, grpo.step, saf.step, bare)
        ratios = [(taught - own) / alone for own, taught, alone in rounds]
        own, taught, alone = (statistics.median(column) for column in zip(*rounds, strict=True))
        return [
            {
                "case": case,
                "ratio": statistics.median(ratios),
                "bar": 1.15,
                "grad_rel_diff": None,
                "spread": [min(ratios), max(ratios)],
                "seconds": taught,
                "other_seconds": own,
                "teacher_seconds": alone,
                "bytes": saf.clock.peak,
                "other_bytes": grpo.clock.peak,
                "rounds": rounds,
                "rows": len(self.taught.completions),
                "valid_share": self.taught.valid_share,
            }
        ]

    def no_teacher_left(self, case: str) -> list[dict[str, Any]]:
        """SAF whose teacher counts no more, over our own GRPO."""

        def teacher(request: Any) -> Any:
            raise AssertionError("The teacher was asked, although its answer cannot matter.")

        ended = AtItsEnd()
        ours = Side(
            SAFDistillTrainer,
            SAFDistillConfig,
            self.student,
            self.equal,
            _NO_TEACHER | dict(opd_coef=1.0, opd_warmup_steps=0, teacher_self_test=False),
            callbacks=(ended,),
            teacher_model=teacher,
        )
        ended.trainer = ours.trainer
        grpo = Side(SAFDistillTrainer, SAFDistillConfig, self.student, self.equal, _NO_TEACHER)
        return [self.compare(case, 1.02, self.equal, ours, grpo)]

    def adapter_memory(self, case: str) -> list[dict[str, Any]]:
        """What the teacher adds to a LoRA step's peak, and itself, over its own size and what one batch of it takes.

        That is the peak of the same forward by itself: four rows, without gradients.
        """
        progress(case)
        get_peft_model(load(self.student), LoraConfig(target_modules="all-linear")).save_pretrained(self.adapter)
        size = sum(file.stat().st_size for file in Path(self.adapter).glob("*.safetensors"))
        batch = torch.tensor(self.equal.rows[:MICRO_BATCH])
        adapter = dict(
            opd_coef=1.0,
            opd_warmup_steps=0,
            teacher_self_test=False,
            teacher_adapter=self.adapter,
            teacher_max_tokens_per_batch=batch.numel(),
        )
        grpo, saf = (
            Side(
                SAFDistillTrainer,
                SAFDistillConfig,
                self.student,
                self.equal,
                _NO_TEACHER | settings,
                peft_config=LoraConfig(target_modules="all-linear"),
            )
            for settings in ({}, adapter)
        )
        grpo.step()
        saf.step()
        with PeakMemory() as chunk, torch.no_grad():
            score(grpo.trainer.model, batch)
        extra = saf.clock.peak - grpo.clock.peak + size
        return [
            {
                "case": case,
                "ratio": extra / (size + chunk.bytes),
                "bar": 1.0,
                "grad_rel_diff": None,
                "bytes": saf.clock.peak,
                "other_bytes": grpo.clock.peak,
                "extra_bytes": extra,
                "adapter_bytes": size,
                "chunk_bytes": chunk.bytes,
            }
        ]

    def loss_alone(self, case: str) -> list[dict[str, Any]]:
        progress(case)
        return loss_cost.run(torch.get_num_threads(), quick=self.quick)


class _Ended(FusionSchedule):
    """A run of one step has no end that differs from its beginning."""

    def coefficient(self, step: int) -> float:
        return 0.0


class AtItsEnd(TrainerCallback):
    """Puts the trainer where the teacher's term has been annealed to 0."""

    trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.fusion_schedule = _Ended(max_steps=1, warmup_steps=0)


def batches_without_padding(rollouts: Rollouts) -> list[torch.Tensor]:
    """Rows of equal length together, within the teacher's default number of tokens per batch."""
    limit = SAFDistillConfig.teacher_max_tokens_per_batch
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for row in rollouts.rows:
        by_length[len(row)].append(row)
    batches = []
    for length, rows in by_length.items():
        batches += torch.tensor(rows).split(max(1, limit // length))
    return batches


def score(model: Any, ids: torch.Tensor) -> torch.Tensor:
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return fused_log_probs(model)(ids, torch.ones_like(ids), labels)


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def make_models(args: argparse.Namespace, folder: Path) -> tuple[str, str]:
    """Folders of student and teacher: random weights of the chosen size, or the given model as both."""
    shape = SIZES[args.size].model
    if shape is None:
        return args.model, args.model
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, shape["vocab_size"]))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    options: dict[str, Any] = dict(
        shape,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    for seed, name in enumerate(("student", "teacher")):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(Qwen3Config(**options)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "student"), str(folder / "teacher")


def gemm_flops(side: int = 1536, tries: int = 5) -> float:
    """Operations per second of the fastest of some float32 matrix products."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    seconds = []
    for _ in range(tries):
        begin = now()
        torch.mm(a, b)
        seconds.append(now() - begin)
    return 2 * side**3 / min(seconds)


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def print_table(results: list[dict[str, Any]], title: str) -> None:
    table = Table("case", "ratio", "spread", "bar", "seconds", "utilisation", "peak MiB", "gradient", title=title)

    def both(result: dict[str, Any], name: str, show: Callable[[float], str]) -> str:
        if f"other_{name}" not in result:
            return ""
        return f"{show(result[name])} / {show(result['other_' + name])}"

    for result in results:
        spread = result.get("spread")
        table.add_row(
            result["case"],
            f"{result['ratio']:.3f}",
            f"{spread[0]:.3f}-{spread[1]:.3f}" if spread else "",
            "" if result["bar"] is None else f"{result['bar']:.2f}",
            both(result, "seconds", lambda seconds: f"{seconds:.3g}"),
            both(result, "utilisation", lambda share: f"{share:.0%}"),
            both(result, "bytes", lambda size: f"{size / 2**20:.0f}"),
            "" if result["grad_rel_diff"] is None else f"{result['grad_rel_diff']:.0e}",
        )
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="30m")
    parser.add_argument("--model", help="folder of the model for --size smollm2")
    parser.add_argument("--cases", nargs="+", help="how the names of the cases begin; default: all")
    parser.add_argument("--repeat", type=int, default=3, help="timed steps of each, after one that warms up")
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own number")
    for name, text in (
        ("equal_rows", "rows of the cases with equal lengths"),
        ("equal_tokens", "tokens of their completions"),
        ("rows", "rows of the cases with exponential lengths"),
        ("max_tokens", "tokens of their longest completion; the mean is a quarter"),
    ):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--output", default="benchmarks/out/bench.json")
    args = parser.parse_args()
    for name in ("equal_rows", "equal_tokens", "rows", "max_tokens"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(SIZES[args.size], name))
    if (args.size == "smollm2") != (args.model is not None):
        parser.error("--size smollm2 and --model belong together")
    # groups with and without signal, whole micro-batches
    if args.equal_rows % (2 * GROUP) or args.rows % (2 * GROUP):
        parser.error(f"the number of rows must be a multiple of {2 * GROUP}")
    if args.threads:
        torch.set_num_threads(args.threads)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # of rollout_func
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    # what was imported stays: the collections before each step need not look at it
    gc.freeze()

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for case, run in bench.cases.items():
            if args.cases is None or case.startswith(tuple(args.cases)):
                results += run(case)
                gc.collect()
    if not results:
        parser.error(f"no case begins with that; there are: {', '.join(bench.cases)}")
    results = [{"grad_rel_diff": None, **result} for result in results]

    print_table(results, f"ours / the other's, {bench.parameters / 1e6:.1f}M parameters")
    environment = {
        "torch": torch.__version__,
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "size": args.size,
        "parameters": bench.parameters,
        "repeat": args.repeat,
        "gemm_gflops": bench.gemm / 1e9,
    }
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps({"cases": results, "environment": environment}, indent=1) + "\n")


if __name__ == "__main__":
    main()
