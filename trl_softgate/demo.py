"""The demo behind `trl-softgate demo`: a tiny student learns addition from rewards, and from a teacher.

Everything is generated on the spot: no network, no GPU. The first use trains the student's cold start and the teacher
and caches both (`tasks.cold_start`); then the student is trained with SAF distillation, GSPO or SAPO, and its accuracy
on held-out problems is measured before and after.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tasks.cold_start import STUDENT, TEACHER, ColdStartProgress, ColdStartRecipe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

TRAINERS = {"saf": "SAF distillation", "gspo": "GSPO", "sapo": "SAPO"}
DEFAULT_STEPS = 120


class DemoError(Exception):
    """The demo cannot run here; the message says what to do."""


@dataclass(frozen=True)
class DemoScale:
    """Sizes of the demo. The defaults are the demo; tests use smaller ones.

    Args:
        student: Cold start of the student.
        teacher: Cold start of the teacher.
        held_out: Problems of the test split on which accuracy is measured.
        train_problems: Problems of the train split used for reinforcement learning.
        prompts: Prompts per optimizer step.
        completions: Completions per prompt.
        learning_rate: Of the reinforcement learning, constant.
    """

    student: ColdStartRecipe = STUDENT
    teacher: ColdStartRecipe = TEACHER
    held_out: int = 500
    train_problems: int = 4000
    prompts: int = 8
    completions: int = 8
    learning_rate: float = 2e-4


def run_demo(
    *,
    trainer: str = "saf",
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
    output_dir: Path = Path("runs/demo"),
    scale: DemoScale | None = None,
    cache_dir: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the demo, show its progress, and write `summary.json`, `history.json`, `training.png` and `student/`.

    Accuracies are the share of held-out problems answered right: sampled at temperature 1 with one completion each
    (`student_accuracy_before`, `student_accuracy_after`, `teacher_accuracy`), and greedy (the same names followed by
    `_greedy`).

    Args:
        trainer: `"saf"`, `"gspo"` or `"sapo"`.
        steps: Optimizer steps, at least 2.
        seed: Seed of the models, of the training data and of the sampling. The held-out problems are always the same.
        output_dir: Created when missing; earlier results in it are replaced.
        scale: Sizes; default `DemoScale()`.
        cache_dir: Where the cold-start models are kept; default as in `tasks.cold_start`.
        console: Where progress is shown; default standard output.

    Returns:
        What `summary.json` holds.

    Raises:
        ValueError: If `trainer` is unknown or `steps` is below 2.
        DemoError: If matplotlib is missing.
        OSError: If `output_dir` or the cache cannot be written.
    """
    if trainer not in TRAINERS:
        raise ValueError(f"trainer must be one of {', '.join(TRAINERS)}, got {trainer!r}.")
    if steps < 2:
        raise ValueError(f"steps must be at least 2, got {steps}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise DemoError("the demo draws a figure with matplotlib, which is missing: pip install 'trl-softgate[plots]'")
    from rich.console import Console

    output_dir.mkdir(parents=True, exist_ok=True)
    with _one_quiet_offline_thread():
        return _Demo(
            trainer, steps, seed, output_dir, scale or DemoScale(), cache_dir, console or Console(highlight=False)
        ).run()


@contextmanager
def _one_quiet_offline_thread() -> Iterator[None]:
    """No network, one torch thread, no progress bars but ours; all but the environment is put back afterwards."""
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets
    import torch
    import transformers

    transformers_logging = transformers.utils.logging
    threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    hub_bars, dataset_bars = transformers_logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    # Matrices this small only lose time to a second thread, and one thread makes runs repeatable.
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=FutureWarning)
            warnings.simplefilter("ignore", category=DeprecationWarning)
            yield
    finally:
        torch.set_num_threads(threads)
        transformers_logging.set_verbosity(verbosity)
        if hub_bars:
            transformers_logging.enable_progress_bar()
        if not dataset_bars:
            datasets.enable_progress_bars()


