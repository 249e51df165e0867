"""A teacher that is a model in this process."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, get_config_model_id

from .base import TeacherRequest
from .vocabulary import check_vocabulary

_TEMPERATURE = "_softgate_teacher_temperature"


class LocalTeacher:
    """A frozen model in this process, scored in chunks of rows through TRL's fused LM head (no (B, T, V) logits).

    Args:
        model: path or hub name of a model, path of a PEFT adapter (it is merged into its base), or a model object.
            A model object is taken over: put in eval mode, frozen, and given a fused LM head.
        temperature: of the rollout, > 0.
        student_vocabulary: token -> id of the student's tokenizer.
        student_vocab_size: rows of the student's LM head; the teacher's probabilities are over these alone.
        tokenizer: the teacher's; default: loaded from where the model came from.
        batch_size: rows per forward, >= 1.
        device: where the teacher runs.
        model_init_kwargs: for loading from a path, e.g. `{"dtype": "bfloat16"}`; default dtype: as stored.
        trust_remote_code: for loading from a path.

    Raises:
        ValueError: the vocabularies do not fit, see `check_vocabulary`, or the model object is a teacher at another
            temperature.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        *,
        temperature: float,
        student_vocabulary: Mapping[str, int],
        student_vocab_size: int,
        tokenizer: Any = None,
        batch_size: int,
        device: torch.device,
        model_init_kwargs: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        source = model if isinstance(model, str) else get_config_model_id(model.config)
        if isinstance(model, str):
            # loading must not move the random numbers of the sampling
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                model = _load(model, dict(model_init_kwargs or {}), trust_remote_code)
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        if tokenizer is None:
            tokenizer = _load_tokenizer(source, trust_remote_code)
        check_vocabulary(
            student_vocabulary,
            student_vocabulary if tokenizer is None else tokenizer.get_vocab(),
            student_vocab_size,
            base.config.get_text_config().vocab_size,
        )
        if not getattr(base, "is_quantized", False) and getattr(base, "hf_device_map", None) is None:
            model = model.to(device)  # type: ignore[assignment]
        _cut_lm_head(base, student_vocab_size)
        # The patched head belongs to one temperature; patched again, an earlier teacher would answer at the new one
        if getattr(base, _TEMPERATURE, temperature) != temperature:
            raise ValueError(
                f"This model object is already a teacher at temperature {getattr(base, _TEMPERATURE)}, and cannot be "
                f"one at {temperature} as well: load it anew."
            )
        setattr(base, _TEMPERATURE, temperature)
        add_fused_lm_head(base, temperature=temperature)
        self.model = model.eval().requires_grad_(False)
        self.temperature = temperature
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        """(B, T) float32 log-probabilities at the rollout's temperature, 0 on padding.

        Raises:
            ValueError: the request has another temperature than the one the LM head was built for.
        """
        if request.temperature != self.temperature:
            raise ValueError(
                f"This teacher scores at temperature {self.temperature}, the rollout was sampled at "
                f"{request.temperature}."
            )
        self.model.eval()
        rows, length = request.completion_ids.shape
        scores = torch.zeros(rows, length, dtype=torch.float32, device=request.completion_ids.device)
        for start in range(0, rows, self.batch_size):
            chunk = slice(start, start + self.batch_size)
            mask = torch.cat([request.prompt_mask[chunk], request.completion_mask[chunk]], dim=1)
            ids = torch.cat([request.prompt_ids[chunk], request.completion_ids[chunk]], dim=1)
            labels = ids.masked_fill(mask == 0, -100)
            labels[:, :-length] = -100
            output = self.model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
            scores[chunk] = output.log_probs[:, -length:].float()
        return scores


def _is_adapter(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def _load(path: str, init_kwargs: dict[str, Any], trust_remote_code: bool) -> PreTrainedModel:
    init_kwargs.setdefault("dtype", "auto")
    # each process holds its own teacher; "auto" would spread every process' copy over all devices
    init_kwargs.setdefault("device_map", None)
    try:
        return _from_pretrained(path, init_kwargs, trust_remote_code)
    except OSError as error:
        if os.path.isdir(path):
            raise
        raise ValueError(
            f"The teacher {path!r} is neither a folder (seen from {os.getcwd()}) nor a model that could be loaded "
            "from the hub. Give the folder of a model or of an adapter."
        ) from error


def _from_pretrained(path: str, init_kwargs: dict[str, Any], trust_remote_code: bool) -> PreTrainedModel:
    if _is_adapter(path):
        adapted = AutoPeftModelForCausalLM.from_pretrained(path, trust_remote_code=trust_remote_code, **init_kwargs)
        return adapted.merge_and_unload()
    return create_model_from_path(path, trust_remote_code=trust_remote_code, **init_kwargs)


def _load_tokenizer(source: str | None, trust_remote_code: bool) -> Any:
    sources = [source] if source else []
    if source and _is_adapter(source):
        # an adapter is often saved without a tokenizer, its base never is
        base = PeftConfig.from_pretrained(source).base_model_name_or_path
        sources += [base] if base else []
    problem: Exception = OSError("the model does not say where it came from")
    for place in sources:
        try:
            return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            problem = error
    warnings.warn(
        f"The teacher's tokenizer could not be loaded ({problem}), so its vocabulary is taken to be the student's. "
        "Pass `teacher_processing_class` to have it compared.",
        UserWarning,
        stacklevel=2,
    )
    return None


def _cut_lm_head(model: PreTrainedModel, vocab_size: int) -> None:
    """Let the LM head end at the student's last row: the rows are shared with the old head, not copied."""
    head: Any = model.get_output_embeddings()
    if head.weight.shape[0] == vocab_size:
        return
    cut = nn.Linear(head.weight.shape[1], vocab_size, bias=False, device="meta")
    cut.weight = nn.Parameter(head.weight.detach()[:vocab_size], requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias.detach()[:vocab_size], requires_grad=False)
    model.set_output_embeddings(cut)
