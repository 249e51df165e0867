"""From the options of a config to a teacher."""

import dataclasses
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from ..validation import require_choice, require_number, require_whole
from .adapter import AdapterTeacher
from .base import Teacher, TeacherError, TeacherRequest, start
from .local import LocalTeacher
from .prompts import PromptedTeacher, Row
from .self_test import SelfTestedTeacher
from .server import ServerTeacher

BASE = "base"
# Which options say where the teacher is, and which matter to each place.
_SOURCES: dict[str, tuple[str, ...]] = {
    "model_name_or_path": ("model_init_kwargs", "device", "max_tokens_per_batch"),
    "adapter": ("max_tokens_per_batch",),
    "server_url": (
        "server_model",
        "server_api_key_env",
        "server_concurrency",
        "server_timeout",
        "server_max_retries",
        "temperature",
    ),
    "callable": (),
}
# What shapes the question, wherever the teacher is.
_PROMPT = ("prompt_column", "chat_template_kwargs", "tokenizer_name_or_path")
_TEXT = (
    "model_name_or_path",
    "adapter",
    "callable",
    "device",
    "server_model",
    "server_api_key_env",
    "tokenizer_name_or_path",
    "prompt_column",
)
_WHOLE = {"max_tokens_per_batch": 1, "server_concurrency": 1, "server_max_retries": 0}


@dataclass(frozen=True)
class TeacherOptions:
    """What a config says of one teacher: the `teacher_*` fields of `SAFDistillConfig`, without the prefix."""

    model_name_or_path: str | None
    adapter: str | None
    server_url: str | list[str] | None
    callable: str | None
    model_init_kwargs: dict[str, Any] | None
    device: str | None
    max_tokens_per_batch: int
    server_model: str | None
    server_api_key_env: str | None
    server_concurrency: int
    server_timeout: float
    server_max_retries: int
    temperature: float | None
    tokenizer_name_or_path: str | None
    prompt_column: str | None
    chat_template_kwargs: dict[str, Any] | None
    self_test: bool

    def __post_init__(self) -> None:
        for name in _TEXT:
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"`teacher_{name}` must be a text that is not empty, got {value!r}.")
        urls: Any = self.server_url
        addresses = [urls] if isinstance(urls, str) else urls
        if urls is not None and (
            not isinstance(addresses, (list, tuple))
            or not addresses
            or not all(isinstance(url, str) and url for url in addresses)
        ):
            raise ValueError(f"`teacher_server_url` must be an address or a list of addresses, got {urls!r}.")
        for name in ("model_init_kwargs", "chat_template_kwargs"):
            if not isinstance(getattr(self, name), (dict, type(None))):
                raise ValueError(f"`teacher_{name}` must be a dict, got {getattr(self, name)!r}.")
        for name, minimum in _WHOLE.items():
            require_whole(f"teacher_{name}", getattr(self, name), minimum=minimum)
        require_number("teacher_server_timeout", self.server_timeout, above=0)
        require_choice("teacher_self_test", self.self_test, (True, False))
        if self.device is not None:
            try:
                torch.device(self.device)
            except RuntimeError as error:
                raise ValueError(
                    f"`teacher_device={self.device!r}` is no device such as 'cpu' or 'cuda:1'."
                ) from error
            if (self.model_init_kwargs or {}).get("device_map") is not None:
                raise ValueError(
                    "`teacher_device` and the `device_map` of `teacher_model_init_kwargs` both say where the teacher "
                    "is put: keep one."
                )
        if self.temperature is not None and self.temperature != 1:
            raise ValueError(
                f"`teacher_temperature={self.temperature}`: 1 is the only value, with which a server scores at 1 what "
                "was sampled at another temperature. Every other teacher scores at that of the rollout."
            )
        if len(self._named()) > 1:
            raise ValueError(f"The teacher is named twice, by {_and(self._named())}: keep one.")

    def _named(self) -> list[str]:
        return [name for name in _SOURCES if getattr(self, name) is not None]

    @property
    def source(self) -> str | None:
        """Name of the option that says where the teacher is."""
        return next(iter(self._named()), None)

    def check_unused(self, defaults: "TeacherOptions", *sources: str) -> None:
        """Refuse options that differ from `defaults` and matter to no teacher of `sources`.

        Raises:
            ValueError: there is such an option.
        """
        used = {name for source in sources for name in _SOURCES[source]}
        for place, names in _SOURCES.items():
            for name in names:
                if name not in used and getattr(self, name) != getattr(defaults, name):
                    raise ValueError(f"`teacher_{name}` has no effect without `teacher_{place}`: leave it out.")
        if not sources:
            for name in _PROMPT:
                if getattr(self, name) != getattr(defaults, name):
                    raise ValueError(f"`teacher_{name}` has no effect without a teacher: name one, or leave it out.")


@dataclass(frozen=True)
class Student:
    """What a teacher must know of its student.

    Attributes:
        model: the trained model, as `GRPOTrainer` left it.
        tokenizer: its tokenizer.
        temperature: of the rollout.
        device: of this process.
        trust_remote_code: for whatever is loaded.
        longest_row: (row -> teacher's prompt ids, or None for the student's own prompts; name of the column that
            holds them) -> tokens of the longest prompt and completion.
        shard: spreads a second model over the processes, where the backend does so with the student; see
            `LocalTeacher`.
        most: a number -> the largest of all processes, for teachers that are spread; see `score_packed`.
    """

    model: Any
    tokenizer: Any
    temperature: float
    device: torch.device
    trust_remote_code: bool
    longest_row: Callable[[Callable[[Row], list[int]] | None, str | None], int]
    shard: Callable[[nn.Module], nn.Module] | None = None
    most: Callable[[int], int] | None = None


