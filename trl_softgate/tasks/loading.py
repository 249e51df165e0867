"""The task of a recipe: prompts and the reward function that scores their completions.

A task is one of reasoning-gym's, one of the data sets in `known.KNOWN`, or a file of the user's own. All of it is read
and checked before a model is loaded.
"""

from __future__ import annotations

import difflib
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..validation import require_whole
from .known import BOXED, KNOWN, KnownDataset

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

RewardFunction = Callable[..., list[float]]

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SUFFIXES = ".jsonl, .json or .parquet"
_GYM_SIZE = 1000

_OF_GYM = {"task_config"}
_OF_DATASETS = {"dataset_path", "dataset_split", "dataset_revision", "min_difficulty"}
_OF_DATASETS |= {"reward_workers", "reward_timeout", "code_memory_mb", "allow_unsandboxed_code"}


@dataclass
class TaskArguments:
    """Which problems a script works on and how answers are scored; made for `trl.TrlParser`.

    Raises:
        ValueError: neither or both of `task_name` and `dataset_name`, an option that the chosen one has no use for, or
            a value out of range.
    """

    task_name: str | None = field(
        default=None, metadata={"help": "Name of a reasoning-gym task, for example chain_sum. Or name a dataset_name."}
    )
    task_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Options of the reasoning-gym task as a YAML mapping or a JSON string, for example "
            "'{\"max_terms\": 3}'."
        },
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": f"One of {', '.join(KNOWN)}; or the path of a .jsonl, .json or .parquet file of your own with the "
            "columns `prompt` (text or chat messages) and `answer`."
        },
    )
    dataset_path: str | None = field(
        default=None,
        metadata={"help": "Local file or folder that stands in for the hub's data set, with the same columns."},
    )
    dataset_split: str | None = field(
        default=None, metadata={"help": "Split of the data set. None: the data set's own default."}
    )
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Revision of the hub's data set: a commit, branch or tag. None: the newest."}
    )
    min_difficulty: float | None = field(
        default=None,
        metadata={
            "help": "Problems below this `difficulty` are left out. None: the data set's default (deepmath: 6, as in "
            "the SAF paper; others: no limit)."
        },
    )
    train_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of training problems, drawn with task_seed. None: all that are left of a data set, "
            f"{_GYM_SIZE} of a reasoning-gym task."
        },
    )
    eval_size: int = field(default=0, metadata={"help": "Number of further problems kept for evaluation. 0: none."})
    task_seed: int = field(
        default=0,
        metadata={
            "help": "Seed of the draw, or of the generator: reasoning-gym draws problem i from seed + i, so close "
            "seeds share problems."
        },
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "System message. None: the default of the chat template, if it has one."}
    )
    instruction: str | None = field(
        default=None,
        metadata={
            "help": "Text added to each problem, after a blank line. None: that of the data set (for math: "
            f"'{BOXED}'); '' for none.".replace("%", "%%")
        },
    )
    max_prompt_tokens: int | None = field(
        default=None,
        metadata={"help": "Problems whose prompt has more tokens are dropped, and counted. None: no limit."},
    )
    reward_workers: int | None = field(
        default=None, metadata={"help": "Answers or programs graded at the same time. None: one per CPU core."}
    )
    reward_timeout: float = field(
        default=10.0, metadata={"help": "Seconds for one answer, or for one program on one test or suite of asserts."}
    )
    code_memory_mb: int = field(default=1024, metadata={"help": "Memory of a program under test, in MiB."})
    allow_unsandboxed_code: bool = field(
        default=False,
        metadata={
            "help": "Where bubblewrap is missing, run programs that the model wrote without it: they can do all that "
            "you can."
        },
    )

    def __post_init__(self) -> None:
        if isinstance(self.task_config, str):
            try:
                self.task_config = json.loads(self.task_config)
            except json.JSONDecodeError as error:
                raise ValueError(f"task_config must be a JSON object, got {self.task_config!r}: {error}") from error
        if (self.task_name is None) == (self.dataset_name is None):
            given = "neither" if self.task_name is None else "both"
            raise ValueError(
                f"Name either a reasoning-gym task (task_name) or a data set (dataset_name), got {given}."
            )
        chosen, others = ("task_name", _OF_DATASETS) if self.dataset_name is None else ("dataset_name", _OF_GYM)
        for option in fields(self):
            if option.name in others and getattr(self, option.name) != option.default:
                raise ValueError(f"{option.name} has no effect with {chosen}: leave it out.")
        if self.dataset_path is not None and self.dataset_name not in KNOWN:
            raise ValueError("dataset_path stands in for a data set of the hub; name your own file as dataset_name.")
        if self.dataset_revision is not None and (self.dataset_path is not None or self.dataset_name not in KNOWN):
            raise ValueError("dataset_revision is one of the hub's: leave it out for a local file or folder.")
        if self.dataset_split is not None and self.dataset_name in KNOWN and KNOWN[self.dataset_name].data_files:
            raise ValueError(f"{self.dataset_name} has no splits: leave dataset_split out.")
        if self.train_size is not None:
            require_whole("train_size", self.train_size, minimum=1)
        require_whole("eval_size", self.eval_size, minimum=0)
        if self.max_prompt_tokens is not None:
            require_whole("max_prompt_tokens", self.max_prompt_tokens, minimum=1)


