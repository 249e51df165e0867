"""Adapters: new ones and already trained ones, for each trainer, and the teacher beside them."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model

from trl_softgate import (
    GSPOConfig,
    GSPOTrainer,
    SAFDistillConfig,
    SAFDistillTrainer,
    SAPOConfig,
    SAPOTrainer,
)

METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gspo": (GSPOTrainer, GSPOConfig, {}),
    "sapo": (SAPOTrainer, SAPOConfig, {}),
    "saf-grpo": (SAFDistillTrainer, SAFDistillConfig, dict(opd_warmup_steps=0)),
    "saf-gspo": (SAFDistillTrainer, SAFDistillConfig, dict(opd_warmup_steps=0, policy_objective="gspo")),
}


def _lora(**kwargs: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **kwargs)


def _trained_adapter(base: Any = None) -> PeftModel:
    """A PEFT model whose adapter does something: `lora_B` starts at zero."""
    model = get_peft_model(base or tiny.model(), _lora())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model  # type: ignore[return-value]


def _trainer(
    method: str,
    model: Any,
    folder: Path,
    *,
    peft_config: Any = None,
    dataset: Dataset | None = None,
    keywords: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    trainer_class, config_class, method_options = METHODS[method]
    keywords = keywords or {}
    if method.startswith("saf"):
        keywords = {"teacher_model": tiny.model(7), "teacher_processing_class": tiny.tokenizer(), **keywords}
    return trainer_class(
        model,
        reward_funcs=tiny.reward,
        args=tiny.config(config_class, folder, **{**method_options, "num_iterations": 2, **options}),
        train_dataset=dataset or tiny.dataset(),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
        **keywords,
    )


def _snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("adapter", ["new", "trained"])
@pytest.mark.parametrize("method", METHODS)
def test_only_the_adapter_learns(method: str, adapter: str, beta: float, tmp_path: Path) -> None:
    model, peft_config = (tiny.model(), _lora()) if adapter == "new" else (_trained_adapter(), None)
    trainer = _trainer(method, model, tmp_path, peft_config=peft_config, beta=beta)
    before = _snapshot(trainer.model)
    trainer.train()
    after = _snapshot(trainer.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("lora_" in name and ".default." in name for name in changed), changed
    logs = [row for row in trainer.state.log_history if "entropy" in row]
    assert logs[0]["ratio/mean"] == pytest.approx(1)
    assert logs[1]["ratio/max"] > 1  # the second pass over the rollout
    assert ("kl" in logs[0]) == (beta != 0)
    if beta != 0:
        # the reference is the policy as it was given: the base model, or the trained adapter
        assert logs[0]["kl"] == pytest.approx(0, abs=1e-6)
        assert logs[1]["kl"] > 0


@pytest.mark.parametrize("source", ["model", "path", "adapter-path", "peft-model"])
@pytest.mark.parametrize("student", ["full", "lora"])
def test_the_teacher_stays_as_it_is(student: str, source: str, tmp_path: Path) -> None:
    keywords = dict(teacher_model=_teacher(source, tmp_path))
    if isinstance(keywords["teacher_model"], str):
        keywords["teacher_processing_class"] = None  # loaded from there
    trainer = _trainer(
        "saf-grpo", tiny.model(), tmp_path, peft_config=_lora() if student == "lora" else None, keywords=keywords
    )
    teacher = _local_teacher(trainer).model
    before = _snapshot(teacher)
    trainer.train()
    assert not teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())
    assert all(p.grad is None for p in teacher.parameters())
    after = _snapshot(teacher)
    assert all(torch.equal(before[name], after[name]) for name in before)
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized
    assert not optimized & {id(p) for p in teacher.parameters()}
    assert trainer.state.log_history[0]["distill/opd_abs_max"] > 0.01


def _teacher(source: str, folder: Path) -> Any:
    if source == "model":
        return tiny.model(7)
    if source == "peft-model":
        return _trained_adapter()
    path = str(folder / source)
    if source == "path":
        tiny.model(7).save_pretrained(path)
    else:
        tiny.model().save_pretrained(folder / "base")
        _trained_adapter(base=tiny.model().from_pretrained(folder / "base")).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def _local_teacher(trainer: Any) -> Any:
    (teacher,) = [c.teacher for c in trainer.callback_handler.callbacks if hasattr(c, "on_rollout")]
    return teacher


@pytest.mark.parametrize("max_tokens", [1, 90, 16384])
@pytest.mark.parametrize("student", ["full", "lora-new", "lora-trained"])
def test_a_teacher_that_is_the_student_has_nothing_to_say(student: str, max_tokens: int, tmp_path: Path) -> None:
    """A_opd is 0 at every valid token, at another temperature than 1 and with prompts of very different lengths."""
    model: Any = tiny.model()
    teacher: Any = copy.deepcopy(model)
    peft_config = None
    if student == "lora-new":
        peft_config = _lora()
    elif student == "lora-trained":
        model = _trained_adapter()
        teacher = copy.deepcopy(model).merge_and_unload()
    trainer = _trainer(
        "saf-grpo",
        model,
        tmp_path,
        peft_config=peft_config,
        learning_rate=0.0,
        temperature=0.6,
        teacher_max_tokens_per_batch=max_tokens,
        max_completion_length=16,
        dataset=Dataset.from_dict({"prompt": ["a", "b" * 60, "c d", "e" * 25]}),
        keywords=dict(teacher_model=teacher),
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "distill/opd_abs_max" in row]
    assert len(logs) == 2
    for row in logs:
        assert row["distill/opd_abs_max"] <= 1e-5
        assert row["distill/kl"] == pytest.approx(0, abs=1e-9)
        assert row["distill/missing_share"] == 0
    assert logs[0]["completions/max_length"] == 16


def test_a_teacher_of_another_temperature_is_refused(tmp_path: Path) -> None:
    model = tiny.model()
    trainer = _trainer("saf-grpo", model, tmp_path, temperature=0.6, keywords=dict(teacher_model=copy.deepcopy(model)))
    assert _local_teacher(trainer).temperature == 0.6
    trainer.args.temperature = 1.0
    with pytest.raises(ValueError, match="scores at temperature 0.6, the rollout was sampled at 1.0"):
        trainer.train()


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_student_learns_by_its_adapter(method: str, tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig

    tiny.model(hidden=64).save_pretrained(tmp_path / "base")
    trainer = _trainer(
        method,
        str(tmp_path / "base"),
        tmp_path,
        peft_config=_lora(),
        keywords=dict(
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
            )
        ),
    )
    before = _snapshot(trainer.model)
    trainer.train()
    changed = {n for n, v in _snapshot(trainer.model).items() if not torch.equal(before[n], v)}
    assert changed
    assert all("lora_" in name for name in changed)
