"""A run that was stopped and resumed equals the run that never stopped, bit by bit."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors import safe_open
from transformers import TrainerCallback

from trl_softgate import (
    GSPOConfig,
    GSPOTrainer,
    SAFDistillConfig,
    SAFDistillTrainer,
    SAPOConfig,
    SAPOTrainer,
)
from trl_softgate.trainers.state import TrainingState, load_state, save_state

STEPS = 8
# a window of 4 optimizer steps each; the dataset gives one generation per epoch, so that the run crosses an epoch
WINDOWS = {
    "4 slices": dict(steps_per_generation=4, num_iterations=1),
    "2 slices twice": dict(steps_per_generation=2, num_iterations=2),
    "accumulated": dict(steps_per_generation=4, num_iterations=2, gradient_accumulation_steps=2),
}
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gspo": (GSPOTrainer, GSPOConfig, {}),
    "sapo": (SAPOTrainer, SAPOConfig, dict(use_adaptive_entropy=True, entropy_coef=0.01, entropy_target=6.0)),
    # tau changes at every step
    "sapo adaptive": (
        SAPOTrainer,
        SAPOConfig,
        dict(
            gate_kernel="student_t",
            gate_hard_stop=1.5,
            adaptive_temperature_quantile=0.8,
            adaptive_temperature_max=1e6,
            learning_rate=0.01,
        ),
    ),
    # a strong teacher term, so that the KL falls and the trigger fires
    "saf": (
        SAFDistillTrainer,
        SAFDistillConfig,
        dict(
            opd_warmup_steps=6, opd_kl_drop_threshold=0.01, opd_coef=20.0, opd_top_k_percent=None, opd_tanh_coef=None
        ),
    ),
}
# times, and a summary that transformers takes over the steps of one call
NOT_COMPARED = ("train_loss", "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
NOT_COMPARED += ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def make_trainer(method: str, window: str, output_dir: Path, **kwargs: Any) -> Any:
    trainer_class, config_class, options = METHODS[method]
    extra = tiny.teacher() if method == "saf" else {}
    defaults: dict[str, Any] = dict(
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=1,
        logging_steps=3,  # not aligned with the checkpoints: half-averaged metrics must survive
        eval_strategy="steps",
        eval_steps=4,
        per_device_eval_batch_size=4,
    )
    args = tiny.config(config_class, output_dir, **{**defaults, **WINDOWS[window], **options, **kwargs})
    prompts = args.generation_batch_size // args.num_generations
    return trainer_class(
        tiny.model(),
        tiny.reward,
        args,
        tiny.dataset(prompts),
        tiny.dataset(2),
        processing_class=tiny.tokenizer(),
        **extra,
    )


def outcome(trainer: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], Any]:
    history = [{k: v for k, v in entry.items() if k not in NOT_COMPARED} for entry in trainer.state.log_history]
    schedule = trainer.fusion_schedule.state_dict() if hasattr(trainer, "fusion_schedule") else None
    return trainer.model.state_dict(), history, schedule


def assert_same(ours: Any, expected: Any) -> None:
    for name, weight in expected[0].items():
        assert torch.equal(ours[0][name], weight), name
    assert ours[1] == expected[1]
    assert ours[2] == expected[2]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("method", METHODS)
def test_resume_at_every_step_is_bitwise(method: str, window: str, tmp_path: Path) -> None:
    uninterrupted = make_trainer(method, window, tmp_path)
    initial = {name: weight.clone() for name, weight in uninterrupted.model.state_dict().items()}
    uninterrupted.train()
    expected = outcome(uninterrupted)
    assert any(not torch.equal(initial[name], weight) for name, weight in expected[0].items())
    if method == "sapo adaptive":
        taus = [entry["gate/tau_pos"] for entry in expected[1] if "gate/tau_pos" in entry]
        assert len(set(taus)) == len(taus)
    if method == "saf":
        assert expected[2]["frozen_at"] is not None  # the trigger fired, so its state mattered

    for step in range(1, STEPS):
        resumed = make_trainer(method, window, tmp_path / "resumed")
        generated = count_generations(resumed)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same(outcome(resumed), expected)
        accumulation = resumed.args.gradient_accumulation_steps
        assert len(generated) == sum(
            micro % resumed.args._window == 0 for micro in range(step * accumulation, STEPS * accumulation)
        ), "a rollout was generated again"


def count_generations(trainer: Any) -> list[int]:
    calls: list[int] = []
    original = trainer._generate_and_score_completions

    def counted(inputs: Any) -> Any:
        if trainer.model.training:
            calls.append(trainer._step)
        return original(inputs)

    trainer._generate_and_score_completions = counted
    return calls


def test_killed_process_resumes_bitwise(tmp_path: Path) -> None:
    """The real thing: SIGKILL inside a reuse window, then another process."""
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from pathlib import Path
            import conftest, torch
            from test_resume import make_trainer
            from transformers import TrainerCallback

            class Kill(TrainerCallback):
                def on_step_begin(self, args, state, control, **kwargs):
                    if state.global_step == int(sys.argv[2]):
                        os.kill(os.getpid(), signal.SIGKILL)

            trainer = make_trainer("saf", "4 slices", Path(sys.argv[1]))
            trainer.add_callback(Kill())
            trainer.train(resume_from_checkpoint=sys.argv[3] if len(sys.argv) > 3 else None)
            torch.save(trainer.model.state_dict(), Path(sys.argv[1]) / "final.pt")
            """
        )
    )
    here = Path(__file__).parent
    search = [here, here.parent, here.parent.parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, search))}

    def run(*arguments: str) -> int:
        return subprocess.run([sys.executable, str(script), *arguments], env=environment, timeout=240).returncode

    assert run(str(tmp_path / "whole"), "-1") == 0
    assert run(str(tmp_path / "killed"), "6") == -signal.SIGKILL
    assert run(str(tmp_path / "killed"), "-1", str(tmp_path / "killed" / "checkpoint-6")) == 0
    whole, killed = (torch.load(tmp_path / name / "final.pt", weights_only=True) for name in ("whole", "killed"))
    for name, weight in whole.items():
        assert torch.equal(killed[name], weight), name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    trainer = make_trainer("gspo", "4 slices", tmp_path, max_steps=2, eval_strategy="no")
    trainer.train()
    return tmp_path / "checkpoint-2"