@dataclass(frozen=True)
class Task:
    """What a trainer needs of a task.

    Attributes:
        train_dataset: `prompt` (a list of chat messages) and the columns that `reward_func` reads.
        eval_dataset: the same columns, other rows; None with `eval_size=0`.
        reward_func: `reward(completions, **columns)` -> one float per completion, in [0, 1] for nearly all tasks.
            TRL logs it as `rewards/<__name__>/mean`.
    """

    train_dataset: Dataset
    eval_dataset: Dataset | None
    reward_func: RewardFunction


def load_task(args: TaskArguments, processing_class: PreTrainedTokenizerBase | None = None) -> Task:
    """Read or generate the problems and bind their reward.

    Args:
        args: which problems.
        processing_class: the tokenizer of the model, needed for `max_prompt_tokens` only; if given, it must have a
            chat template.

    Raises:
        ImportError: reasoning-gym or math-verify is not installed.
        ValueError: an unknown name, a file that is missing or cannot be read, columns that are missing, fewer problems
            than asked for, no sandbox for programs, or a tokenizer that does not do. One sentence says what to write
            instead.
    """
    if processing_class is not None and getattr(processing_class, "chat_template", None) is None:
        raise ValueError(
            "The tokenizer has no chat template, which the problems, chat messages, need: train an instruct model, or "
            "set its chat_template."
        )
    if args.max_prompt_tokens is not None and processing_class is None:
        raise ValueError("max_prompt_tokens needs the tokenizer: call load_task(args, processing_class=tokenizer).")
    if args.task_name is not None:
        return _load_gym(args, processing_class)

    assert args.dataset_name is not None
    known = KNOWN.get(args.dataset_name)
    source = None if known is not None else _own_file(args.dataset_name)
    reward = _reward(args, "math" if known is None else known.kind)
    if known is not None:
        rows = _select(_read(args, known), known.columns, args.min_difficulty, known.min_difficulty, args.dataset_name)
        problems = _convert(rows, known, args)
    else:
        assert source is not None
        rows = _select(
            _read_local(source, None, args.dataset_split), ("prompt", "answer"), args.min_difficulty, None, str(source)
        )
        problems = _convert(rows, None, args)
    if len(problems) == 0:
        raise ValueError(f"No problem is left of {args.dataset_name}: lower min_difficulty or choose another split.")
    problems = _drop_long(problems, args.max_prompt_tokens, processing_class)

    train_size = len(problems) - args.eval_size if args.train_size is None else args.train_size
    if train_size < 1 or train_size + args.eval_size > len(problems):
        raise ValueError(
            f"train_size {args.train_size} and eval_size {args.eval_size} ask for more problems than the "
            f"{len(problems)} that are left of {args.dataset_name}: lower them, or leave train_size out for all."
        )
    if train_size == len(problems):
        return Task(problems, None, reward)
    drawn = random.Random(args.task_seed).sample(range(len(problems)), train_size + args.eval_size)
    return Task(
        train_dataset=problems.select(drawn[:train_size]),
        eval_dataset=problems.select(drawn[train_size:]) if args.eval_size else None,
        reward_func=reward,
    )


