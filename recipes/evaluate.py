"""Evaluate a model or a LoRA adapter on a task: avg@k and pass@k, with bootstrap intervals over the problems.

As the papers do it: 32 completions at temperature 1 for AIME and HMMT (avg@32), greedy for HumanEval+ and MBPP+,
4 completions for LiveCodeBench v6 (pass@4). Each known data set brings its own numbers, which options override:

    python recipes/evaluate.py --model_name_or_path runs/qwen3_4b_math_saf --dataset_name aime25 --backend vllm
    python recipes/evaluate.py --model_name_or_path runs/qwen3_4b_code_saf --dataset_name livecodebench_v6 \\
        --backend vllm
    python recipes/evaluate.py --model_name_or_path runs/smollm2/saf --task_name chain_sum --samples 8 \\
        --system_prompt 'Answer with the number only.' --task_config '{"max_terms": 2, "max_digits": 2}' \\
        --task_seed 1000000 --train_size 100 --max_new_tokens 12

All problems of the split are evaluated, or `--train_size` of them. `--output_dir` gets `results.json` and, with a line
for each completion, `completions.jsonl`. Options can also come from `--config FILE.yaml`.

For numbers to compare with a leaderboard, take its own harness, on a merged model (`trl-softgate merge`). This is the
line of lighteval 0.13 for the mean over 64 completions of each problem:

    lighteval vllm "model_name=MODEL,dtype=bfloat16,max_model_length=18432,\\
generation_parameters={temperature:1.0,top_p:1.0,max_new_tokens:16384}" aime25_avg
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Mistake, RecipeParser, check_model, fail, load_tokenizer, one_sentence
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from trl_softgate.environment import versions
from trl_softgate.evaluation import metrics, metrics_table
from trl_softgate.export import DTYPES, merge_adapter
from trl_softgate.tasks.known import KNOWN
from trl_softgate.tasks.loading import Task, TaskArguments, load_task
from trl_softgate.validation import require_choice, require_number, require_whole


@dataclass
class EvaluationArguments:
    """Which model is evaluated, and how its completions are drawn.

    Raises:
        ValueError: a value is out of range.
    """

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name of the model, or folder of a LoRA adapter."}
    )
    model_revision: str | None = field(default=None, metadata={"help": "Revision of the model on the hub."})
    backend: str = field(default="transformers", metadata={"help": "What generates: 'transformers' or 'vllm'."})
    dtype: str = field(
        default="auto", metadata={"help": "Of the weights: 'auto' (as stored), 'bfloat16', 'float16' or 'float32'."}
    )
    samples: int | None = field(
        default=None, metadata={"help": "Completions of each problem. None: the data set's own, else 1."}
    )
    temperature: float | None = field(
        default=None, metadata={"help": "0 is greedy. None: the data set's own, else 1 for several samples and 0."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Share of the probability that tokens are drawn from."})
    max_new_tokens: int = field(default=16384, metadata={"help": "Tokens of a completion."})
    pass_k: list[int] | None = field(
        default=None, metadata={"help": "k of each pass@k. None: 1 and the number of samples."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Variables of the chat template, for example '{\"enable_thinking\": false}'."}
    )
    batch_size: int = field(default=16, metadata={"help": "Completions at a time (transformers)."})
    tensor_parallel_size: int = field(default=1, metadata={"help": "GPUs that share the model (vLLM)."})
    gpu_memory_utilization: float = field(default=0.9, metadata={"help": "Share of the GPU's memory (vLLM)."})
    enforce_eager: bool = field(
        default=False, metadata={"help": "No compilation and no CUDA graphs: starts faster, runs slower (vLLM)."}
    )
    bootstrap_resamples: int = field(default=10_000, metadata={"help": "Draws of the bootstrap."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling and of the bootstrap."})
    output_dir: str = field(default="runs/evaluation", metadata={"help": "Folder of the results."})

    def __post_init__(self) -> None:
        require_choice("backend", self.backend, ("transformers", "vllm"))
        require_choice("dtype", self.dtype, DTYPES)
        if self.samples is not None:
            require_whole("samples", self.samples, minimum=1)
        if self.temperature is not None:
            require_number("temperature", self.temperature, minimum=0)
        require_number("top_p", self.top_p, above=0, maximum=1)
        for name in ("max_new_tokens", "batch_size", "tensor_parallel_size", "bootstrap_resamples"):
            require_whole(name, getattr(self, name), minimum=1)
        if isinstance(self.chat_template_kwargs, str):
            try:
                self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
            except json.JSONDecodeError as error:
                raise ValueError(f"chat_template_kwargs must be a JSON object: {error}") from error


@dataclass(frozen=True)
class Completion:
    """`tokens` without the end-of-sequence token; `truncated` if it does not have one."""

    text: str
    tokens: int
    truncated: bool


@dataclass(frozen=True)
class Decoding:
    """`temperature` 0 is greedy."""

    samples: int
    temperature: float
    top_p: float
    max_new_tokens: int
    passes: tuple[int, ...]


def decoding_of(args: EvaluationArguments, task_args: TaskArguments) -> Decoding:
    """The papers' decoding of a known data set, with what the options say in its place.

    Raises:
        Mistake: several greedy completions, which would be the same, or a k above the number of samples.
    """
    known = KNOWN.get(task_args.dataset_name or "")
    samples = args.samples or (known.samples if known else 1)
    temperature = args.temperature
    if temperature is None:
        # several samples of a data set that the papers decode greedily are drawn at temperature 1, too
        temperature = known.temperature if known and known.samples > 1 else float(samples > 1)
    if temperature == 0 and samples > 1:
        raise Mistake(f"{samples} greedy completions are the same: set temperature 1, or samples 1.")
    passes = tuple(args.pass_k or dict.fromkeys((1, samples)))
    for k in passes:
        if not 1 <= k <= samples:
            raise Mistake(f"pass_k {k} must be between 1 and the {samples} samples of a problem.")
    return Decoding(samples, temperature, args.top_p, args.max_new_tokens, passes)


def resolve(name: str, revision: str | None) -> tuple[str, str | None, str]:
    """Base model, folder of the adapter or None, and where the tokenizer is.

    Raises:
        Mistake: there is no such model.
    """
    from peft import PeftConfig

    folder = Path(name)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        base = PeftConfig.from_pretrained(name).base_model_name_or_path
        if not base:
            raise Mistake(f"The adapter {name} does not say which model it belongs to.")
        check_model(base, "the base model of the adapter")
        return base, name, name if any(folder.glob("tokenizer*")) else base
    check_model(name, "model_name_or_path", revision)
    return name, None, name


def with_transformers(
    args: EvaluationArguments, decoding: Decoding, tokenizer: Any, prompts: list[list[int]]
) -> Iterator[tuple[int, Completion]]:
    """Index of the prompt and a completion of it, `samples` times for each."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, set_seed

    assert args.model_name_or_path is not None
    base, adapter, _ = resolve(args.model_name_or_path, args.model_revision)
    model: Any = AutoModelForCausalLM.from_pretrained(base, revision=args.model_revision, dtype=args.dtype)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
    ends = sorted(end for end in ends if end is not None)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    greedy = decoding.temperature == 0
    # in place of the model's own, whose top-k and temperature would fill what is left open here
    model.generation_config = GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        do_sample=not greedy,
        eos_token_id=ends,
        pad_token_id=padding,
        **({} if greedy else dict(temperature=decoding.temperature, top_p=decoding.top_p, top_k=0)),
    )
    set_seed(args.seed)
    # prompts of like length together: less padding
    rows = sorted((i for i in range(len(prompts)) for _ in range(decoding.samples)), key=lambda i: len(prompts[i]))
    for start in range(0, len(rows), args.batch_size):
        batch = rows[start : start + args.batch_size]
        width = max(len(prompts[i]) for i in batch)
        ids = torch.tensor([[padding] * (width - len(prompts[i])) + prompts[i] for i in batch], device=model.device)
        mask = torch.tensor(
            [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch], device=model.device
        )
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask)[:, width:].tolist()
        for i, row in zip(batch, output, strict=True):
            end = next((place for place, token in enumerate(row) if token in ends), None)
            kept = row[:end]
            yield i, Completion(tokenizer.decode(kept, skip_special_tokens=True), len(kept), end is None)


