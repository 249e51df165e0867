"""A teacher that is a model in this process."""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, get_config_model_id

from .base import TeacherRequest
from .packing import fused_log_probs, score_packed
from .vocabulary import check_end_of_sequence, check_vocabulary

_TEMPERATURE = "_softgate_teacher_temperature"


class LocalTeacher:
    """A frozen model in this process, scored in batches of a token budget through TRL's fused LM head, so that there
    are no (B, T, V) logits.

    Args:
        model: path or hub name of a model, path of a PEFT adapter (it is merged into its base, unless that is
            quantized), or a model object, which is taken over: put in eval mode, frozen, and given a fused LM head.
        temperature: of the rollout, > 0.
        student_vocabulary: token -> id of the student's tokenizer.
        student_vocab_size: rows of the student's LM head; the teacher's probabilities are over these alone.
        student_eos: id of the student tokenizer's eos token.
        tokenizer: the teacher's; default: loaded from where the model came from.
        max_tokens_per_batch: padded tokens per forward, >= 1; a longer row has a forward of its own.
        device: where the teacher runs; it may be another than the student's.
        model_init_kwargs: for loading from a path, e.g. `{"dtype": "bfloat16", "attn_implementation": "sdpa"}` or
            `{"quantization_config": {"load_in_4bit": True}}`; default dtype: as stored.
        trust_remote_code: for loading from a path.
        shard: spreads the model over the processes, and gives what to call in its place; default: each process holds
            the whole model. A quantized model is not spread.
        most: see `score_packed`; for a model that is spread.

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
        student_eos: int,
        tokenizer: Any = None,
        max_tokens_per_batch: int,
        device: torch.device,
        model_init_kwargs: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        shard: Callable[[nn.Module], nn.Module] | None = None,
        most: Callable[[int], int] | None = None,
    ) -> None:
        if model_init_kwargs and not isinstance(model, str):
            raise ValueError(
                "`teacher_model_init_kwargs` has no effect on a model object, which is loaded already: leave it out."
            )
        source = model if isinstance(model, str) else get_config_model_id(model.config)
        if isinstance(model, str):
            # loading must not move the random numbers of the sampling
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                model = _load(model, dict(model_init_kwargs or {}), device, trust_remote_code)
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        if tokenizer is None:
            tokenizer = _load_tokenizer(source, trust_remote_code)
        check_vocabulary(
            student_vocabulary,
            student_vocabulary if tokenizer is None else tokenizer.get_vocab(),
            student_vocab_size,
            base.config.get_text_config().vocab_size,
        )
        if tokenizer is not None:
            names = {i: token for token, i in student_vocabulary.items()}
            check_end_of_sequence(student_eos, _eos_ids(tokenizer, base), names)
        placed = getattr(base, "is_quantized", False) or getattr(base, "hf_device_map", None) is not None
        spread = shard is not None and not placed
        if not placed and not spread:
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
        self.tokenizer = tokenizer
        model.eval().requires_grad_(False)
        self.model: Any = shard(model) if spread else model  # type: ignore[misc]
        self._score = fused_log_probs(self.model)
        self._most = most if spread else None
        self.collective = spread
        self.temperature = temperature
        self.max_tokens_per_batch = max_tokens_per_batch
        self._device = device if spread else base.device

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
        return score_packed(self._score, request, self.max_tokens_per_batch, self._device, self._most)


def _is_adapter(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def _eos_ids(tokenizer: Any, model: Any) -> set[int]:
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    return {i for i in ids if i is not None}


def _load(
    path: str, init_kwargs: dict[str, Any], device: torch.device, trust_remote_code: bool
) -> PreTrainedModel | PeftModel:
    init_kwargs.setdefault("dtype", "auto")
    # each process holds its own teacher; "auto" would spread every process' copy over all devices. A quantized model
    # cannot be moved afterwards
    quantized = init_kwargs.get("quantization_config") is not None
    init_kwargs.setdefault("device_map", {"": device} if quantized else None)
    try:
        return _from_pretrained(path, init_kwargs, trust_remote_code)
    except OSError as error:
        if os.path.isdir(path):
            raise
        raise ValueError(
            f"The teacher {path!r} is neither a folder (seen from {os.getcwd()}) nor a model that could be loaded "
            "from the hub. Give the folder of a model or of an adapter."
        ) from error


def _from_pretrained(path: str, init_kwargs: dict[str, Any], trust_remote_code: bool) -> PreTrainedModel | PeftModel:
    if _is_adapter(path):
        adapted = AutoPeftModelForCausalLM.from_pretrained(path, trust_remote_code=trust_remote_code, **init_kwargs)
        # rounded to four bits again, a merged adapter would lose what little it changes; and what ZeRO-3 has spread
        # cannot be added to
        quantized = getattr(adapted.get_base_model(), "is_quantized", False)
        return adapted if quantized or is_deepspeed_zero3_enabled() else adapted.merge_and_unload()
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


def _gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """Whole parameters, also where DeepSpeed ZeRO-3 has spread them while they were loaded."""
    if not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def _cut_lm_head(model: PreTrainedModel, vocab_size: int) -> None:
    """Let the LM head end at the student's last row; unless DeepSpeed has spread it already, nothing is copied."""
    head: Any = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        raise ValueError(
            "The teacher's adapter changes the LM head, which is read directly and would stay as it is: pass "
            "`model.merge_and_unload()`, or the adapter's folder without `quantization_config`, which is merged into "
            "its base."
        )
    if model.config.get_text_config().vocab_size == vocab_size:
        return
    with _gathered([head.weight, *([] if head.bias is None else [head.bias])]):
        cut = nn.Linear(head.weight.shape[1], vocab_size, bias=False, device="meta")
        rows = [None if tensor is None else tensor.detach()[:vocab_size] for tensor in (head.weight, head.bias)]
        if hasattr(head.weight, "ds_id"):
            # what was gathered is gone afterwards
            rows = [None if tensor is None else tensor.clone() for tensor in rows]
    cut.weight = nn.Parameter(rows[0], requires_grad=False)  # type: ignore[arg-type]
    if rows[1] is not None:
        cut.bias = nn.Parameter(rows[1], requires_grad=False)
    model.set_output_embeddings(cut)
