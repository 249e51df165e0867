"""The objectives compile as one graph for all lengths, and never ask the device for a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from objectives.cases import OBJECTIVES, PER_TOKEN, default_settings, ours, random_batch
from torch import Tensor

from trl_softgate.diagnostics import statistics
from trl_softgate.objectives import k3_divergence, reduce_loss

CASES = [(name, False) for name in OBJECTIVES] + [(name, True) for name in PER_TOKEN]
SHAPES = [(4, 7), (3, 30)]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def batch_of(per_token: bool, size: int, length: int) -> tuple[Tensor, ...]:
    """With sizes that a graph may not take for constants."""
    tensors = random_batch(size, per_token=per_token, size=size, length=length).tensors(torch.float32)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, list(range(tensor.dim())))
    return tensors


# one shape of the advantages for each: a compilation takes seconds
@pytest.mark.parametrize(
    ("name", "per_token"), [("grpo", False), ("gspo_sequence", False), ("gspo_token", True), ("sapo", True)]
)
def test_one_graph_for_all_lengths(name: str, per_token: bool) -> None:
    options = default_settings(name)

    def loss(lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        out = ours(name, lp, old, advantages, mask, options)
        return reduce_loss(out.per_token_loss, mask, "seq_mean_token_mean"), out.ratio, out.metrics

    fast = compiled(loss)
    for shape in SHAPES:
        lp, old, advantages, mask = batch_of(per_token, *shape)
        with torch.compiler.set_stance("default" if shape == SHAPES[0] else "fail_on_recompile"):
            actual = fast(lp, old, advantages, mask)
        expected = loss(lp, old, advantages, mask)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
        gradients = [torch.autograd.grad(result[0], lp)[0] for result in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)
        assert gradients[1].any() or name.startswith("gspo")


def test_k3_is_one_graph() -> None:
    fast = compiled(k3_divergence)
    for shape in SHAPES:
        lp, teacher, _, mask = batch_of(False, *shape)
        torch.testing.assert_close(fast(lp, teacher, mask), k3_divergence(lp, teacher, mask), rtol=1e-6, atol=1e-7)


def test_wrong_arguments_are_refused_in_a_graph_too() -> None:
    options = {"tau_pos": 0.0, "tau_neg": 1.0}
    fast = compiled(lambda lp, old, advantages, mask: ours("sapo", lp, old, advantages, mask, options).per_token_loss)
    with pytest.raises(Exception, match="tau_pos"):
        fast(*batch_of(False, 4, 7))


# On the meta device there are no numbers: `.item()`, `bool()` of a tensor and sizes that depend on data all raise, as
# they would make an accelerator wait.


@pytest.mark.parametrize(("name", "per_token"), CASES)
def test_nothing_waits_for_the_device(name: str, per_token: bool) -> None:
    lp, old, advantages, mask = (x.to("meta") for x in batch_of(per_token, 4, 7))
    out = ours(name, lp, old, advantages, mask, default_settings(name))
    loss = reduce_loss(out.per_token_loss, mask, "token_mean")
    (gradient,) = torch.autograd.grad(loss, lp)
    assert gradient.shape == lp.shape
    merged = dict(out.statistics)
    statistics.merge(merged, out.statistics)
    assert statistics.pack(merged).is_meta
    assert all(value.is_meta and value.shape == () for value in statistics.results(merged).values())


def test_k3_and_reductions_do_not_wait_for_the_device() -> None:
    lp, teacher, _, mask = (x.to("meta") for x in batch_of(False, 4, 7))
    kl = k3_divergence(lp, teacher, mask)
    for denominator in (None, 3, mask.sum()):
        for aggregation in ("seq_mean_token_mean", "token_mean"):
            assert reduce_loss(kl, mask, aggregation, denominator).is_meta
    assert statistics.ratio(kl, mask).result().is_meta
