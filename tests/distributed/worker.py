"""One rank of a distributed test: `worker.py SCENARIO FOLDER`. Writes `rank{N}.json`, by which the test judges."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  (offline, CPU)
from distributed import backend

backend.install()

import tiny  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from trl_softgate import (  # noqa: E402
    CollapseGuard,
    GSPOConfig,
    GSPOTrainer,
    SAFDistillConfig,
    SAFDistillTrainer,
    SAPOConfig,
    SAPOTrainer,
    TeacherLogprobsCallback,
)
from trl_softgate.diagnostics.health import HealthLimits  # noqa: E402
from trl_softgate.teachers import LocalTeacher, TeacherError  # noqa: E402

ROWS = 4  # per micro-batch, over all processes
STEPS = 3
# tau of the third step comes from the first two, of all processes
SAPO_OPTIONS: dict[str, Any] = dict(
    aggregation="token_mean", adaptive_temperature_quantile=0.8, adaptive_temperature_max=1e3
)
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gspo": (GSPOTrainer, GSPOConfig, dict(entropy_coef=0.01)),
    "sapo": (SAPOTrainer, SAPOConfig, SAPO_OPTIONS),
    "saf": (
        SAFDistillTrainer,
        SAFDistillConfig,
        dict(opd_warmup_steps=3, opd_kl_drop_threshold=1e-4, opd_coef=10.0, grpo_coef=0.02),
    ),
}
CASES = [f"{method}-{kind}" for method in METHODS for kind in ("full", "lora")]
# each method once
RESUMED = ("gspo-full", "sapo-lora", "saf-full")
# another adapter of the student's base as the teacher: its forward gathers what the backend has spread
METHODS["adapter"] = METHODS["saf"]
# a mixture of experts; its auxiliary loss, a mean over a micro-batch, depends on how rows are split
METHODS["moe"] = (GSPOTrainer, GSPOConfig, dict(router_aux_loss_coef=0.0))
# the same steps without any row or padding left out
METHODS["plain"] = (
    SAPOTrainer,
    SAPOConfig,
    dict(**SAPO_OPTIONS, trim_padding=False, group_rows_by_length=False, skip_zero_signal_rows=False),
)

World = tuple[int, int]


def reward_of_some(completions: list[str], prompts: list[str], **kwargs: Any) -> list[float]:
    """No spread in the groups of prompts of odd length: nothing can be learned from their rows."""
    rewards = tiny.reward(completions)
    return [rewards[i] if len(prompts[i]) % 2 == 0 else 1.0 for i in range(len(rewards))]


def world() -> World:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def forget_accelerator() -> None:
    """Several trainers in one process: each begins with the state of accelerate as launched."""
    AcceleratorState._reset_state()
    GradientState._reset_state()


def make(case: str, folder: Path, base: Path, teacher: Any, **kwargs: Any) -> Any:
    method, kind = case.split("-")
    trainer_class, config_class, options = METHODS[method]
    _, size = world()
    extra: dict[str, Any] = {}
    if kind == "lora":
        extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    if method == "moe":
        base = base.with_name("moe")
    if method == "adapter":
        options = {**options, "teacher_adapter": str(base.with_name("adapter"))}
    if method == "saf":
        if callable(teacher):
            extra["teacher_model"] = teacher
        elif "teachers" not in kwargs:
            options = {**options, "teacher_model_name_or_path": str(teacher)}
    if "callbacks" in kwargs:
        extra["callbacks"] = kwargs.pop("callbacks")
    if (rollout := kwargs.pop("rollout_func", tiny.fixed_rollout)) is not None:
        extra["rollout_func"] = rollout
    forget_accelerator()
    torch.manual_seed(0)
    trainer = trainer_class(
        str(base),
        kwargs.pop("reward", reward_of_some if method in ("sapo", "plain") else tiny.reward),
        tiny.config(
            config_class,
            folder,
            **{
                **dict(
                    per_device_train_batch_size=ROWS // size,
                    per_device_eval_batch_size=ROWS // size,
                    gradient_accumulation_steps=2,
                    num_iterations=2,
                    max_steps=STEPS,
                    optim="sgd",
                    learning_rate=0.5,
                    max_grad_norm=0.0,
                    model_init_kwargs={"dtype": "float32"},
                    save_strategy="steps",
                    record_every=1,
                    save_steps=1,
                ),
                **options,
                **kwargs,
            },
        ),
        tiny.dataset(),
        processing_class=tiny.tokenizer(),
        **extra,
    )
    assert trainer.accelerator.num_processes == size, "the launcher started another number of processes"
    return trainer


def local_parameters(model: Any) -> int:
    """Numbers that this process holds of the model's weights."""
    local = 0
    for parameter in model.parameters():
        tensor = getattr(parameter, "ds_tensor", parameter)
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local += tensor.numel()
    return local


