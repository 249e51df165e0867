"""What lets FSDP2 and DeepSpeed run over gloo on a machine without an accelerator. For tests alone."""

import os

import torch


def install() -> None:
    """Call before anything builds an `Accelerator` or `TrainingArguments`."""
    if int(os.environ.get("LOCAL_RANK", "-1")) == -1:
        return
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        import deepspeed.ops

        # its shared-memory collectives are compiled at first use, which takes minutes; gloo does without
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        _fsdp_on_cpu()


def _fsdp_on_cpu() -> None:
    """accelerate makes FSDP of several processes only on an accelerator, and plain DDP of it on a CPU, silently."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ.pop("ACCELERATE_USE_CPU", None)

    def prepare_backend(self: object, *args: object, **kwargs: object) -> tuple[str, DistributedType]:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend="gloo")
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend  # type: ignore[method-assign]
