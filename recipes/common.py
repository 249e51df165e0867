"""The one way through that the recipes share: parse the options, generate the task, train, save."""

from __future__ import annotations

from typing import Any

from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_softgate.rewards.reasoning_gym import ReasoningGymArguments, load_task


def make_parser(config_class: type[GRPOConfig], description: str | None = None) -> TrlParser:
    """Parser of `--config FILE.yaml` and of every field of the task, the trainer's config and `trl.ModelConfig`."""
    return TrlParser((ReasoningGymArguments, config_class, ModelConfig), description=description)  # pyright: ignore[reportArgumentType]


def checkpoint_of(value: str | bool | None) -> str | bool | None:
    """`--resume_from_checkpoint true`, a text on the command line, is the newest complete checkpoint."""
    return True if str(value).lower() == "true" else value


def run(
    trainer_class: type[GRPOTrainer], config_class: type[GRPOConfig], description: str | None = None
) -> GRPOTrainer:
    """Train as the command line says and save the model, or the adapter with `use_peft`, to `output_dir`.

    Raises:
        ValueError: a key of the YAML file that no option has, or no `model_name_or_path`.
    """
    task_args, training_args, model_args = make_parser(config_class, description).parse_args_and_config()
    if model_args.model_name_or_path is None:
        raise ValueError("Name the model to train: --model_name_or_path FOLDER.")
    model_init_kwargs: dict[str, Any] = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    training_args.model_init_kwargs = model_init_kwargs | (training_args.model_init_kwargs or {})

    task = load_task(task_args)
    trainer = trainer_class(
        model=model_args.model_name_or_path,
        reward_funcs=task.reward_func,  # pyright: ignore[reportArgumentType]
        args=training_args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    trainer.train(resume_from_checkpoint=checkpoint_of(training_args.resume_from_checkpoint))
    trainer.save_model(training_args.output_dir)
    trainer.save_state()  # trainer_state.json holds all logged metrics
    trainer.accelerator.print(f"Saved to {training_args.output_dir}.")
    return trainer
