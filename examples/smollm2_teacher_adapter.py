"""Train a LoRA adapter of SmolLM2-135M-Instruct on the answers of a reasoning-gym task: the teacher of the SAF recipe.

    python examples/smollm2_prepare.py runs/smollm2/base
    python examples/smollm2_teacher_adapter.py --model runs/smollm2/base --output runs/smollm2/teacher

The task and the prompts are those of `recipes/configs/smollm2_saf_lora_cpu.yaml`; the problems are others. Every
option can be set on the command line, see --help.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_softgate.rewards.reasoning_gym import ReasoningGymArguments, RewardFunction, load_task

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class TeacherArguments(ReasoningGymArguments):
    """Options of this example."""

    task_name: str = "chain_sum"
    task_config: dict[str, Any] | str | None = field(
        default_factory=lambda: {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    )
    system_prompt: str | None = "Answer with the number only."
    eval_size: int = 64
    task_seed: int = 1_000_000  # far from the recipe's, so that the teacher has not seen the student's problems
    model: str = field(default="runs/smollm2/base", metadata={"help": "Folder of the base model."})
    output: str = field(default="runs/smollm2/teacher", metadata={"help": "Folder for the adapter."})
    steps: int = field(default=60, metadata={"help": "Optimizer steps."})
    batch_size: int = field(default=4, metadata={"help": "Problems per step."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    seed: int = field(default=0, metadata={"help": "Seed of the adapter's weights and of the order of the problems."})


def main(args: TeacherArguments) -> None:
    """Train and save the adapter; prints the loss as it goes."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    task = load_task(args)
    dataset = task.train_dataset.map(
        lambda row: {"completion": [{"role": "assistant", "content": row["answer"]}]},
        remove_columns=["answer", "task_index"],
    )
    trainer = SFTTrainer(
        # Absolute, since the adapter remembers where its base model is.
        model=str(Path(args.model).resolve()),
        args=SFTConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=dataset,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(args.output)
    print(f"Adapter written to {args.output}.")
    if task.eval_dataset is not None:
        reward = mean_reward(trainer.model, trainer.processing_class, task.eval_dataset, task.reward_func)
        print(f"Mean reward on {args.eval_size} held-out problems, greedy: {reward:.3f}")


def mean_reward(model: Any, tokenizer: Any, dataset: Dataset, reward_func: RewardFunction) -> float:
    """Mean reward of the model's greedy completions, of 16 tokens at most."""
    import torch

    tokenizer.padding_side = "left"  # completions are appended on the right
    inputs = tokenizer.apply_chat_template(
        list(dataset["prompt"]),
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    model.eval()
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = reward_func(completions=texts, task_index=dataset["task_index"])
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    from trl import TrlParser

    parser = TrlParser(
        [TeacherArguments],  # pyright: ignore[reportArgumentType]
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    (arguments,) = parser.parse_args_and_config()
    main(arguments)