class _Demo:
    def __init__(
        self,
        trainer: str,
        steps: int,
        seed: int,
        output_dir: Path,
        scale: DemoScale,
        cache_dir: Path | None,
        console: Console,
    ) -> None:
        self.trainer = trainer
        self.steps = steps
        self.seed = seed
        self.output_dir = output_dir
        self.scale = scale
        self.cache_dir = cache_dir
        self.console = console
        self.history: list[dict[str, float]] = []

    def run(self) -> dict[str, Any]:
        from .diagnostics.figures import training_figure
        from .tasks.addition import build_tokenizer, sample_problems

        wall, cpu = time.perf_counter(), time.process_time()
        scale, digits = self.scale, self.scale.student.digits
        tokenizer = build_tokenizer()
        held_out = sample_problems(scale.held_out, 0, "test", digits=digits)
        self.console.print(
            f"[bold]{TRAINERS[self.trainer]}[/bold] on {digits}-digit addition: {self.steps} steps of "
            f"{scale.prompts} prompts x {scale.completions} completions, seed {self.seed}"
        )
        self.console.print(f"[dim]{held_out[0].prompt}   ->   {held_out[0].solution}[/dim]")
        with self._progress() as progress:
            student = self._cold_start(progress, "student cold start", scale.student)
            teacher = self._cold_start(progress, "teacher", scale.teacher)
            built = time.perf_counter() - wall

            # label -> (sampled, greedy)
            accuracy: dict[str, tuple[float, float]] = {}
            for label, model in (("before", student), ("teacher", teacher)):
                accuracy[label] = self._evaluate(progress, label, model, tokenizer, held_out)
            started = time.perf_counter()
            self._train(progress, student, teacher, tokenizer)
            trained = time.perf_counter() - started
            accuracy["after"] = self._evaluate(progress, "after", student, tokenizer, held_out)

        student.save_pretrained(self.output_dir / "student")
        tokenizer.save_pretrained(self.output_dir / "student")
        (self.output_dir / "history.json").write_text(json.dumps(self.history, indent=1) + "\n")
        figure = training_figure(
            self.history,
            self.output_dir / "training.png",
            title=f"{TRAINERS[self.trainer]} on {digits}-digit addition",
            subtitle=f"{self.steps} steps, seed {self.seed}; accuracy sampled at temperature 1 on {len(held_out)} "
            "held-out problems",
            accuracy={label: sampled for label, (sampled, _) in accuracy.items()},
        )
        summary = {
            "trainer": self.trainer,
            "steps": self.steps,
            "seed": self.seed,
            "held_out_problems": len(held_out),
            "accuracy_measure": "one completion per problem, sampled at temperature 1; *_greedy: greedy decoding",
            "student_accuracy_before": accuracy["before"][0],
            "student_accuracy_after": accuracy["after"][0],
            "teacher_accuracy": accuracy["teacher"][0],
            "student_accuracy_before_greedy": accuracy["before"][1],
            "student_accuracy_after_greedy": accuracy["after"][1],
            "teacher_accuracy_greedy": accuracy["teacher"][1],
            "seconds": round(time.perf_counter() - wall, 1),
            "seconds_building_models": round(built, 1),
            "seconds_training": round(trained, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "figure": str(figure),
        }
        summary_path = self.output_dir / "summary.json"
        summary_path.write_text(json.dumps(summary, indent=2) + "\n")
        self._report(accuracy, summary, summary_path)
        return summary

    # Phases

    def _cold_start(self, progress: Progress, name: str, recipe: ColdStartRecipe) -> Any:
        from .tasks.cold_start import load_or_build

        report = self._reporter(progress, name, recipe.steps)
        built = False

        def on_progress(state: ColdStartProgress) -> None:
            nonlocal built
            built = True
            accuracy = "" if state.accuracy is None else f"  accuracy {state.accuracy:.2f}"
            report(state.step, f"loss {state.loss:.3f}{accuracy}")

        model = load_or_build(recipe, self.seed, cache_dir=self.cache_dir, on_progress=on_progress)
        report(None, None if built else "from the cache")
        return model

    def _evaluate(
        self, progress: Progress, label: str, model: Any, tokenizer: Any, problems: list[Any]
    ) -> tuple[float, float]:
        from .tasks.addition import evaluate_accuracy

        name = "teacher" if label == "teacher" else f"student {label}"
        report = self._reporter(progress, f"evaluate {name}", 2 * len(problems))
        sampled = evaluate_accuracy(model, tokenizer, problems, seed=self.seed, on_progress=lambda n: report(n, ""))
        report(len(problems), f"sampled {sampled:.1%}")
        greedy = evaluate_accuracy(
            model,
            tokenizer,
            problems,
            temperature=0,
            on_progress=lambda n: report(len(problems) + n, f"sampled {sampled:.1%}"),
        )
        report(None, f"sampled {sampled:.1%}  greedy {greedy:.1%}")
        return sampled, greedy

    def _train(self, progress: Progress, student: Any, teacher: Any, tokenizer: Any) -> None:
        from transformers import PrinterCallback, TrainerCallback

        from . import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer
        from .tasks.addition import build_dataset, completion_length, reward_exact

        scale, digits = self.scale, self.scale.student.digits
        report = self._reporter(progress, f"{TRAINERS[self.trainer]} training", self.steps)
        history = self.history

        class Recorder(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                # The last log of a run holds its timings, no metrics of a step.
                if not logs or "train_runtime" in logs:
                    return
                history.append({"step": state.global_step, **logs})
                report(state.global_step, _describe(history))

        options: dict[str, Any] = {
            "output_dir": str(self.output_dir),
            "max_steps": self.steps,
            "per_device_train_batch_size": scale.prompts * scale.completions,
            "num_generations": scale.completions,
            "max_completion_length": completion_length(digits),
            "temperature": 1.0,
            "learning_rate": scale.learning_rate,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1.0,
            "beta": 0.0,
            "seed": self.seed,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        shared: dict[str, Any] = {
            "model": student,
            "reward_funcs": reward_exact,
            "train_dataset": build_dataset(scale.train_problems, self.seed, "train", digits=digits),
            "processing_class": tokenizer,
            "callbacks": [Recorder()],
        }
        if self.trainer == "saf":
            # The paper's 100 warm-up steps are most of this run. Its KL trigger of 0.2 suits batches of 1,024 long
            # completions; the KL of 64 short ones moves by as much between steps before anything is learned.
            config = SAFDistillConfig(**options, opd_warmup_steps=max(1, self.steps // 6), opd_kl_drop_threshold=0.5)
            trainer = SAFDistillTrainer(
                **shared, args=config, teacher_model=teacher, teacher_processing_class=tokenizer
            )
        else:
            # Four updates per rollout, as in both papers: with one, the ratio is 1, and nothing is clipped or gated.
            options["steps_per_generation"] = 4
            if self.trainer == "gspo":
                trainer = GSPOTrainer(**shared, args=GSPOConfig(**options))
            else:
                trainer = SAPOTrainer(**shared, args=SAPOConfig(**options))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        student.eval()
        report(None, _describe(history))

    # Display

    def _progress(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        return Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
            # A log file or a pipe gets plain lines instead.
            disable=not self.console.is_terminal,
        )

    def _reporter(self, progress: Progress, name: str, total: int) -> Callable[[int | None, str | None], None]:
        """A function (done, status) that moves one progress bar; done None ends it, status None keeps the last."""
        task = progress.add_task(name, total=total, status="")
        shown = 0
        latest = ""

        def report(done: int | None, status: str | None) -> None:
            nonlocal shown, latest
            latest = latest if status is None else status
            if done is None:
                # A cold start may stop early: its bar then ends where it stands.
                progress.update(task, total=progress.tasks[task].completed or total, status=latest)
                progress.update(task, completed=progress.tasks[task].total)
                progress.stop_task(task)
            else:
                progress.update(task, completed=done, status=latest)
            if not self.console.is_terminal:
                tenth = 10 if done is None else 10 * done // total
                if done is None or tenth > shown:
                    self.console.print(f"{name}: {'done' if done is None else f'{done}/{total}'}  {latest}".rstrip())
                    shown = tenth

        return report

    def _report(self, accuracy: dict[str, tuple[float, float]], summary: dict[str, Any], summary_path: Path) -> None:
        from rich.table import Table

        table = Table(title=f"Accuracy on {summary['held_out_problems']} held-out problems", title_justify="left")
        table.add_column("")
        table.add_column("sampled at temperature 1", justify="right")
        table.add_column("greedy", justify="right")
        for label, name in (("before", "student before"), ("after", "student after"), ("teacher", "teacher")):
            style = "bold green" if label == "after" else ""
            table.add_row(name, *(f"{value:.1%}" for value in accuracy[label]), style=style)
        gain = accuracy["after"][0] - accuracy["before"][0]
        self.console.print()
        self.console.print(table)
        self.console.print(f"{100 * gain:+.1f} points sampled, in {summary['seconds']:.0f} s")
        # Paths are printed whole: a wrapped one cannot be copied.
        for name, path in (("figure ", summary["figure"]), ("summary", summary_path)):
            self.console.print(f"{name}  {path}", soft_wrap=True, markup=False)


def _describe(history: list[dict[str, float]]) -> str:
    """Reward averaged over the last 10 rollouts, and what the method adds. A reused rollout logs no reward again."""
    recent = [entry["reward"] for entry in history if "reward" in entry][-10:]
    parts = [f"reward {sum(recent) / len(recent):.2f}"]
    last = history[-1]
    for key, name in (("distill/kl", "KL"), ("distill/multiplier", "multiplier")):
        if key in last:
            parts.append(f"{name} {last[key]:.3f}")
    return "  ".join(parts)