def _load_gym(args: TaskArguments, processing_class: PreTrainedTokenizerBase | None) -> Task:
    from ..rewards import reasoning_gym

    assert args.task_name is not None
    task = reasoning_gym.load_task(
        reasoning_gym.ReasoningGymArguments(
            task_name=args.task_name,
            task_config=args.task_config,
            train_size=_GYM_SIZE if args.train_size is None else args.train_size,
            eval_size=args.eval_size,
            task_seed=args.task_seed,
            system_prompt=args.system_prompt,
        )
    )

    def finish(dataset: Dataset) -> Dataset:
        if args.instruction:
            instruction = args.instruction
            prompts = [_instruct(prompt, instruction) for prompt in dataset["prompt"]]
            dataset = dataset.remove_columns("prompt").add_column("prompt", prompts)  # pyright: ignore[reportCallIssue]
        return _drop_long(dataset, args.max_prompt_tokens, processing_class)

    return Task(
        train_dataset=finish(task.train_dataset),
        eval_dataset=None if task.eval_dataset is None else finish(task.eval_dataset),
        reward_func=task.reward_func,
    )


def _reward(args: TaskArguments, kind: str) -> RewardFunction:
    if kind == "math":
        from ..rewards.math import MathReward

        return MathReward(timeout=args.reward_timeout, workers=args.reward_workers)
    from ..rewards.code import code_reward

    return code_reward(
        timeout=args.reward_timeout,
        memory_mb=args.code_memory_mb,
        workers=args.reward_workers,
        allow_unsandboxed=args.allow_unsandboxed_code,
    )


def _own_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in _READERS:
        return path
    if path.exists():
        raise ValueError(f"dataset_name must be a {_SUFFIXES} file or the name of a data set, got {name!r}.")
    if path.suffix in _READERS:
        raise ValueError(f"There is no file {name!r}: correct dataset_name.")
    close = difflib.get_close_matches(name.lower(), KNOWN, n=3, cutoff=0.5)
    close += [known for known, entry in KNOWN.items() if entry.hub.lower() == name.lower() and known not in close]
    hint = f"Did you mean {', '.join(close)}?" if close else f"Known are {', '.join(KNOWN)}, and {_SUFFIXES} files."
    raise ValueError(f"There is no data set named {name!r}. {hint}")


def _read(args: TaskArguments, known: KnownDataset) -> Dataset:
    from datasets import load_dataset

    if args.dataset_path is not None:
        return _read_local(Path(args.dataset_path).expanduser(), known, args.dataset_split)
    try:
        if known.data_files:
            revision = "" if args.dataset_revision is None else f"@{args.dataset_revision}"
            files = [f"hf://datasets/{known.hub}{revision}/{file}" for file in known.data_files]
            return load_dataset("json", data_files=files, split="train")
        split = args.dataset_split or known.split
        return load_dataset(known.hub, known.config, split=split, revision=args.dataset_revision)
    except Exception as error:  # of many kinds: the hub, the network, a split
        raise ValueError(
            f"{known.hub} cannot be loaded from the hub; a local copy can stand in as dataset_path. "
            f"({type(error).__name__}: {error})"
        ) from error


