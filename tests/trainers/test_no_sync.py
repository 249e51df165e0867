"""The loss of a micro-batch never waits for the device."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer
from trl_softgate.diagnostics.observer import StepObserver

METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gspo": (GSPOTrainer, GSPOConfig, {}),
    "gspo-rollout": (GSPOTrainer, GSPOConfig, dict(old_logps_source="rollout")),
    "sapo-token-mean": (SAPOTrainer, SAPOConfig, dict(aggregation="token_mean", off_policy_mask_threshold=0.1)),
    "saf-grpo": (SAFDistillTrainer, SAFDistillConfig, dict(opd_warmup_steps=0)),
    "saf-gspo": (SAFDistillTrainer, SAFDistillConfig, dict(opd_warmup_steps=0, policy_objective="gspo")),
    "saf-sapo": (SAFDistillTrainer, SAFDistillConfig, dict(opd_warmup_steps=0, policy_objective="sapo")),
}
# read a value on the host, or make a shape of one
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique",
    "repeat_interleave.Tensor",
    "is_nonzero",
    "equal",
)


class NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        assert not name.startswith(WAITING), f"{name} waits for the device"
        if name.startswith(("index.Tensor", "index_put")):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_in_the_loss_waits(method: str, observed: bool, tmp_path: Path) -> None:
    trainer_class, config_class, options = METHODS[method]
    teacher = tiny.teacher() if trainer_class is SAFDistillTrainer else {}
    args = tiny.config(config_class, tmp_path, **options)
    trainer = trainer_class(
        tiny.model(), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer(), **teacher
    )
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [0], [7]])).long()
    logps, old, scores = (-torch.rand(4, 9, generator=generator) for _ in range(3))
    logps.requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, torch.rand(4, 9), None)
    batch: dict[str, Any] = {
        "prompt_ids": torch.ones(4, 3, dtype=torch.long),
        "prompt_mask": torch.ones(4, 3, dtype=torch.long),
        "completion_ids": torch.ones(4, 9, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0]),
        "old_per_token_logps": old,
        "teacher_per_token_logps": scores,
        "num_rows": 4,
        "num_tokens_in_step": mask.sum(),
    }
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    observer = StepObserver()
    trainer._observer = observer if observed else None
    with NoSync():
        trainer._compute_loss(trainer.model, batch).backward()
    gradient: Any = logps.grad
    assert torch.isfinite(gradient).all() and gradient.norm() > 0
    if observed:
        assert observer.counts


def test_the_check_itself() -> None:
    x = torch.tensor([1.0, 0.0])
    with NoSync():
        for wait in (lambda: x.sum().item(), lambda: x[x > 0], lambda: x.nonzero(), lambda: bool(x[0] > 0), x.unique):
            with pytest.raises(AssertionError, match="waits for the device"):
                wait()