def with_vllm(
    args: EvaluationArguments, decoding: Decoding, tokenizer: Any, prompts: list[list[int]]
) -> Iterator[tuple[int, Completion]]:
    """As `with_transformers`."""
    try:
        from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Mistake(
            "vLLM is not installed: pip install -e '.[vllm]' in an environment of its own, or --backend transformers."
        ) from error
    assert args.model_name_or_path is not None
    base, adapter, _ = resolve(args.model_name_or_path, args.model_revision)
    revision = args.model_revision
    with tempfile.TemporaryDirectory(dir=args.output_dir) as merged:
        if adapter is not None:  # vLLM's own LoRA takes fewer kinds and ranks
            base, revision = str(merge_adapter(Path(adapter), Path(merged) / "model", dtype=args.dtype)), None
        engine = LLM(
            model=base,
            revision=revision,
            dtype=args.dtype,
            tensor_parallel_size=args.tensor_parallel_size,
            gpu_memory_utilization=args.gpu_memory_utilization,
            enforce_eager=args.enforce_eager,
            max_model_len=max(map(len, prompts)) + decoding.max_new_tokens,
            seed=args.seed,
        )
    sampling = SamplingParams(
        n=decoding.samples,
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        max_tokens=decoding.max_new_tokens,  # no seed of its own: every problem would draw the same numbers
    )
    # several problems at a time keep the engine busy, and the progress bar moving
    at_once = max(1, 1024 // decoding.samples)
    for start in range(0, len(prompts), at_once):
        chunk = [{"prompt_token_ids": ids} for ids in prompts[start : start + at_once]]
        outputs = engine.generate(chunk, sampling, use_tqdm=False)
        for i, output in enumerate(outputs, start):
            for one in output.outputs:
                ended = one.finish_reason == "stop"
                kept = one.token_ids[: len(one.token_ids) - ended]
                yield i, Completion(tokenizer.decode(kept, skip_special_tokens=True), len(kept), not ended)


def score(task: Task, completions: list[list[Completion]]) -> list[list[float]]:
    """Score of each completion of each problem, by the task's reward function."""
    columns = {name: task.train_dataset[name] for name in task.train_dataset.column_names}
    columns["prompts"] = columns.pop("prompt")  # as TRL names it
    repeated = {
        name: [value for value, row in zip(values, completions, strict=True) for _ in row]
        for name, values in columns.items()
    }
    flat = [[{"role": "assistant", "content": one.text}] for row in completions for one in row]
    scores = iter(task.reward_func(completions=flat, **repeated))
    return [[float(next(scores)) for _ in row] for row in completions]


def evaluate(task_args: TaskArguments, args: EvaluationArguments, console: Console) -> dict[str, Any]:
    """Generate, score, and write `results.json` and `completions.jsonl`; what the first holds is returned.

    Raises:
        Mistake: a model, task or option that does not fit, found before the model is loaded.
    """
    if args.model_name_or_path is None:
        raise Mistake("Name the model: --model_name_or_path FOLDER, or the name of one on the hub.")
    decoding = decoding_of(args, task_args)
    tokenizer: Any = load_tokenizer(resolve(args.model_name_or_path, args.model_revision)[2], args.model_revision)
    try:
        task = load_task(task_args, tokenizer)
    except (ValueError, ImportError, OSError) as error:
        raise Mistake(one_sentence(error)) from error
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"output_dir must be a folder, but {folder} is a file.")
    folder.mkdir(parents=True, exist_ok=True)

    options = args.chat_template_kwargs or {}
    assert isinstance(options, dict)
    prompts: list[list[int]] = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **options)[
            "input_ids"
        ]
        for prompt in task.train_dataset["prompt"]
    ]
    began = time.perf_counter()
    completions: list[list[Completion]] = [[] for _ in prompts]
    generate = with_vllm if args.backend == "vllm" else with_transformers
    with Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("Completions", total=len(prompts) * decoding.samples)
        for i, completion in generate(args, decoding, tokenizer, prompts):
            completions[i].append(completion)
            progress.advance(bar)
    with console.status("Scoring"):
        scores = score(task, completions)

    with (folder / "completions.jsonl").open("w", encoding="utf-8") as lines:
        for i, (prompt, row) in enumerate(zip(task.train_dataset["prompt"], completions, strict=True)):
            for one, points in zip(row, scores[i], strict=True):
                line = {"problem": i, "prompt": prompt, "completion": one.text, "score": points}
                line |= {"tokens": one.tokens, "truncated": one.truncated}
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    found = metrics(scores, decoding.passes, resamples=args.bootstrap_resamples, seed=args.seed)  # pyright: ignore[reportArgumentType]
    every = [one for row in completions for one in row]
    results = {
        "model": args.model_name_or_path,
        "task": {name: value for name, value in dataclasses.asdict(task_args).items() if value is not None},
        "decoding": dataclasses.asdict(decoding),
        "backend": args.backend,
        "problems": len(prompts),
        "metrics": {metric.name: [metric.value, metric.low, metric.high] for metric in found},
        "mean_tokens": sum(one.tokens for one in every) / len(every),
        "truncated_share": sum(one.truncated for one in every) / len(every),
        "seconds": time.perf_counter() - began,
        "versions": versions(),
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    title = f"{args.model_name_or_path} on {task_args.dataset_name or task_args.task_name}, {len(prompts)} problems"
    console.print(metrics_table(found, title))
    if results["truncated_share"] > 0:
        console.print(
            f"{results['truncated_share']:.0%} of the completions were cut at {decoding.max_new_tokens} tokens."
        )
    console.print(f"Written to {folder}.", highlight=False)
    return results


def main() -> None:
    parser = RecipeParser((TaskArguments, EvaluationArguments), description=__doc__)  # pyright: ignore[reportArgumentType]
    try:
        task_args, args = parser.parse_args_and_config()
        evaluate(task_args, args, Console())
    except Mistake as problem:
        fail(problem)


if __name__ == "__main__":
    main()
