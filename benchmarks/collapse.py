"""Runs of the embedded task that stay healthy and runs that are driven to collapse, and what the guard says of them.

    python benchmarks/collapse.py --settings healthy-mini collapse-sapo --seeds 0 1
    python benchmarks/collapse.py --judge          # the recorded runs again, with the guard's present limits

Each run writes its record to `benchmarks/out/collapse/SETTING-SEED`. The guard is then shown the records step by step,
as it would have seen them in training. Prints the table of detections, delays and false alarms in docs/diagnostics.md.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

FOLDER = Path("benchmarks/out/collapse")
# micro-batches of a rollout of 64 rows, its iterations, optimizer steps
REUSE = dict(per_device_train_batch_size=8, steps_per_generation=8, num_iterations=4, max_steps=1280)
MINI = dict(per_device_train_batch_size=16, steps_per_generation=4, max_steps=480)
ONCE = dict(per_device_train_batch_size=64, max_steps=150)
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "reuse-gspo": ("GSPO", dict(**REUSE, learning_rate=3e-4)),
    "healthy-grpo": ("GRPO", dict(**ONCE, learning_rate=1e-4)),
    "healthy-sapo": ("SAPO", dict(**ONCE, learning_rate=1e-4)),
    "healthy-mini": ("GSPO", dict(**MINI, learning_rate=3e-4)),
    "collapse-sapo": ("SAPO", dict(**REUSE, learning_rate=3e-4)),
    "reuse-sapo-adaptive": ("SAPO", dict(**REUSE, learning_rate=3e-4, adaptive_temperature_quantile=0.95)),
    "reuse-sapo-stop": ("SAPO", dict(**REUSE, learning_rate=3e-4, gate_hard_stop=1.5)),
    "reuse-sapo-gaussian": ("SAPO", dict(**REUSE, learning_rate=3e-4, gate_kernel="gaussian")),
    "collapse-mini": ("SAPO", dict(**MINI, learning_rate=6e-4)),
    "collapse-grpo": ("GRPO", dict(**MINI, learning_rate=6e-4)),
}


def run(setting: str, seed: int) -> None:
    from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer
    from trl_softgate.tasks.addition import build_dataset, build_tokenizer, completion_length, reward_exact
    from trl_softgate.tasks.cold_start import ColdStartRecipe, load_or_build

    method, options = SETTINGS[setting]
    trainer_class, config_class, own = {
        "GSPO": (GSPOTrainer, GSPOConfig, {}),
        "SAPO": (SAPOTrainer, SAPOConfig, {}),
        "GRPO": (SAFDistillTrainer, SAFDistillConfig, dict(opd_coef=0.0, aggregation="seq_mean_token_mean")),
    }[method]
    config = config_class(
        str(FOLDER / f"{setting}-{seed}"),
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=completion_length(4),
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **own,
        **options,
    )
    trainer_class(
        load_or_build(ColdStartRecipe(stop_accuracy=0.28), seed=seed),
        reward_exact,
        config,
        build_dataset(20000, seed, "train"),
        processing_class=build_tokenizer(),
    ).train()


def judge(setting: str, seed: int) -> tuple[str, ...]:
    """What the guard would have said, step by step."""
    import pandas as pd

    from trl_softgate.diagnostics.health import HealthLimits, HealthMonitor

    table = pd.read_parquet(FOLDER / f"{setting}-{seed}" / "record" / "scalars")
    monitor, warned, collapsed = HealthMonitor(HealthLimits()), 0, "-"
    for step, group in table.groupby("step"):
        transition = monitor.observe(int(step), dict(zip(group.name, group.value, strict=True)))  # pyright: ignore
        if transition is not None and transition.state == "warning":
            warned += 1
        if transition is not None and transition.state == "collapsed" and collapsed == "-":
            collapsed = str(transition.step)
    reward: Any = table[table.name == "reward"]
    reward = reward.sort_values(by="step")
    smooth = reward.value.rolling(10).mean()
    peak = int(smooth.argmax())
    last = f"{smooth.iloc[-1]:.2f}"
    return setting, str(seed), f"{smooth.max():.2f} at {reward.step.iloc[peak]}", last, str(warned), collapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--judge", action="store_true", help="train nothing")
    args = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    for setting in args.settings:
        for seed in args.seeds:
            if not args.judge and not (FOLDER / f"{setting}-{seed}" / "record").exists():
                print(f"{setting}, seed {seed} ...", file=sys.stderr)
                run(setting, seed)

    from rich.console import Console
    from rich.table import Table

    table = Table("run", "seed", "peak reward, mean of 10", "at the end", "warnings", "collapsed at step")
    for setting in args.settings:
        for seed in args.seeds:
            if (FOLDER / f"{setting}-{seed}" / "record").exists():
                table.add_row(*judge(setting, seed))
    Console().print(table)


if __name__ == "__main__":
    main()
