"""Tasks of the `reasoning-gym` package as a prompt dataset plus the task's own scorer as a reward function."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

RewardFunction = Callable[..., list[float]]


@dataclass
class ReasoningGymArguments:
    """Which reasoning-gym task a script trains on; made for `trl.TrlParser`.

    Raises:
        ValueError: `task_config` is not a JSON object.
    """

    task_name: str = field(metadata={"help": "Name of the reasoning-gym task, for example chain_sum."})
    task_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Options of the task as a YAML mapping or a JSON string, for example '{\"max_terms\": 3}'."},
    )
    train_size: int = field(default=1000, metadata={"help": "Number of training problems."})
    eval_size: int = field(default=0, metadata={"help": "Number of further problems kept for evaluation. 0: none."})
    task_seed: int = field(
        default=0,
        metadata={"help": "Seed of the generator. Tasks draw problem i from seed + i, so close seeds share problems."},
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "System message. None: the default of the chat template, if it has one."}
    )

    def __post_init__(self) -> None:
        if isinstance(self.task_config, str):
            try:
                self.task_config = json.loads(self.task_config)
            except json.JSONDecodeError as error:
                raise ValueError(f"task_config must be a JSON object, got {self.task_config!r}: {error}") from error
        if self.task_config is not None and not isinstance(self.task_config, dict):
            raise ValueError(f"task_config must be a mapping of the task's options, got {self.task_config!r}.")


@dataclass(frozen=True)
class ReasoningGymTask:
    """What a trainer needs of a task.

    Attributes:
        train_dataset: columns `prompt` (a list of chat messages), `answer` (str or None where the task has no single
            answer) and `task_index` (int, what the reward function finds its problem by).
        eval_dataset: the same columns, or None with `eval_size=0`. Its indices are others than those of the training
            set; a task with few distinct questions may still repeat some.
        reward_func: the task's own scorer over the completions, in [0, 1] for nearly all tasks. It is called by the
            trainer and reads the column `task_index`; its `__name__` is the task's name, so TRL logs
            `rewards/<task>/mean`.
    """

    train_dataset: Dataset
    eval_dataset: Dataset | None
    reward_func: RewardFunction


def load_task(args: ReasoningGymArguments) -> ReasoningGymTask:
    """Generate the problems of a reasoning-gym task and bind its scorer.

    The completion, stripped of surrounding blanks, is scored whole: ask for a bare answer in the system prompt.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: unknown task, an option that the task does not have or refuses, or a size below its minimum
            (1 for training, 0 for evaluation).
    """
    if args.train_size < 1 or args.eval_size < 0:
        raise ValueError(
            f"train_size must be at least 1 and eval_size at least 0, got {args.train_size} and {args.eval_size}."
        )
    assert not isinstance(args.task_config, str)  # decoded on construction
    problems = _create(args.task_name, args.task_config or {}, args.train_size + args.eval_size, args.task_seed)
    # Kept in memory: the scorer needs the metadata, whose types differ from row to row, which no Arrow table holds.
    entries = [problems[index] for index in range(args.train_size + args.eval_size)]

    def reward(completions: list[Any], task_index: list[int], **_: Any) -> list[float]:
        texts = [
            completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions
        ]
        return [
            float(problems.score_answer(text.strip(), entries[index]))
            for text, index in zip(texts, task_index, strict=True)
        ]

    reward.__name__ = args.task_name
    train = range(args.train_size)
    held_out = range(args.train_size, args.train_size + args.eval_size)
    return ReasoningGymTask(
        train_dataset=_to_dataset(entries, train, args.system_prompt),
        eval_dataset=_to_dataset(entries, held_out, args.system_prompt) if held_out else None,
        reward_func=reward,
    )


def _create(name: str, config: dict[str, Any], size: int, seed: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ImportError(
            "This task comes with reasoning-gym, which is not installed. Run, in the clone: "
            "pip install -c constraints.txt -e '.[tasks]'"
        ) from error
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5)
        hint = f"Did you mean {', '.join(close)}?" if close else f"Available tasks: {', '.join(sorted(DATASETS))}."
        raise ValueError(f"reasoning-gym has no task named {name!r}. {hint}")
    reserved = {"size": "train_size and eval_size", "seed": "task_seed"}
    for key in reserved.keys() & config.keys():
        raise ValueError(f"task_config may not set {key!r}; use {reserved[key]}.")
    options = sorted(option.name for option in fields(DATASETS[name][1]) if option.name not in reserved)
    unknown = sorted(config.keys() - set(options))
    if unknown:
        raise ValueError(
            f"The task {name!r} has no option {', '.join(map(repr, unknown))}. Its options: {', '.join(options)}."
        )
    try:
        return create_dataset(name, size=size, seed=seed, **config)
    except AssertionError as error:  # how the tasks report an option out of range
        raise ValueError(f"The task {name!r} refuses task_config={config!r}: {error}") from error


def _to_dataset(entries: list[dict[str, Any]], indices: range, system_prompt: str | None) -> Dataset:
    from datasets import Dataset

    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return Dataset.from_list(
        [
            {
                "prompt": [*system, {"role": "user", "content": entries[index]["question"]}],
                "answer": entries[index]["answer"],
                "task_index": index,
            }
            for index in indices
        ]
    )
