"""Questions and answers, one line each, with a process that may not answer, not listen, or answer without end."""

from __future__ import annotations

import os
import selectors
import subprocess
import time


def read_some(pipe: int, deadline: float) -> bytes | None:
    """The next bytes of the descriptor `pipe`, b"" at its end, None if none come until `deadline` (monotonic)."""
    return os.read(pipe, 1 << 16) if _ready(pipe, selectors.EVENT_READ, deadline) else None


class Dialogue:
    """A conversation with `process` over its standard output and the descriptor `requests`."""

    def __init__(self, process: subprocess.Popen[bytes], requests: int) -> None:
        assert process.stdout is not None
        self.process = process
        self._replies = process.stdout.fileno()
        self._requests = requests
        self._pending = bytearray()
        os.set_blocking(requests, False)

    def ask(self, line: bytes, deadline: float, limit: int) -> bytes | None:
        """The reply to `line`, both without the line feed.

        Returns:
            None if the process ended, or its reply is not complete at `deadline` (monotonic) or within `limit` bytes.
            The conversation is then over.
        """
        return self._read_line(deadline, limit) if self._write(line + b"\n", deadline) else None

    def _write(self, data: bytes, deadline: float) -> bool:
        left = memoryview(data)
        while left:
            if not _ready(self._requests, selectors.EVENT_WRITE, deadline):
                return False
            try:
                left = left[os.write(self._requests, left) :]
            except BrokenPipeError:
                return False
            except BlockingIOError:  # less room than the selector promised
                time.sleep(0.001)
        return True

    def _read_line(self, deadline: float, limit: int) -> bytes | None:
        seen = 0
        while (end := self._pending.find(b"\n", seen)) < 0:
            seen = len(self._pending)
            if seen > limit:
                return None
            chunk = read_some(self._replies, deadline)
            if not chunk:
                return None
            self._pending += chunk
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return line


def _ready(pipe: int, event: int, deadline: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        return bool(selector.select(max(0.0, deadline - time.monotonic())))