def _read_local(path: Path, known: KnownDataset | None, split: str | None) -> Dataset:
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    if not path.exists():
        raise ValueError(f"There is no file or folder {str(path)!r}: correct dataset_path.")
    if path.is_file() and path.suffix not in _READERS:
        raise ValueError(f"dataset_path must be a {_SUFFIXES} file or a folder, got {str(path)!r}.")
    if path.is_file() and split is not None:
        raise ValueError("A single file has no splits: leave dataset_split out.")
    try:
        if path.is_file():
            return load_dataset(_READERS[path.suffix], data_files=str(path), split="train")
        assert known is not None
        if known.data_files:
            return load_dataset("json", data_files=[str(path / file) for file in known.data_files], split="train")
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            saved = load_from_disk(path)
            loaded = saved[split or known.split] if isinstance(saved, DatasetDict) else saved
            assert isinstance(loaded, Dataset)
            return loaded
        config = known.config if (path / "README.md").exists() else None  # which names a copy's configurations
        return load_dataset(str(path), config, split=split or known.split)
    except Exception as error:  # pyarrow's, the builders' and the splits'
        cause = error.__cause__ or error
        raise ValueError(f"{str(path)!r} cannot be read as a data set ({type(cause).__name__}: {cause}).") from error


def _select(
    rows: Dataset, columns: tuple[str, ...], wanted: float | None, default: float | None, name: str
) -> Dataset:
    """The rows that are difficult enough, with `columns` alone."""
    minimum = default if wanted is None else wanted
    needed = {*columns, *([] if minimum is None else ["difficulty"])}
    missing = sorted(needed - set(rows.column_names))
    if missing:
        raise ValueError(
            f"{name} lacks {'the column' if len(missing) == 1 else 'the columns'} {', '.join(map(repr, missing))}; it "
            f"has {', '.join(map(repr, rows.column_names))}."
        )
    if minimum is not None:
        difficulties = rows["difficulty"]
        hard = [index for index, value in enumerate(difficulties) if value is not None and value >= minimum]
        rows = rows.select(hard)
    return rows.select_columns(list(columns))


def _convert(rows: Dataset, known: KnownDataset | None, args: TaskArguments) -> Dataset:
    from datasets import Dataset

    from ..rewards.code import pack_tests

    default = BOXED if known is None else known.instruction
    instruction = default if args.instruction is None else args.instruction
    target = "tests" if known is not None and known.kind == "code" else "answer"
    prompts, targets = [], []
    for number, row in enumerate(rows, start=1):
        assert isinstance(row, dict)
        try:
            pair = _own_row(row) if known is None else known.convert(row)
            if pair is None:
                continue
            prompt, content = pair
            prompts.append(_instruct(_messages(prompt, args.system_prompt), instruction))
            targets.append(content if isinstance(content, str) else pack_tests(content))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"Row {number} of {args.dataset_path or args.dataset_name} is not what it should be: {error}"
            ) from error
    return Dataset.from_dict({"prompt": prompts, target: targets})


def _own_row(row: dict[str, Any]) -> tuple[Any, str]:
    if row["answer"] is None or not str(row["answer"]).strip():
        raise ValueError("`answer` is empty.")
    return row["prompt"], str(row["answer"])


def _messages(prompt: Any, system_prompt: str | None) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"`prompt` must be text or a list of chat messages, got {prompt!r}.")
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"a chat message has the texts `role` and `content`, got {message!r}.")
    if prompt[-1]["role"] != "user" or not prompt[-1]["content"].strip():
        raise ValueError("`prompt` must end with what the user asks.")
    messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
    if system_prompt is not None:
        messages = [message for message in messages if message["role"] != "system"]
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _instruct(messages: list[dict[str, str]], instruction: str) -> list[dict[str, str]]:
    if not instruction:
        return messages
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}\n\n{instruction}"}]


def _drop_long(dataset: Dataset, limit: int | None, processing_class: PreTrainedTokenizerBase | None) -> Dataset:
    if limit is None:
        return dataset
    assert processing_class is not None
    kept = []
    for start in range(0, len(dataset), 1000):
        prompts = dataset[start : start + 1000]["prompt"]
        encoded = processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)
        kept += [start + i for i, ids in enumerate(encoded["input_ids"]) if len(ids) <= limit]  # pyright: ignore
    if not kept:
        raise ValueError(f"Every prompt has more than {limit} tokens: raise max_prompt_tokens.")
    dropped = len(dataset) - len(kept)
    if dropped and os.environ.get("RANK", "0") == "0":
        print(f"{dropped} of {len(dataset)} problems are left out: their prompts have more than {limit} tokens.")
    return dataset.select(kept) if dropped else dataset
