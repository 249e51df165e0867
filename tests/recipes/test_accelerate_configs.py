"""Every file for `accelerate launch` is read by accelerate as what it says, and begins with its launch line."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
PLANNED = {
    *("single_gpu", "ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload"),
    *("multi_node_ddp", "multi_node_fsdp2", "multi_node_zero3"),
    *("cpu_ddp", "cpu_fsdp2", "cpu_zero1", "cpu_zero2", "cpu_zero3"),
}
KINDS = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero": "DEEPSPEED"}


def test_all_are_there() -> None:
    assert {path.stem for path in CONFIGS} == PLANNED


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_begins_with_its_launch_line(path: Path) -> None:
    lines = path.read_text().splitlines()
    words = f"{lines[0].removesuffix(chr(92))} {lines[1].removeprefix('#')}".split()
    assert words[:5] == ["#", "accelerate", "launch", "--config_file", str(path.relative_to(ROOT))]
    named = [word for word in words if word.endswith((".py", ".yaml"))]
    assert len(named) == 3 and all((ROOT / name).is_file() for name in named)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_what_it_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config: Any = load_config_from_file(str(path))
    name = path.stem.removeprefix("cpu_").removeprefix("multi_node_")
    kind = next(kind for begin, kind in KINDS.items() if name.startswith(begin))
    assert str(getattr(config.distributed_type, "value", config.distributed_type)) == kind
    assert bool(config.use_cpu) == path.stem.startswith("cpu_")
    assert config.num_machines == (2 if path.stem.startswith("multi_node") else 1)
    if kind == "DEEPSPEED" and path.stem != "cpu_zero3":
        assert config.deepspeed_config["zero_stage"] == int(name[4])
        # a number here would have to be the trainer's
        assert "gradient_accumulation_steps" not in config.deepspeed_config
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
