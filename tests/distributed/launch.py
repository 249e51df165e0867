"""Starts `worker.py` in one process or under a backend in two; the ranks write what came out to files."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
BACKENDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def command(backend: str | None, *arguments: str) -> list[str]:
    """The command line of one run; `backend` None is a single process."""
    if backend is None:
        return [sys.executable, str(WORKER), *arguments]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ROOT / "recipes" / "accelerate" / f"cpu_{backend}.yaml"
    launch = ["accelerate.commands.launch", "--config_file", str(config), "--main_process_port", str(port)]
    return [sys.executable, "-m", *launch, str(WORKER), *arguments]


def environment() -> dict[str, str]:
    paths = os.pathsep.join(str(path) for path in (ROOT / "tests", ROOT))
    return {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(backend: str | None, *arguments: object, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
    """Run to the end; the whole process group is gone afterwards, also after a time-out."""
    process = subprocess.Popen(
        command(backend, *map(str, arguments)),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def ranks_of(backend: str | None) -> int:
    return 1 if backend is None else 2
