"""SAPO's gate as the trainer's options make it."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny

from trl_softgate import SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer
from trl_softgate.objectives import GATE_KERNELS

METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sapo": (SAPOTrainer, SAPOConfig, {}),
    "saf": (SAFDistillTrainer, SAFDistillConfig, dict(policy_objective="sapo", opd_warmup_steps=0)),
}
ADAPTIVE: dict[str, Any] = dict(adaptive_temperature_quantile=0.9, adaptive_temperature_max=1e3)


def run(method: str, folder: Path, **options: Any) -> Any:
    trainer_class, config_class, own = METHODS[method]
    args = tiny.config(
        config_class,
        folder,
        **{
            **dict(max_steps=3, steps_per_generation=4, record_every=1, learning_rate=0.02, optim="sgd"),
            **own,
            **options,
        },
    )
    trainer_class(
        tiny.model(),
        tiny.reward,
        args,
        tiny.dataset(),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout,
        **(tiny.teacher() if method == "saf" else {}),
    ).train()
    record = pd.read_parquet(folder / "record" / "scalars")
    return record.pivot(index="step", columns="name", values="value")


@pytest.mark.parametrize("method", METHODS)
def test_an_adaptive_temperature_is_the_one_of_the_loss(method: str, tmp_path: Path) -> None:
    """On-policy no temperature matters: a run that has the second step's from the start takes both steps alike."""
    adaptive = run(method, tmp_path / "adaptive", **ADAPTIVE)
    first, second, third = adaptive["gate/tau_pos"]
    assert first == 1.0 and second > 1.5 and third != second
    assert adaptive["gate/tau_neg"].tolist() == pytest.approx([1.05 * tau for tau in (first, second, third)])
    fixed = run(
        method,
        tmp_path / "fixed",
        sapo_temperature_pos=second,
        sapo_temperature_neg=1.05 * second,
    )
    names = ["gate/weight_pos", "gate/weight_neg", "ratio/max", "gate/gap_bound", "gate/weight_neg_p05"]
    for name in names:
        assert adaptive[name][2] == pytest.approx(fixed[name][2], rel=1e-3), name
    assert adaptive["gate/weight_neg"][2] < 0.9999
    assert adaptive["gate/weight_neg"][3] != pytest.approx(fixed["gate/weight_neg"][3], rel=1e-2)


@pytest.mark.parametrize("kernel", GATE_KERNELS)
def test_the_kernel_is_the_one_of_the_loss_and_of_the_record(kernel: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(sapo_temperature_pos=30.0, sapo_temperature_neg=30.0, learning_rate=0.05)
    ours, sigmoid = (
        run("sapo", tmp_path / name, **options, gate_kernel=name, gate_hard_stop=stop)
        for name, stop in ((kernel, 1.001), ("sigmoid", None))
    )
    assert ours["gate/stopped_share"][2] > 0
    assert (ours["gate/weight_neg"][2] != sigmoid["gate/weight_neg"][2]) or kernel == "sigmoid"
    assert ours["gate/weight_neg"][2] < sigmoid["gate/weight_neg"][2]
    assert ("gate/gap_mean" in ours) == (kernel == "sigmoid")
