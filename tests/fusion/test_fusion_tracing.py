"""The fusion compiles as one graph for all lengths, and never asks the device for a number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trl_softgate.diagnostics import statistics
from trl_softgate.fusion import fuse_advantages, has_teacher_value, opd_advantage
from trl_softgate.fusion.advantages import FusionOutput

OPTIONS: dict[str, Any] = {"grpo_coef": 0.5, "multiplier": 0.7, "top_k_percent": 20.0, "tanh_coef": 0.1}


def tensors(size: int, length: int, per_token: bool = False) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(length)
    lp, teacher = -torch.rand(size, length, generator=draw), -torch.rand(size, length, generator=draw)
    teacher[0, 1] = math.nan
    advantages = torch.randn((size, length) if per_token else (size,), generator=draw)
    given = advantages, lp, teacher, torch.rand(size, length, generator=draw) < 0.7
    for tensor in given:
        # sizes that a graph may not take for constants
        torch._dynamo.mark_dynamic(tensor, list(range(tensor.dim())))
    return given


def fuse(advantages: torch.Tensor, lp: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> FusionOutput:
    known = has_teacher_value(teacher, mask)
    opd = opd_advantage(lp, teacher, mask)
    return fuse_advantages(advantages, opd, mask, available=known, expected=mask, **OPTIONS)


def test_one_graph_for_all_lengths() -> None:
    def values(*given: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        out = fuse(*given)
        return out.advantages, out.metrics

    torch._dynamo.reset()
    fast = torch.compile(values, fullgraph=True, backend="aot_eager")
    for stance, shape in (("default", (4, 7)), ("fail_on_recompile", (3, 30))):
        given = tensors(*shape)
        with torch.compiler.set_stance(stance):
            actual = fast(*given)
        torch.testing.assert_close(actual, values(*given), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("per_token", [False, True])
def test_nothing_waits_for_the_device(per_token: bool) -> None:
    # On the meta device there are no numbers: what needs one raises.
    out = fuse(*(x.to("meta") for x in tensors(4, 9, per_token)))
    assert out.advantages.is_meta
    assert out.advantages.shape == (4, 9)
    assert statistics.pack(out.statistics).is_meta
    assert all(value.is_meta for value in out.metrics.values())
