"""Runs scripts of the repository as a user would, from its root."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def execute(
    *command: str, timeout: float | None = None, python: str = sys.executable, env: Mapping[str, str] = os.environ
) -> str:
    """Output of a documented `python` command, which a failure shows."""
    done = subprocess.run(
        [python, *command],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout
