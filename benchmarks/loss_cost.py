"""What the fusion and the objectives cost: beside a loop over rows, as B * T grows, and beside stock TRL's loss.

    OMP_NUM_THREADS=1 python benchmarks/loss_cost.py
    python benchmarks/loss_cost.py --quick

No model: log-probabilities and entropies are given, and what follows them is measured. Variants take turns in this
process. A ratio of times is the median over neighboring pairs; an exponent is fitted to the fastest of several runs.
With one thread, seconds are those of the processor, so that other programs disturb little. Peak memory is counted, not
sampled: bytes of the tensors that exist at a time beyond the given ones, from the loss to its gradient.

`--compile` measures `torch.compile` of the fusion and the objectives too: it needs a C++ compiler and some minutes.
Letters as in `trl_softgate.objectives`.
"""

import argparse
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from memory import PeakMemory
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer
from trl_softgate.fusion import fuse_advantages, has_teacher_value, opd_advantage
from trl_softgate.objectives import ObjectiveOutput, grpo_loss, gspo_loss, reduce_loss, sapo_loss
from trl_softgate.tasks.addition import build_tokenizer

LARGE, SMALL = (64, 8192), (4, 512)
K, C, MULTIPLIER = 20.0, 0.1, 0.5
OPTIONS: dict[str, dict[str, float]] = {
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "grpo": {"epsilon_low": 0.2, "epsilon_high": 0.27},
    "gspo": {"epsilon_low": 3e-4, "epsilon_high": 4e-4},
}
METHODS = list(OPTIONS)
LOOP_BAR, GROWTH_BAR, MEMORY_BAR = 0.5, 1.05, 1.0


@dataclass
class Batch:
    """Random log-probabilities near each other, and rows of different lengths with padding on the right."""

    logps: torch.Tensor
    old: torch.Tensor
    teacher: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, size: int, length: int) -> "Batch":
        draw = torch.Generator().manual_seed(0)
        logps = -3 * torch.rand(size, length, generator=draw)
        lengths = torch.randint(length // 4, length + 1, (size, 1), generator=draw)
        return cls(
            logps=logps.requires_grad_(),
            old=logps.detach() + 0.05 * torch.randn(size, length, generator=draw),
            teacher=logps.detach() + torch.randn(size, length, generator=draw),
            advantages=torch.randn(size, generator=draw),
            mask=torch.arange(length) < lengths,
        )

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, self.logps)[0]


# Ours


def fused(batch: Batch) -> torch.Tensor:
    return fuse_advantages(
        batch.advantages,
        opd_advantage(batch.logps.detach(), batch.teacher, batch.mask),
        batch.mask,
        available=has_teacher_value(batch.teacher, batch.mask),
        multiplier=MULTIPLIER,
        top_k_percent=K,
        tanh_coef=C,
    ).advantages


def objective(method: str, batch: Batch, advantages: torch.Tensor) -> ObjectiveOutput:
    tensors, options = (batch.logps, batch.old, advantages, batch.mask), OPTIONS[method]
    if method == "gspo":
        return gspo_loss(*tensors, level="token" if advantages.dim() == 2 else "sequence", **options)
    return {"sapo": sapo_loss, "grpo": grpo_loss}[method](*tensors, **options)


def loss_and_gradient(method: str, batch: Batch, advantages: torch.Tensor) -> torch.Tensor:
    return batch.gradient(reduced_loss(method, batch, advantages))


def fused_loss_and_gradient(method: str, batch: Batch) -> torch.Tensor:
    return loss_and_gradient(method, batch, fused(batch))


def reduced_loss(method: str, batch: Batch, advantages: torch.Tensor) -> torch.Tensor:
    out = objective(method, batch, advantages)
    return reduce_loss(out.per_token_loss, batch.mask, "seq_mean_token_mean")


# The obvious code: row by row


def row_advantages(row: Batch, found: dict[str, torch.Tensor]) -> torch.Tensor:
    """Stages 1 and 2 and the fusion on one row, (T,), with the diagnostics of `fuse_advantages`."""
    known = row.mask & torch.isfinite(row.teacher)
    opd = torch.where(known, row.teacher - row.logps.detach(), 0.0)
    size = opd.abs()
    kept = known & (size >= torch.quantile(size[known], 1 - K / 100))
    term = MULTIPLIER * C * torch.tanh(torch.where(kept, opd, 0.0))
    grpo = torch.where(row.mask, row.advantages, 0.0)
    found |= {
        "size": size[known].sum(),
        "largest": size[known].max(),
        "term": term[known].abs().sum(),
        "largest term": term[known].abs().max(),
        "kept": kept.sum(),
        "known": known.sum(),
        "grpo": grpo.abs().sum(),
        "missing": (row.mask & ~known).sum(),
    }
    return grpo + term


def row_loss(method: str, row: Batch, advantages: torch.Tensor, found: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of one row, with the diagnostics of the objectives."""
    options, mask, count = OPTIONS[method], row.mask, row.mask.sum()
    log_ratio = torch.where(mask, row.logps - row.old, 0.0)
    if method == "gspo":
        x = torch.where(mask, row.logps, 0.0)
        log_ratio = x - x.detach() + (log_ratio.sum() / count).detach()
    ratio = torch.exp(log_ratio.clamp(-20, 20))
    if method == "sapo":
        tau = torch.where(advantages > 0, options["tau_pos"], options["tau_neg"])
        p = torch.sigmoid(tau * (ratio - 1))
        loss = -advantages * p * 4 / tau
        weight = 4 * p.detach() * (1 - p.detach())
        for name, signed in (("positive", mask & (advantages > 0)), ("negative", mask & (advantages < 0))):
            found |= {name: weight[signed].sum(), f"{name} count": signed.sum()}
    else:
        low, high = 1 - options["epsilon_low"], 1 + options["epsilon_high"]
        loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
        clipped_low = mask & (ratio < low) & (advantages < 0)
        clipped_high = mask & (ratio > high) & (advantages > 0)
        found |= {"low": clipped_low.sum(), "high": clipped_high.sum(), "both": (clipped_low | clipped_high).sum()}
    valid = ratio.detach()[mask]
    found |= {"ratio": valid.sum(), "smallest": valid.min(), "largest ratio": valid.max(), "count": count}
    return torch.where(mask, loss, 0.0).sum() / count


def by_rows(method: str, batch: Batch) -> torch.Tensor:
    losses = []
    for b in range(len(batch.mask)):
        row = Batch(batch.logps[b], batch.old[b], batch.teacher[b], batch.advantages[b], batch.mask[b])
        found: dict[str, torch.Tensor] = {}
        losses.append(row_loss(method, row, row_advantages(row, found), found))
    return batch.gradient(torch.stack(losses).mean())


# Measuring


def seconds(call: Callable[[], object]) -> float:
    """Of the processor where one thread works, of the clock where several do."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    call()
    return clock() - begin


def alternate(ours: Callable[[], object], other: Callable[[], object], repeat: int, inner: int = 1) -> dict[str, Any]:
    """Median time of both, median and quartiles of their ratio; each measurement makes `inner` calls."""

    def times(call: Callable[[], object]) -> float:
        return seconds(lambda: [call() for _ in range(inner)]) / inner

    times(ours)
    times(other)
    pairs = [(times(ours), times(other)) for _ in range(repeat)]
    ratios = [a / b for a, b in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4) if repeat > 1 else ratios * 3
    return {
        "ratio": middle,
        "spread": [low, high],
        "seconds": statistics.median(a for a, _ in pairs),
        "other_seconds": statistics.median(b for _, b in pairs),
    }


def fastest(call: Callable[[], object], repeat: int) -> float:
    call()
    return min(seconds(call) for _ in range(repeat))


def exponent(sizes: list[int], times: list[float]) -> float:
    """Slope of log time over log size."""
    return statistics.linear_regression([math.log(n) for n in sizes], [math.log(t) for t in times]).slope


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


# Trainers, whose `_compute_loss` is called with a given forward


def make_trainers(method: str, folder: str) -> tuple[GRPOTrainer, GRPOTrainer]:
    """Our trainer and stock TRL's of the same method."""
    options: dict[str, Any] = dict(
        output_dir=folder, per_device_train_batch_size=2, num_generations=2, use_cpu=True, bf16=False, report_to="none"
    )
    clip = {"epsilon": 0.2, "epsilon_high": 0.27}
    if method == "sapo":
        ours, config = SAPOTrainer, SAPOConfig(**options)
        stock = GRPOConfig(loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, **options)
    elif method == "gspo":
        ours, config = GSPOTrainer, GSPOConfig(**options)
        clip = {"epsilon": 3e-4, "epsilon_high": 4e-4}
        stock = GRPOConfig(loss_type="grpo", importance_sampling_level="sequence", **clip, **options)
    else:
        # without the teacher's term it is GRPO
        aggregation = {"aggregation": "seq_mean_token_mean", "policy_objective": "grpo", "opd_coef": 0.0}
        ours, config = SAFDistillTrainer, SAFDistillConfig(**aggregation, **clip, **options)
        stock = GRPOConfig(loss_type="grpo", **clip, **options)
    return _trainer(ours, config), _trainer(GRPOTrainer, stock)


def _trainer(cls: type[GRPOTrainer], config: GRPOConfig) -> GRPOTrainer:
    tokenizer: Any = build_tokenizer()
    size: dict[str, Any] = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    special = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    model: Any = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_key_value_heads=1, head_dim=16, **size, **special))

    def reward(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [0.0] * len(completions)

    dataset = Dataset.from_dict({"prompt": ["1+1="] * 4})
    return cls(model, reward, args=config, train_dataset=dataset, processing_class=tokenizer)


def loss_of(trainer: Any, batch: Batch, on_forward: Callable[[], None] = lambda: None) -> Callable[[], torch.Tensor]:
    """`_compute_loss` with a forward that costs nothing, and the gradient."""
    entropies = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1))

    def forward(*args: Any, **kwargs: Any) -> Any:
        on_forward()
        return batch.logps, entropies, None

    trainer._get_per_token_logps_and_entropies = forward
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    ids = torch.ones(batch.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": batch.mask.long(),
        "old_per_token_logps": batch.old,
        "advantages": batch.advantages,
        "num_items_in_batch": batch.mask.sum(),
    }
    return lambda: batch.gradient(trainer._compute_loss(trainer.model, inputs))


def peak_bytes_after_forward(trainer: Any, batch: Batch) -> int:
    with PeakMemory() as memory:
        loss_of(trainer, batch, memory.begin)()
    return memory.bytes


# Cases


def beside_a_loop(quick: bool) -> list[dict[str, Any]]:
    size, length = SMALL if quick else LARGE
    batch = Batch.of(size, length)
    cases = []
    for method in METHODS:
        ours, loop = partial(fused_loss_and_gradient, method, batch), partial(by_rows, method, batch)
        name = f"stages, fusion and {method} / loop over rows, ({size}, {length})"
        case = {"case": name, "bar": LOOP_BAR, "grad_rel_diff": relative_difference(ours(), loop())}
        cases.append(case | alternate(ours, loop, 3 if quick else 9))
    return cases


def growth(quick: bool) -> list[dict[str, Any]]:
    shapes = [(64, 2**n) for n in range(8, 14)] + [(2**n, 8192) for n in range(1, 6)]
    if quick:
        shapes = [(2, 128), (4, 256)]
    batches = [Batch.of(*shape) for shape in shapes]
    calls: dict[str, list[Callable[[], object]]] = {"fusion": [partial(fused, batch) for batch in batches]}
    for method in METHODS:
        calls[f"{method} loss"] = [partial(loss_and_gradient, method, batch, fused(batch)) for batch in batches]
    cases = []
    for name, of_shape in calls.items():
        times = [fastest(call, 3 if quick else 15) for call in of_shape]
        case = {"case": f"{name}: exponent of time in B * T", "bar": GROWTH_BAR, "grad_rel_diff": None}
        cases.append(case | {"ratio": exponent([b * t for b, t in shapes], times), "shapes": shapes, "seconds": times})
    return cases


