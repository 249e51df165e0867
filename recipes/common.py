"""The one way through that the recipes share: parse the options, check them, load the task, train, save.

A mistake in the options, the files they name, or the data ends a recipe with one sentence before a model is loaded.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, is_offline_mode
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_softgate.tasks.known import KNOWN
from trl_softgate.tasks.loading import Task, TaskArguments, load_task
from trl_softgate.teachers import TeacherError

_TEACHERS = (
    "teacher_model_name_or_path",
    "teacher_adapter",
    "teacher_server_url",
    "teacher_callable",
    "teachers",
)
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text (in quotes, where YAML reads something else)",
    list: "a list",
    dict: "a mapping",
}


class Mistake(ValueError):
    """What is wrong with the options or the data, and what to write instead, in one sentence."""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and leaves the lines of the description as they are."""


class RecipeParser(TrlParser):
    """Parser of `--config FILE.yaml` and of every field of some dataclasses; its errors are one sentence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=_Help, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_args_and_config(self, args: Iterable[str] | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """As TRL's.

        Raises:
            Mistake: a file that is not there or no mapping, a key or flag that no option has, or a value that its
                option does not take.
        """
        words = list(sys.argv[1:] if args is None else args)
        # TRL knows the flag only as a word of its own
        words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        if "--config" in words:
            self._check_file(words[words.index("--config") + 1 :][:1])
        return super().parse_args_and_config(words, **kwargs)

    def parse_args_into_dataclasses(self, args: Any = None, *rest: Any, **kwargs: Any) -> tuple[Any, ...]:
        namespace, unknown = self.parse_known_args(args)  # with the file's values as defaults
        if unknown:
            raise Mistake(f"{unknown[0]} on the command line is no option: {self._close(unknown[0])}")
        if hasattr(namespace, "num_generations"):
            check_batch(namespace)
        try:
            return super().parse_args_into_dataclasses(args, *rest, **kwargs)
        except (ValueError, TypeError) as error:
            raise Mistake(one_sentence(error)) from error

    def _check_file(self, given: list[str]) -> None:
        if not given:
            raise Mistake("--config needs the path of a YAML file.")
        path = Path(given[0])
        if not path.is_file():
            raise Mistake(f"There is no file {path}: give --config one of the files in recipes/configs, or your own.")
        try:
            content = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise Mistake(f"{path} is not valid YAML: {one_sentence(error)}") from error
        if not isinstance(content, dict):
            raise Mistake(f"{path} must be a YAML mapping of options, `key: value` on each line.")
        hints: dict[str, Any] = {}
        for dataclass_type in self.dataclass_types:
            hints |= get_type_hints(dataclass_type)
        options = {action.dest: action for action in self._actions if action.dest != "help"}
        for key, value in content.items():
            if key == "env":
                continue
            if key not in options:
                raise Mistake(f"{path} has the key {key}, which is no option: {self._close(str(key))}")
            if key == "scale_rewards" and isinstance(value, bool):
                continue  # which TRL takes, too, though it calls it text
            if key in hints and not _fits(value, hints[key]):
                raise Mistake(f"{key} in {path} must be {_wanted(hints[key])}, got {value!r}.")
            choices = options[key].choices  # which argparse looks at only on the command line
            if choices is not None and value is not None and value not in choices:
                raise Mistake(f"{key} in {path} must be one of {', '.join(map(str, choices))}, got {value!r}.")

    def _close(self, name: str) -> str:
        options = [action.dest for action in self._actions]
        close = difflib.get_close_matches(name.partition("=")[0].lstrip("-").replace("-", "_"), options, n=1)
        return f"did you mean {close[0]}?" if close else "--help lists them all."


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from a YAML file is one of `hint`, or text that the parser turns into one."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if hint is Any:
        return True
    if hint is type(None):
        return value is None
    kind = origin or hint
    if kind is bool:
        return isinstance(value, bool) or str(value).lower() in ("true", "false", "yes", "no")
    if kind in (int, float):
        if isinstance(value, str):
            return _converts(value, kind)
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if kind is list:
        return isinstance(value, (list, str))
    if kind is dict:
        return isinstance(value, (dict, str))
    if kind is str:
        return isinstance(value, str)
    return True  # an enum, or something else that its dataclass checks itself


def _converts(value: str, kind: type) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def _wanted(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_wanted(part) for part in get_args(hint)))
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if hint is type(None):
        return "null"
    return _WORDS.get(origin or hint, getattr(hint, "__name__", str(hint)))


def one_sentence(error: BaseException) -> str:
    return " ".join(str(error).split())


def make_parser(config_class: type[GRPOConfig], description: str | None = None) -> RecipeParser:
    """Parser of `--config FILE.yaml` and of every field of the task, the trainer's config and `trl.ModelConfig`."""
    return RecipeParser((TaskArguments, config_class, ModelConfig), description=description)  # pyright: ignore[reportArgumentType]


