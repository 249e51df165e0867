"""One rank of `test_two_processes.py`: trains each method on fixed rollouts, resumes it, and writes what came out."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  (offline, CPU)
import tiny
import torch
import torch.distributed as dist

from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer

ROWS = 4  # per micro-batch, over all processes
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gspo": (GSPOTrainer, GSPOConfig, dict(entropy_coef=0.01)),
    "sapo": (SAPOTrainer, SAPOConfig, dict(aggregation="token_mean")),
    "saf": (
        SAFDistillTrainer,
        SAFDistillConfig,
        dict(opd_warmup_steps=4, opd_kl_drop_threshold=1e-4, opd_coef=10.0, grpo_coef=0.02),
    ),
}


def train(method: str, world_size: int, folder: Path, resume_from: str | None = None) -> Any:
    trainer_class, config_class, options = METHODS[method]
    teacher = dict(teacher_model=tiny.model(7), teacher_processing_class=tiny.tokenizer()) if method == "saf" else {}
    trainer = trainer_class(
        tiny.model(),
        tiny.reward,
        tiny.config(
            config_class,
            folder,
            per_device_train_batch_size=ROWS // world_size,
            gradient_accumulation_steps=2,
            num_iterations=2,
            max_steps=4,
            optim="sgd",
            learning_rate=0.5,
            max_grad_norm=0.0,
            save_strategy="steps",
            save_steps=3,  # inside a reuse window
            **options,
        ),
        tiny.dataset(),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout,
        **teacher,
    )
    assert trainer.accelerator.num_processes == world_size, "the launcher started another number of processes"
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer


def main(output: Path) -> None:
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    results: dict[str, Any] = {}
    for method in METHODS:
        trainer = train(method, world_size, output / method)
        resumed = train(method, world_size, output / f"{method}-resumed", str(output / method / "checkpoint-3"))
        weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        results[method] = {
            "history": [entry for entry in trainer.state.log_history if "loss" in entry],
            "schedule": trainer.fusion_schedule.state_dict() if method == "saf" else None,
            "resumed": all(torch.equal(weights[name], weight) for name, weight in resumed.model.named_parameters()),
        }
        if rank == 0:
            torch.save(weights, output / f"{method}.pt")
    (output / f"rank{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # an abort while the interpreter shuts down says nothing about the results


if __name__ == "__main__":
    main(Path(sys.argv[1]))
