"""Backends that cannot work, and settings that contradict the trainer's, are refused at construction."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from accelerate.utils import DistributedType

from trl_softgate import GSPOConfig, GSPOTrainer
from trl_softgate.trainers.backend import check_backend, is_sharded


def trainer(output_dir: Path, **kwargs: Any) -> GSPOTrainer:
    args = tiny.config(GSPOConfig, output_dir, **kwargs)
    return GSPOTrainer(tiny.model(), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())


def accelerator(kind: DistributedType, **state: Any) -> Any:
    """What `check_backend` reads of an accelerator under `kind`; the real ones are in tests/distributed."""
    return SimpleNamespace(distributed_type=kind, state=SimpleNamespace(**state))


def deepspeed(steps: Any, stage: int = 2) -> Any:
    config = SimpleNamespace(config={"gradient_accumulation_steps": steps})
    plugin = SimpleNamespace(hf_ds_config=config, zero_stage=stage)
    return accelerator(DistributedType.DEEPSPEED, deepspeed_plugin=plugin)


def test_accumulation_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(ValueError, match="of accelerate is 4, `gradient_accumulation_steps` of the trainer 1"):
        trainer(tmp_path)
    trainer(tmp_path, gradient_accumulation_steps=4)


def test_accumulation_of_the_accelerator_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`num_steps` of `accelerator_config` is 4"):
        trainer(tmp_path, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}})


def test_accumulation_of_deepspeed(tmp_path: Path) -> None:
    args = tiny.config(GSPOConfig, tmp_path, gradient_accumulation_steps=2)
    for steps in ("auto", 2, None):
        check_backend(args, deepspeed(steps))
    with pytest.raises(ValueError, match="of DeepSpeed is 3, .* of the trainer 2"):
        check_backend(args, deepspeed(3))


def test_fsdp_1(tmp_path: Path) -> None:
    args = tiny.config(GSPOConfig, tmp_path)
    check_backend(args, accelerator(DistributedType.FSDP, fsdp_plugin=SimpleNamespace(fsdp_version=2)))
    with pytest.raises(ValueError, match="set `fsdp_version: 2`"):
        check_backend(args, accelerator(DistributedType.FSDP, fsdp_plugin=SimpleNamespace(fsdp_version=1)))


def test_checkpoints_of_sgd_under_fsdp2(tmp_path: Path) -> None:
    fsdp = accelerator(DistributedType.FSDP, fsdp_plugin=SimpleNamespace(fsdp_version=2))
    with pytest.raises(ValueError, match="cannot be resumed.*adamw_torch"):
        check_backend(tiny.config(GSPOConfig, tmp_path, optim="sgd", save_strategy="steps"), fsdp)
    check_backend(tiny.config(GSPOConfig, tmp_path, optim="sgd"), fsdp)


def test_what_is_sharded() -> None:
    assert is_sharded(accelerator(DistributedType.FSDP))
    assert is_sharded(deepspeed("auto", stage=3))
    for other in (deepspeed("auto", stage=2), accelerator(DistributedType.MULTI_GPU), accelerator(DistributedType.NO)):
        assert not is_sharded(other)