def check_batch(options: Any) -> None:
    """Refuse a rollout that holds no whole number of groups, before GRPOConfig does in its own words.

    Raises:
        Mistake: names the processes, the numbers, and the next one that works.
    """
    rows, group = options.per_device_train_batch_size, options.num_generations
    accumulation, steps = options.gradient_accumulation_steps, options.steps_per_generation
    for name in ("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps"):
        if getattr(options, name) < 1:
            raise Mistake(f"{name} must be at least 1, got {getattr(options, name)}.")
    if options.generation_batch_size is not None:
        return  # stated as a whole; its own check names it
    name = "gradient_accumulation_steps" if steps is None else "steps_per_generation"
    count = accumulation if steps is None else steps
    if count < 1:
        raise Mistake(f"{name} must be at least 1, got {count}.")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    completions = processes * rows * count
    if completions % group != 0:
        works = next(more for more in range(count, count + group + 1) if processes * rows * more % group == 0)
        raise Mistake(
            f"{processes} processes x per_device_train_batch_size {rows} x {name} {count} = {completions} completions "
            f"of a rollout are no multiple of num_generations ({group}): set {name} to {works}, for example."
        )


def check_model(name: str, option: str, revision: str | None = None, *, adapter: bool = False) -> None:
    """Refuse a model or adapter that is neither a folder here nor on the hub.

    Raises:
        Mistake: says which, and what to give instead.
    """
    wanted = "adapter_config.json" if adapter else "config.json"
    folder = Path(name)
    if folder.is_dir():
        if (folder / wanted).is_file():
            return
        if not adapter and (folder / "adapter_config.json").is_file():
            raise Mistake(
                f"{option}: {name} holds an adapter, not a model: merge it into its base first, with "
                f"`trl-softgate merge {name} OUTPUT`, and give OUTPUT."
            )
        raise Mistake(f"{option}: the folder {name} has no {wanted}; give the folder of {_kind(adapter)}.")
    try:
        cached_file(name, wanted, revision=revision)
    except (OSError, ValueError) as error:
        hint = ""
        if folder.parts[0] == "runs":
            hint = ": another command makes such a folder, and the key's comment in the recipe says which"
        elif is_offline_mode():
            hint = ": HF_HUB_OFFLINE is set, so only what was downloaded before can be"
        raise Mistake(
            f"{option}: {name} is neither a folder here nor the name of {_kind(adapter)} on the hub that can be "
            f"reached{hint}."
        ) from error


