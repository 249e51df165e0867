"""Completions and tests for the code reward."""

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from trl_softgate.rewards.sandbox import Sandbox, _package_folders


def why_no_sandbox() -> str | None:
    try:
        Sandbox()
    except ValueError as error:
        return str(error)
    return None


PROBLEM = why_no_sandbox()
needs_sandbox = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))


def shown_in_tmp() -> list[str]:
    """What the sandbox shows in its /tmp: an environment that was made there."""
    folders = [os.path.realpath(sys.base_prefix), *_package_folders()]
    return sorted({Path(folder).parts[2] for folder in folders if folder.startswith("/tmp/")})


def answer(program: str) -> str:
    return f"Here it is:\n\n```python\n{program}\n```\n"


def processes(mark: str) -> list[psutil.Process]:
    """Running processes with the word `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + 5
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