def beside_stock(quick: bool) -> list[dict[str, Any]]:
    cases = []
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            ours, stock = make_trainers(method, folder)
        for size, length in [SMALL] if quick else [SMALL, LARGE]:
            batch = Batch.of(size, length)
            ours_loss, stock_loss = loss_of(ours, batch), loss_of(stock, batch)
            difference = relative_difference(ours_loss(), stock_loss())
            other = f"stock, ({size}, {length})"
            case = {"case": f"time after the forward: {method} trainer / {other}", "bar": None}
            case |= alternate(ours_loss, stock_loss, 3 if quick else 15, inner=repeated(size, length))
            cases.append(case | {"grad_rel_diff": difference})

            with PeakMemory() as memory:
                loss_and_gradient(method, batch, batch.advantages)
            peaks = {"objective": memory.bytes, "trainer": peak_bytes_after_forward(ours, batch)}
            most = peak_bytes_after_forward(stock, batch)
            for name, peak in peaks.items():
                case = {"case": f"peak memory: {method} {name} / {other}", "ratio": peak / most, "bar": MEMORY_BAR}
                cases.append(case | {"grad_rel_diff": difference, "bytes": peak, "other_bytes": most})
    return cases


def compiled(quick: bool) -> list[dict[str, Any]]:
    """`torch.compile` of fusion and objectives beside the same functions as they are; no bar."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return []
    cases = []
    for size, length in [SMALL] if quick else [SMALL, LARGE]:
        batch = Batch.of(size, length)
        advantages = fused(batch)
        calls: dict[str, Callable[[], torch.Tensor]] = {"fusion": partial(fused, batch)}
        for method in METHODS:
            calls[method] = partial(loss_and_gradient, method, batch, advantages)
        for name, call in calls.items():
            torch._dynamo.reset()
            fast = compile_call(name, batch, advantages)
            begin = time.perf_counter()
            difference = relative_difference(fast(), call())
            first = time.perf_counter() - begin
            case = {"case": f"compiled / as it is: {name}, ({size}, {length})", "bar": None, "first_seconds": first}
            case |= alternate(fast, call, 3 if quick else 9, inner=repeated(size, length))
            cases.append(case | {"grad_rel_diff": difference})
    return cases


def repeated(size: int, length: int) -> int:
    """Calls in one measurement."""
    return max(1, 2**15 // (size * length))


def compile_call(name: str, batch: Batch, advantages: torch.Tensor) -> Callable[[], torch.Tensor]:
    if name == "fusion":
        compiled_fusion = torch.compile(fused, fullgraph=True)
        return lambda: compiled_fusion(batch)
    compiled_loss = torch.compile(reduced_loss, fullgraph=True)
    return lambda: batch.gradient(compiled_loss(name, batch, advantages))


def run(threads: int = 1, quick: bool = False, compile: bool = False) -> list[dict[str, Any]]:
    """All cases, each with `case`, `ratio`, `bar` (None: only reported), `grad_rel_diff` and its numbers.

    Args:
        threads: of torch.
        quick: sizes at which the numbers mean nothing.
        compile: measure `torch.compile` as well.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cases = beside_a_loop(quick) + growth(quick) + beside_stock(quick)
        return cases + (compiled(quick) if compile else [])
    finally:
        torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="sizes at which the numbers mean nothing")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile as well")
    args = parser.parse_args()
    table = Table("case", "ratio", "quartiles", "bar", "ours", "other", "gradient", title=f"{args.threads} thread(s)")
    for case in run(**vars(args)):
        unit, scale = ("MiB", 2**-20) if "bytes" in case else ("ms", 1e3)
        both = [case.get("bytes", case.get("seconds")), case.get("other_bytes", case.get("other_seconds"))]
        table.add_row(
            case["case"],
            f"{case['ratio']:.3f}",
            "-".join(f"{x:.2f}" for x in case.get("spread", [])),
            "" if case["bar"] is None else f"{case['bar']:.2f}",
            *(f"{x * scale:.2f} {unit}" if isinstance(x, int | float) else "" for x in both),
            "" if case["grad_rel_diff"] is None else f"{case['grad_rel_diff']:.0e}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
