"""Runs scripts of the repository as a user would, from its root."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def execute(*command: str, timeout: float | None = None) -> str:
    """Output of a documented `python` command, which a failure shows."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout
