"""A teacher that shares the student's base model: another adapter of it, or none."""

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .base import TeacherRequest
from .packing import fused_log_probs, score_packed

_NAME = "softgate_teacher"
# Ways to begin a LoRA that leave the base model as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA subtract from it.
_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica")
_INSTEAD = "load it with `teacher_model_name_or_path`, which merges it into a base model of its own."


class AdapterTeacher:
    """The student's own base model with another adapter, or with none: no second copy of the base weights.

    The teacher's adapter is frozen and a part of the student only while it scores: between two requests, parameters,
    files and merged weights of the student are as they would be without it. Scoring switches adapters and restores
    the student exactly: active adapters, train or eval mode of every module, `requires_grad` of every parameter.

    Args:
        student: the model that is trained, with the LM head that `GRPOTrainer` gives it.
        adapter: folder or hub name of the teacher's adapter; None: the base model itself.
        temperature: of the rollout.
        max_tokens_per_batch: padded tokens per forward, >= 1; a longer row has a forward of its own.
        most: see `score_packed`; for a student that is spread over the processes.

    Raises:
        ValueError: the student has no adapter, one that changes its base model, or the teacher's does not fit it.
    """

    def __init__(
        self,
        student: Any,
        adapter: str | None,
        *,
        temperature: float,
        max_tokens_per_batch: int,
        most: Callable[[int], int] | None = None,
    ) -> None:
        if not isinstance(student, PeftModel):
            raise ValueError(
                "An adapter of the student's own base model can only teach a student that is an adapter itself: pass "
                "`peft_config` (recipes: `use_peft: true`), or load the teacher with `teacher_model_name_or_path`, "
                "which merges the adapter into a base model of its own."
            )
        config: Any = student.active_peft_config
        if config.is_prompt_learning:
            raise ValueError(
                f"The student is a {config.peft_type.value} adapter, which shares no layers with "
                "a second adapter: load the teacher with `teacher_model_name_or_path`."
            )
        changed = _changes_base(config)
        if changed is not None:
            raise ValueError(
                f"The student's adapter changes its base model (`{changed}`), so that no untouched one is left to "
                "teach: leave that option out, or load the teacher with `teacher_model_name_or_path`."
            )
        self._student: Any = student
        self._score = fused_log_probs(student)
        self._entries: list[tuple[Any, Any]] | None = None
        self._device = _device(student)
        self.temperature = temperature
        self.max_tokens_per_batch = max_tokens_per_batch
        self._most = most
        self.collective = most is not None
        if adapter is not None:
            self._load(adapter)

    def _load(self, adapter: str) -> None:
        student = self._student
        flags = [(parameter, parameter.requires_grad) for parameter in student.parameters()]
        device = self._device
        try:
            config: Any = PeftConfig.from_pretrained(adapter)
            weights = self._checked(config, load_peft_weights(adapter, device=str(device)))
            config.inference_mode = True
            # loading must not move the random numbers of the sampling
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                student.add_adapter(_NAME, config)
            loaded = set_peft_model_state_dict(student, weights, _NAME)
            missing = [key for key in loaded.missing_keys if f".{_NAME}." in f"{key}."]
            if missing or loaded.unexpected_keys:
                raise ValueError(f"it does not fit at {[*missing, *loaded.unexpected_keys][0]!r}.")
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ValueError(
                f"The adapter {adapter!r} cannot be put on the student's base model: {error} Use an adapter of "
                f"the same base model, or {_INSTEAD}"
            ) from error
        finally:
            # also what a failed attempt has left
            self._entries = _entries(student)
            self._remove()
            student.peft_config.pop(_NAME, None)
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def _checked(self, config: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The adapter's own weights among `weights`; refuses what would need another base model than the student's."""
        student = self._student
        if config.peft_type != student.peft_type:
            raise ValueError(f"it is of the kind {config.peft_type.value}, the student's {student.peft_type.value}.")
        if getattr(student.active_peft_config, "trainable_token_indices", None):
            raise ValueError("PEFT loads none beside a student's that has `trainable_token_indices`.")
        changed = _changes_base(config)
        if changed is not None:
            raise ValueError(f"it changes the base model (`{changed}`).")
        for option in ("modules_to_save", "trainable_token_indices"):
            if getattr(config, option, None):
                raise ValueError(f"it replaces whole layers (`{option}={getattr(config, option)!r}`).")
        base = student.get_base_model()
        head = base.get_output_embeddings()
        prefix = "base_model.model."
        head_name = next((prefix + name for name, module in base.named_modules() if module is head), None)
        for key in weights:
            if head_name is not None and key.startswith(f"{head_name}.{student.base_model.prefix}"):
                raise ValueError("it changes the LM head, which is read directly and would stay as it is.")
        # An adapter's file may hold embeddings of its base: loaded, they would overwrite the student's
        embeddings = [key for key in weights if student.base_model.prefix not in key]
        if embeddings:
            own = {key.replace(".base_layer.", "."): value for key, value in base.state_dict().items()}
        for key in embeddings:
            weight = own.get(key.removeprefix(prefix).replace(".base_layer.", "."))  # type: ignore[possibly-unbound]
            if weight is None or not torch.equal(weight, weights[key].to(weight)):
                raise ValueError(f"it holds a weight of another base model, {key!r}.")
        return {key: value for key, value in weights.items() if key not in embeddings}

    @torch.no_grad()
    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        """(B, T) float32 log-probabilities at the rollout's temperature, 0 on padding.

        Raises:
            ValueError: the request has another temperature than the student's LM head.
        """
        if request.temperature != self.temperature:
            raise ValueError(
                f"The student's LM head has temperature {self.temperature}, which the teacher shares; it cannot score "
                f"at {request.temperature}."
            )
        with self._teaching():
            return score_packed(self._score, request, self.max_tokens_per_batch, _device(self._student), self._most)

    @contextlib.contextmanager
    def _teaching(self) -> Iterator[None]:
        student: Any = self._student
        training = [(module, module.training) for module in student.modules()]
        flags = [(parameter, parameter.requires_grad) for parameter in student.parameters()]
        active = student.base_model.active_adapter
        try:
            if self._entries is None:
                student.eval()
                with student.disable_adapter():
                    yield
            else:
                self._insert()
                student.eval()
                # not PeftModel.set_adapter, which knows only the adapters in its table
                student.base_model.set_adapter(_NAME, inference_mode=True)
                yield
        finally:
            # before the teacher's layers go: PEFT looks at those that were active
            student.base_model.set_adapter(active)
            self._remove()
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            for module, mode in training:
                module.training = mode

    def _insert(self) -> None:
        device = _device(self._student)
        for container, entry in self._entries or ():
            if device != self._device and isinstance(entry, (nn.Module, torch.Tensor)):
                # the student was moved since, by DeepSpeed for one, and took along only what was a part of it
                entry = entry.to(device)
            container[_NAME] = entry

    def _remove(self) -> None:
        for container, _ in self._entries or ():
            if _NAME in container:
                container.pop(_NAME)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _changes_base(config: Any) -> str | None:
    """The option of an adapter by which the base model is no longer what it was, if there is one."""
    for option, harmless in (("bias", ("none",)), ("layer_replication", ()), ("init_lora_weights", _KEEPS_BASE)):
        value = getattr(config, option, None)
        if value is not None and not isinstance(value, bool) and value not in harmless:
            return f"{option}={value!r}"
    return None


def _entries(model: nn.Module) -> list[tuple[MutableMapping[str, Any], Any]]:
    """What the layers of `model` hold under the teacher's name, with the containers: modules, and plain settings."""
    containers: list[Any] = []
    for module in model.modules():
        if isinstance(module, (nn.ModuleDict, nn.ParameterDict, BufferDict)):
            containers.append(module)
        elif isinstance(module, BaseTunerLayer):
            containers += [value for value in vars(module).values() if isinstance(value, dict)]
    return [(container, container[_NAME]) for container in containers if _NAME in container]