def build_teacher(
    options: TeacherOptions,
    student: Student,
    *,
    model: Any = None,
    tokenizer: Any = None,
    prompt: Callable[[Row], Any] | None = None,
    name: str | None = None,
) -> Teacher:
    """The teacher that `options` describe, or the one around `model`.

    Args:
        model: a path, a model object or a callable; default: what `options` name.
        tokenizer: the teacher's; default: `options.tokenizer_name_or_path`, else the one beside a local model, else
            the student's.
        prompt: row of the dataset -> the teacher's prompt; default: `options.prompt_column`.
        name: of one teacher among several, for what is raised.

    Raises:
        ValueError: the teacher does not fit the student.
        TeacherError: the teacher does not answer.
    """
    try:
        return _build(options, student, model, tokenizer, prompt, alone=name is None)
    except (ValueError, TeacherError) as error:
        if name is None:
            raise
        raise (TeacherError if isinstance(error, TeacherError) else ValueError)(
            f"Teacher {name!r}: {error}"
        ) from error


def _build(options: TeacherOptions, student: Student, model: Any, tokenizer: Any, prompt: Any, alone: bool) -> Teacher:
    if prompt is not None and options.prompt_column is not None:
        raise ValueError("The teacher's prompt is given by a function and by `teacher_prompt_column`: keep one.")
    wanted = prompt or options.prompt_column
    # one of several may leave to the others what was said to all
    if alone and wanted is None and options.chat_template_kwargs:
        raise ValueError(
            "`teacher_chat_template_kwargs` has no effect on a teacher that sees the student's prompt: leave it out, "
            "or give the teacher's prompt as messages by `teacher_prompt_column`."
        )
    source = options.source
    if model is not None:
        source = "model_name_or_path" if isinstance(model, (str, nn.Module)) else "callable"
    elif options.callable is not None:
        model = _resolve(options.callable)
    if options.tokenizer_name_or_path is not None and tokenizer is None:
        if alone and wanted is None and source != "model_name_or_path":
            raise ValueError(
                "`teacher_tokenizer_name_or_path` has no effect on a teacher that sees the student's prompt and is "
                "no model in this process: leave it out."
            )
        tokenizer = AutoTokenizer.from_pretrained(
            options.tokenizer_name_or_path, trust_remote_code=student.trust_remote_code
        )
    server = None
    teacher: Any
    if source == "callable":
        if not callable(model):
            raise TypeError(
                f"A teacher is a path, a model, or a callable (TeacherRequest) -> (B, T); got {type(model).__name__}."
            )
        teacher = model
    elif source == "adapter":
        teacher = AdapterTeacher(
            student.model,
            None if options.adapter == BASE else options.adapter,
            temperature=student.temperature,
            max_tokens_per_batch=options.max_tokens_per_batch,
            most=student.most,
        )
    elif source == "server_url":
        assert options.server_url is not None
        teacher = server = ServerTeacher(
            options.server_url,
            tokenizer=student.tokenizer,
            temperature=student.temperature if options.temperature is None else options.temperature,
            model=options.server_model,
            api_key_env=options.server_api_key_env,
            concurrency=options.server_concurrency,
            timeout=options.server_timeout,
            max_retries=options.server_max_retries,
        )
        if options.temperature is not None:
            teacher = _AtTemperature(server, options.temperature)
    else:
        teacher = local = LocalTeacher(
            options.model_name_or_path if model is None else model,  # type: ignore[arg-type]
            temperature=student.temperature,
            student_vocabulary=student.tokenizer.get_vocab(),
            student_vocab_size=student.model.config.get_text_config().vocab_size,
            student_eos=student.tokenizer.eos_token_id,
            tokenizer=tokenizer,
            max_tokens_per_batch=options.max_tokens_per_batch,
            device=student.device if options.device is None else torch.device(options.device),
            model_init_kwargs=options.model_init_kwargs,
            trust_remote_code=student.trust_remote_code,
            # with a device of its own, each process holds the whole teacher there
            shard=student.shard if options.device is None else None,
            most=student.most,
        )
        tokenizer = local.tokenizer
    prompted = None
    if wanted is not None:
        teacher = prompted = PromptedTeacher(
            teacher,
            wanted,
            student.tokenizer if tokenizer is None else tokenizer,
            options.chat_template_kwargs,
        )
    if server is not None:
        server.probe(
            student.longest_row(
                None if prompted is None else prompted.token_ids, options.prompt_column if prompt is None else None
            )
        )
    return SelfTestedTeacher(teacher) if options.self_test else teacher


class _AtTemperature:
    """Asks `teacher` for a temperature that is not the rollout's."""

    def __init__(self, teacher: Teacher, temperature: float) -> None:
        self.teacher = teacher
        self.temperature = temperature

    def start(self, request: TeacherRequest) -> Callable[[], torch.Tensor]:
        return start(self.teacher, replace(request, temperature=self.temperature))

    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        return self.start(request)()


def _resolve(path: str) -> Any:
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`teacher_callable={path!r}` cannot be imported ({error}): give 'module:function', with a module on "
            "PYTHONPATH or beside the script that is started."
        ) from error
    if not callable(found) or isinstance(found, type):
        raise ValueError(
            f"`teacher_callable={path!r}` is {type(found).__name__ if not isinstance(found, type) else 'a class'}: "
            "give 'module:function', a callable (TeacherRequest) -> (B, T)."
        )
    return found


def _and(names: list[str]) -> str:
    return " and ".join(f"`teacher_{name}`" for name in names)


def option_names() -> list[str]:
    """Names of the fields of `TeacherOptions`."""
    return [field.name for field in dataclasses.fields(TeacherOptions)]