def _kind(adapter: bool) -> str:
    return "an adapter" if adapter else "a model"


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model.

    Raises:
        Mistake: there is none, or it has no chat template, which the prompts of all tasks need.
    """
    files = ("tokenizer*", "vocab*", "tekken*", "*.model", "*.tiktoken")
    if Path(name).is_dir() and not any(any(Path(name).glob(pattern)) for pattern in files):
        # transformers would make up an empty one
        raise Mistake(f"The folder {name} has no tokenizer: copy that of the model it comes from.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"{name} has no tokenizer that can be read: {one_sentence(error)}") from error
    if tokenizer.chat_template is None:
        raise Mistake(
            f"The tokenizer of {name} has no chat template, which the prompts need: take the instruct model of the "
            "family, or put a chat_template.jinja into a local copy of its folder."
        )
    return tokenizer


def prepare(task_args: TaskArguments, training_args: GRPOConfig, model_args: ModelConfig) -> Task:
    """Check what the options name and load the task; no model is loaded.

    Raises:
        Mistake: a model, adapter or tokenizer that is not there or does not fit, a data set that cannot be read or
            has other columns, or fewer problems than one rollout takes.
    """
    name, revision = model_args.model_name_or_path, model_args.model_revision
    if name is None:
        raise Mistake("Name the model to train: --model_name_or_path FOLDER, or the name of one on the hub.")
    if model_args.load_in_4bit and not model_args.use_peft:
        raise Mistake("Weights in four bits cannot be trained: with load_in_4bit set use_peft, too.")
    check_model(name, "model_name_or_path", revision)
    if getattr(training_args, "opd_coef", 0) != 0:
        _check_teacher(training_args, model_args)
    tokenizer = load_tokenizer(name, revision)
    try:
        task = load_task(task_args, tokenizer)
    except (ValueError, ImportError, OSError) as error:
        raise Mistake(one_sentence(error)) from error
    assert training_args.generation_batch_size is not None and training_args.num_generations is not None
    prompts = training_args.generation_batch_size // training_args.num_generations
    if len(task.train_dataset) < prompts:
        raise Mistake(
            f"The task has {len(task.train_dataset)} training problems, but one rollout takes {prompts} prompts "
            f"({training_args.generation_batch_size} completions / num_generations {training_args.num_generations}): "
            "take more problems or smaller batches."
        )
    return task


def _check_teacher(training_args: Any, model_args: ModelConfig) -> None:
    if all(getattr(training_args, option) is None for option in _TEACHERS):
        raise Mistake(
            "SAF distillation needs a teacher: set teacher_model_name_or_path, teacher_adapter, teacher_server_url, "
            "teacher_callable or teachers; or opd_coef 0 for none."
        )
    adapter, model = training_args.teacher_adapter, training_args.teacher_model_name_or_path
    if adapter is not None:
        if not model_args.use_peft:
            raise Mistake("teacher_adapter shares the base model of a LoRA student: set use_peft, too.")
        if adapter != "base":
            check_model(adapter, "teacher_adapter", adapter=True)
    if model is not None:
        check_model(model, "teacher_model_name_or_path", adapter=Path(model, "adapter_config.json").is_file())


def checkpoint_of(value: str | bool | None) -> str | bool | None:
    """`--resume_from_checkpoint true`, a text on the command line, is the newest complete checkpoint."""
    return True if str(value).lower() == "true" else value


def train(
    trainer_class: type[GRPOTrainer],
    config_class: type[GRPOConfig],
    description: str | None = None,
    args: Iterable[str] | None = None,
) -> GRPOTrainer:
    """Train as the command line says; save the model, or the adapter with `use_peft`, to `output_dir`, and push it to
    the hub with `push_to_hub`.

    Args:
        args: words of the command line; default `sys.argv[1:]`.

    Raises:
        Mistake: see `RecipeParser` and `prepare`.
        TeacherError: a teacher that gives no usable answer.
    """
    task_args, training_args, model_args = make_parser(config_class, description).parse_args_and_config(args)
    task = prepare(task_args, training_args, model_args)
    model_init_kwargs: dict[str, Any] = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    training_args.model_init_kwargs = model_init_kwargs | (training_args.model_init_kwargs or {})
    trainer = trainer_class(
        model=model_args.model_name_or_path,
        reward_funcs=task.reward_func,  # pyright: ignore[reportArgumentType]
        args=training_args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    trainer.train(resume_from_checkpoint=checkpoint_of(training_args.resume_from_checkpoint))
    trainer.save_model(training_args.output_dir)
    trainer.save_state()  # trainer_state.json holds all logged metrics
    dataset = KNOWN[task_args.dataset_name].hub if task_args.dataset_name in KNOWN else None
    trainer.create_model_card(dataset_name=dataset)
    trainer.accelerator.print(f"Saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset)
    return trainer


def run(trainer_class: type[GRPOTrainer], config_class: type[GRPOConfig], description: str | None = None) -> None:
    """`train`, with mistakes as one sentence and exit code 2."""
    try:
        train(trainer_class, config_class, description)
    except (Mistake, TeacherError) as problem:
        fail(problem)


def fail(problem: BaseException) -> NoReturn:
    """End the script with one sentence and exit code 2."""
    print(f"{Path(sys.argv[0]).name}: error: {one_sentence(problem)}", file=sys.stderr)
    sys.exit(2)
