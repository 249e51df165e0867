"""What the backends of accelerate (DDP, FSDP2, DeepSpeed) need to know of, beyond what TRL does."""

import os
from typing import Any

from accelerate.utils import DistributedType
from torch import nn
from trl.models import prepare_deepspeed


def check_backend(args: Any, accelerator: Any) -> None:
    """Refuse a backend that cannot work, and settings of it that contradict the trainer's.

    Raises:
        ValueError: FSDP version 1, checkpoints that could not be resumed, or another number of accumulation steps than
            the trainer's.
    """
    if accelerator.distributed_type == DistributedType.FSDP and accelerator.state.fsdp_plugin.fsdp_version == 1:
        raise ValueError(
            "FSDP version 1 is not supported (its full state dict fails with TRL's models): set `fsdp_version: 2`, as "
            "in recipes/accelerate/fsdp2.yaml."
        )
    if accelerator.distributed_type == DistributedType.FSDP and args.optim == "sgd" and args.save_strategy != "no":
        raise ValueError(
            "Checkpoints of plain SGD under FSDP2 cannot be resumed: PyTorch's `set_optimizer_state_dict` stops at an "
            "optimizer without state. Use an optimizer with moments (`optim='adamw_torch'`) or `save_strategy='no'`."
        )
    stated = {
        "`gradient_accumulation_steps` of accelerate": os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        # transformers has put it in place of the trainer's
        "`num_steps` of `accelerator_config`": args.gradient_accumulation_steps,
    }
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        own = accelerator.state.deepspeed_plugin.hf_ds_config.config
        stated["`gradient_accumulation_steps` of DeepSpeed"] = own.get("gradient_accumulation_steps")
    for name, value in stated.items():
        if value not in (None, "auto") and int(value) != args._accumulation:
            raise ValueError(
                f"{name} is {value}, `gradient_accumulation_steps` of the trainer {args._accumulation}: leave the "
                "former out (in a DeepSpeed JSON file: 'auto'), the trainer's is the one that counts."
            )


def is_sharded(accelerator: Any) -> bool:
    """Whether a forward gathers weights from other processes, so that every process must take part in it."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return accelerator.state.deepspeed_plugin.zero_stage == 3
    return accelerator.distributed_type == DistributedType.FSDP


def shard_frozen(model: nn.Module, accelerator: Any) -> nn.Module:
    """Spread the weights of a second model, which is not trained, over the processes as the backend does the first's.

    Under FSDP2 each layer is a unit: one layer at a time is gathered, and moved to its device.

    Args:
        model: on any device; its forward is already what it shall be.

    Returns:
        What to call in place of `model`.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return prepare_deepspeed(model, accelerator)  # type: ignore[arg-type]
    from torch.distributed.fsdp import fully_shard

    plugin = accelerator.state.fsdp_plugin
    mesh = getattr(accelerator, "torch_device_mesh", None)
    options: dict[str, Any] = {"reshard_after_forward": True}
    if plugin.cpu_offload:
        options["offload_policy"] = plugin.cpu_offload
    if mesh is not None:
        options["mesh"] = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model