def resume(checkpoint: Path, tmp_path: Path, method: str = "gspo", window: str = "4 slices", **kwargs: Any) -> Any:
    trainer = make_trainer(method, window, tmp_path / "resumed", **{"max_steps": 4, "eval_strategy": "no", **kwargs})
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def test_the_state_file_is_safetensors_with_json(checkpoint: Path) -> None:
    with safe_open(checkpoint / "softgate_state_0.safetensors", framework="pt") as file:
        header = json.loads(bytes(file.get_tensor("json").tolist()))
        names = set(file.keys())
    assert header["micro_step"] == 2 and header["geometry"]["steps_per_generation"] == 4
    assert {f"buffer/{i}/completion_ids" for i in range(4)} <= names
    assert not list(checkpoint.glob("*.tmp"))


def test_checkpoint_without_state_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "softgate_state_0.safetensors").unlink()
    with pytest.raises(ValueError, match="resume_inexact=True"):
        resume(checkpoint, tmp_path)
    with pytest.warns(UserWarning, match="differs from one that never stopped"):
        assert resume(checkpoint, tmp_path, resume_inexact=True).state.global_step == 4


def test_damaged_state_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "softgate_state_0.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a readable training state"):
        resume(checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(window="2 slices twice"), "`steps_per_generation` 4 -> 2"),
        (dict(per_device_train_batch_size=2), "`per_device_train_batch_size` 4 -> 2"),
        (dict(seed=1), "`seed` 42 -> 1"),
    ],
)
def test_other_geometry_is_refused(change: dict[str, Any], named: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        resume(checkpoint, tmp_path, **change)


def test_inexact_resume_keeps_what_still_fits(tmp_path: Path) -> None:
    """Another geometry makes the rollouts useless, not the KL that was observed."""
    options: dict[str, Any] = dict(eval_strategy="no", opd_warmup_steps=5, opd_kl_drop_threshold=1e-9)
    first = make_trainer("saf", "4 slices", tmp_path, **options)
    first.train()
    frozen = first.fusion_schedule.state_dict()["frozen_at"]
    assert frozen is not None and frozen < 6
    with pytest.warns(UserWarning, match="`steps_per_generation` 4 -> 2"):
        resumed = resume(
            tmp_path / "checkpoint-6",
            tmp_path,
            "saf",
            "2 slices twice",
            resume_inexact=True,
            **options,
            max_steps=STEPS,
        )
    assert resumed.fusion_schedule.state_dict()["frozen_at"] == frozen


def test_failed_resume_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gspo", "4 slices", tmp_path / "again", max_steps=2, eval_strategy="no", save_strategy="no")

    class Fail(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("no disk")

    trainer.callback_handler.callbacks.insert(0, Fail())
    with pytest.raises(RuntimeError, match="no disk"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer.callback_handler.callbacks.pop(0)
    generated = count_generations(trainer)
    trainer.train()
    assert generated == [0]


def test_state_holds_logged_completions_of_any_kind(tmp_path: Path) -> None:
    """More than the 100 MB that a safetensors header may have, non-ASCII, half a surrogate pair, numpy numbers."""
    logs = {"prompt": ["\u00e9" * 60_000_000, "\ud800"], "extra": [np.float32(1.5)]}
    save_state(tmp_path / "state", TrainingState({}, 3, None, logs))
    loaded = load_state(tmp_path / "state", torch.device("cpu", 0))
    assert loaded.progress == {"prompt": logs["prompt"], "extra": [1.5]} and loaded.micro_step == 3


def test_other_schedule_is_refused(tmp_path: Path) -> None:
    make_trainer("saf", "4 slices", tmp_path, max_steps=6, eval_strategy="no").train()
    with pytest.raises(ValueError, match="fusion schedule"):
        resume(tmp_path / "checkpoint-2", tmp_path, "saf", max_steps=8)


def test_second_training_starts_over(tmp_path: Path) -> None:
    """`train()` again without a checkpoint: no stale rollout, no half-filled statistics."""
    trainer = make_trainer("gspo", "4 slices", tmp_path, max_steps=2, eval_strategy="no", save_strategy="no")
    trainer.train()
    generated = count_generations(trainer)
    trainer.train()
    assert generated == [0]


class TestCompleteness:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        make_trainer("gspo", "2 slices twice", tmp_path, max_steps=3).train()
        return tmp_path

    def resumed_from(self, trainer: Any, **kwargs: Any) -> int:
        steps: list[int] = []

        class Begin(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                steps.append(state.global_step)

        trainer.add_callback(Begin())
        trainer.train(**kwargs)
        return steps[0]

    def test_every_checkpoint_that_was_written_is_marked(self, run: Path) -> None:
        assert sorted(path.parent.name for path in run.glob("checkpoint-*/softgate_complete")) == [
            f"checkpoint-{step}" for step in (1, 2, 3)
        ]

    def test_the_newest_complete_one_is_taken(self, run: Path) -> None:
        (run / "checkpoint-3" / "softgate_complete").unlink()
        (run / "checkpoint-7").mkdir()
        trainer = make_trainer("gspo", "2 slices twice", run, max_steps=4)
        assert self.resumed_from(trainer, resume_from_checkpoint=True) == 2

    def test_an_incomplete_one_is_refused_by_name(self, run: Path) -> None:
        (run / "checkpoint-3" / "softgate_complete").unlink()
        trainer = make_trainer("gspo", "2 slices twice", run, max_steps=4, resume_inexact=True)
        with pytest.raises(ValueError, match="was cut off: resume from an older one"):
            trainer.train(resume_from_checkpoint=str(run / "checkpoint-3"))

    def test_one_that_is_written_again_is_incomplete_meanwhile(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = make_trainer("gspo", "2 slices twice", run, max_steps=3)
        marked: list[bool] = []
        save_rng_state = trainer._save_rng_state

        def save(folder: str) -> None:
            marked.append((Path(folder) / "softgate_complete").exists())
            save_rng_state(folder)

        monkeypatch.setattr(trainer, "_save_rng_state", save)
        trainer.train()
        assert marked == [False] * 3

    def test_an_older_one_goes_only_when_the_new_one_is_complete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = make_trainer("gspo", "2 slices twice", tmp_path, max_steps=3, save_total_limit=1)
        before: list[int] = []
        wait = trainer.accelerator.wait_for_everyone

        def waited() -> None:
            before.append(len(list(tmp_path.glob("checkpoint-*"))))
            wait()

        monkeypatch.setattr(trainer.accelerator, "wait_for_everyone", waited)
        trainer.train()
        # the last call in each save comes before the mark, and the older checkpoint is still there
        assert max(before) == 2
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