def facts(trainer: Any) -> dict[str, Any]:
    """What shows that the backend is really the one that was asked for."""
    teachers = [c.teacher for c in trainer.callback_handler.callbacks if isinstance(c, TeacherLogprobsCallback)]
    return {
        "world_size": trainer.accelerator.num_processes,
        "type": str(trainer.accelerator.distributed_type),
        "wrapper": type(trainer.model_wrapped).__name__,
        "local_parameters": local_parameters(trainer.model),
        "teacher_parameters": [local_parameters(t.model) for t in teachers if isinstance(t, LocalTeacher)],
    }


def count_empty(trainer: Any) -> list[bool]:
    """Filled in training: whether each micro-batch had no row left."""
    empty: list[bool] = []
    compute_loss = trainer._compute_loss

    def count(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        empty.append(len(inputs["completion_ids"]) == 0)
        return compute_loss(model, inputs)

    trainer._compute_loss = count
    return empty


def parity(folder: Path) -> dict[str, Any]:
    """Each trainer, full and LoRA: trains on fixed rollouts, evaluates and saves."""
    results = {}
    for case in (*CASES, "adapter-lora", "moe-full", "plain-full"):
        output = folder / case
        trainer = make(case, output, folder.parent / "base", folder.parent / "teacher", save_strategy="no")
        empty = count_empty(trainer)
        trainer.train()
        evaluation = trainer.evaluate(tiny.dataset(4))
        trainer.save_model(str(output / "model"))
        results[case] = {
            **facts(trainer),
            "empty_micro_batches": sum(empty),
            "history": [entry for entry in trainer.state.log_history if "loss" in entry],
            "evaluation": evaluation,
            "schedule": trainer.fusion_schedule.state_dict() if hasattr(trainer, "fusion_schedule") else None,
        }
    return results


def resume(folder: Path) -> dict[str, Any]:
    """Each trainer with an optimizer that has state: stopped inside a window of reuse and resumed."""
    results = {}
    for case in RESUMED:
        for name, checkpoint in (("whole", None), ("resumed", str(folder / "whole" / case / "checkpoint-1"))):
            output = folder / name / case
            options: dict[str, Any] = dict(optim="adamw_torch", learning_rate=1e-3)
            trainer = make(
                case, output, folder.parent / "base", folder.parent / "teacher", rollout_func=None, **options
            )
            trainer.train(resume_from_checkpoint=checkpoint)
            trainer.save_model(str(output / "model"))
            results[f"{case}-{name}"] = [entry for entry in trainer.state.log_history if "loss" in entry]
    return results


def guarded(folder: Path) -> dict[str, Any]:
    """A run whose reward falls to nothing at step 3, until a rollback has lowered its learning rate."""

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        lost = trainer.state.global_step >= 2 and trainer.lr_scheduler.get_last_lr()[0] > 6e-4
        return [0.0 if lost else float(1 + sum(map(ord, completion)) % 5) for completion in completions]

    guard = CollapseGuard(
        "rollback", HealthLimits(reward_drop=0.5, window=1, warn_after=1, collapse_after=2, recover_after=2)
    )
    options: dict[str, Any] = dict(optim="adamw_torch", learning_rate=1e-3, lr_scheduler_type="constant")
    trainer = make(
        "gspo-full",
        folder,
        folder.parent / "base",
        folder.parent / "teacher",
        **{**options, "reward": reward, "num_iterations": 1, "max_steps": 5, "callbacks": [guard]},
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return {"rollbacks": guard.rollbacks, "step": trainer.state.global_step, "state": guard.monitor.state}


def both(folder: Path) -> dict[str, Any]:
    return {
        "parity": parity(folder / "parity"),
        "resume": resume(folder / "resume"),
        "guarded": guarded(folder / "guarded"),
    }


def uneven(folder: Path) -> dict[str, Any]:
    """Ranks with very unlike work: nothing to learn from, nobody to ask, no answer, one row with a teacher."""
    rank, _ = world()
    base, teacher = folder.parent / "base", folder.parent / "teacher"
    results: dict[str, Any] = {}

    def one_rank(rows: Callable[[int], list[int]]) -> Any:
        """Rollouts whose completions on rank 1 are `rows(i)`, and longer ones on rank 0."""

        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            output = tiny.fixed_rollout(prompts, trainer)
            if rank == 1:
                output["completion_ids"] = [rows(i) for i in range(len(prompts))]
            return output

        return rollout

    def spread_on_rank_0(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(i % 2) if rank == 0 else 1.0 for i in range(len(completions))]

    named: dict[str, Any] = {"teachers": {"math": {"model_name_or_path": str(teacher)}}}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        # no end of sequence: every row of rank 1 is truncated and masked
        "all masked": (
            "saf-full",
            dict(mask_truncated_completions=True, rollout_func=one_rank(lambda i: [7] * 8)),
        ),
        "no advantage": ("sapo-full", dict(reward=spread_on_rank_0)),
        "one token": ("saf-lora", dict(rollout_func=one_rank(lambda i: [9]), teacher_max_tokens_per_batch=16)),
        "teachers for some": ("saf-full", dict(**named, teacher_max_tokens_per_batch=16)),
    }
    for name, (case, options) in cases.items():
        output = folder / name
        trainer = make(case, output, base, teacher, save_strategy="no", **options)
        if name == "teachers for some":
            # on rank 1, one row of the first generation
            names = ["math" if i < 3 else None for i in range(len(trainer.train_dataset))]
            trainer.train_dataset = trainer.train_dataset.add_column("teacher", names)
        trainer.train()
        results[name] = [entry for entry in trainer.state.log_history if "loss" in entry]
    return results


def raises(folder: Path) -> dict[str, Any]:
    """A reward function that fails on rank 1 alone."""
    rank, _ = world()

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        if rank == 1:
            raise ZeroDivisionError("the reward of rank 1")
        return tiny.reward(completions)

    make("gspo-full", folder / "run", folder.parent / "base", folder.parent / "teacher", reward=reward).train()
    return {}


def no_answer(folder: Path) -> dict[str, Any]:
    """A teacher that fails rank 1, with a checkpoint asked for; and one whose answer for rank 1 is empty."""
    rank, _ = world()
    asked: list[Any] = []

    def scores(request: Any) -> torch.Tensor:
        asked.append(request)
        return torch.full(request.completion_ids.shape, -1.0)

    def fails(request: Any) -> torch.Tensor:
        answer = scores(request)
        if rank == 1 and len(asked) == 3:
            raise TeacherError("no answer for rank 1")
        return answer

    def is_empty(request: Any) -> torch.Tensor:
        return scores(request)[:0] if rank == 1 else scores(request)

    def knows_nothing(request: Any) -> torch.Tensor:
        return scores(request) * (float("nan") if rank == 1 else 1.0)

    results = {}
    for teacher in (fails, is_empty, knows_nothing):
        output = folder / teacher.__name__
        trainer = make(
            "saf-full", output, folder.parent / "base", teacher, save_on_teacher_failure=True, num_iterations=1
        )
        try:
            trainer.train()
        except (TeacherError, ValueError) as error:
            results[teacher.__name__] = {"error": str(error), "step": trainer.state.global_step}
    return results


class Killed(TrainerCallback):
    """kill -9 of this process: in the middle of an optimizer step, or of the writing of a checkpoint."""

    def __init__(self, trainer: Any, where: str) -> None:
        self._where = where
        save_rng_state = trainer._save_rng_state

        def save(*args: Any) -> None:
            if where == "checkpoint" and trainer.state.global_step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            save_rng_state(*args)

        trainer._save_rng_state = save

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._where == "step" and state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path) -> dict[str, Any]:
    """Is killed at `where`; the next run of this scenario goes on from the newest good checkpoint."""
    where = folder.name
    again = (folder / "run").exists()
    if dist.is_initialized():
        dist.barrier()
    options: dict[str, Any] = dict(optim="adamw_torch", learning_rate=1e-3, rollout_func=None)
    trainer = make("saf-full", folder / "run", folder.parent / "base", folder.parent / "teacher", **options)
    if not again:
        trainer.add_callback(Killed(trainer, where))
    trainer.train(resume_from_checkpoint=True if again else None)
    trainer.save_model(str(folder / "model"))
    return {"history": [entry for entry in trainer.state.log_history if "loss" in entry]}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    function.__name__: function for function in (both, uneven, raises, no_answer, killed)
}


def main(scenario: str, folder: Path) -> None:
    rank, _ = world()
    results = SCENARIOS[scenario](folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # an abort while the interpreter shuts down says nothing about the results


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
