"""Two processes (DDP over gloo) give the weights, metrics and schedule of one with the same global batch."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("two_processes_worker.py")
METHODS = ("gspo", "sapo", "saf")
NOT_COMPARED = ("step_time",)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Result folders of one process and of two."""
    search = [WORKER.parents[1], WORKER.parents[2]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, search)), "CUDA_VISIBLE_DEVICES": ""}
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([sys.executable, str(WORKER), str(one)], env=environment, check=True, timeout=240)
    subprocess.run([*launch, str(WORKER), str(two)], env=environment, check=True, timeout=240)
    return one, two


def result(folder: Path, rank: int, method: str) -> dict[str, Any]:
    return json.loads((folder / f"rank{rank}.json").read_text())[method]


@pytest.mark.parametrize("method", METHODS)
def test_weights_agree(method: str, runs: tuple[Path, Path]) -> None:
    one, two = (torch.load(folder / f"{method}.pt", weights_only=True) for folder in runs)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_metrics_agree(method: str, runs: tuple[Path, Path]) -> None:
    one, two = (result(folder, 0, method)["history"] for folder in runs)
    assert len(one) == len(two) == 4
    for expected, ours in zip(one, two, strict=True):
        assert expected.keys() == ours.keys()
        for name in expected.keys() - set(NOT_COMPARED):
            if expected[name] is not None:
                assert math.isclose(ours[name], expected[name], rel_tol=1e-5, abs_tol=2e-6), name


def test_schedule_agrees_on_all_ranks(runs: tuple[Path, Path]) -> None:
    one, two = runs
    expected, first, second = result(one, 0, "saf"), result(two, 0, "saf"), result(two, 1, "saf")
    assert expected["schedule"]["frozen_at"] is not None
    assert first["schedule"] == second["schedule"]
    assert first["schedule"]["frozen_at"] == expected["schedule"]["frozen_at"]


@pytest.mark.parametrize("method", METHODS)
def test_resume_inside_a_window_is_bitwise(method: str, runs: tuple[Path, Path]) -> None:
    assert all(
        result(folder, rank, method)["resumed"]
        for folder, ranks in zip(runs, (1, 2), strict=True)
        for rank in range(ranks)
    )
