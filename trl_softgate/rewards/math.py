r"""Reward for mathematics: the last `\boxed{}` of a completion is compared with the answer by Math-Verify.

Parsing and comparing run in worker processes that are killed when their time is over. Math-Verify's own time limits
are alarms, which work in the main thread alone and do not stop an expression such as `9^{9^{9^9}}`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import time
import weakref
from decimal import Decimal, InvalidOperation
from typing import Any

from ..validation import require_number, require_whole
from .dialogue import Dialogue
from .parallel import default_workers, final_text, grade

# Seconds for a worker to import sympy; bytes of its reply.
_START = 60.0
_REPLY = 100
# Longer answers are wrong: no right one needs them.
_LONGEST = 2000

_WORKER = [sys.executable, "-P", "-m", "trl_softgate.rewards.math_worker"]


def extract_answer(completion: Any) -> tuple[str, bool] | None:
    r"""What is in the last `\boxed{}` behind the thoughts, and True; without one the whole text and False, if it is a
    single line."""
    text = final_text(completion)
    if text is None:
        return None
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        line = text.strip()
        return (line, False) if line and "\n" not in line else None
    start = text.index("{", start) + 1
    depth = 1
    for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()].strip(), True
    return None


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip(" $").replace(",", ""))
    except InvalidOperation:
        return None


class MathReward:
    """Reward function over the columns `completions` and `answer`: 1.0 where the answer is right, else 0.0.

    Equal text is right without further ado; otherwise Math-Verify decides what is in the box. Without a box, the whole
    completion must be the answer's text or the same number: in a sentence Math-Verify would find any expression, also
    one that repeats the problem. In the box, one that equals the answer without being worked out is right.

    An answer that takes longer than `timeout`, or more memory than 4 GiB, is wrong. Can be called from any thread; the
    workers start when they are first needed and end with the object, the process or `close`.

    Args:
        timeout: seconds for one answer.
        workers: answers compared at the same time; None: one per core.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: a value out of range.
    """

    __name__ = "math"

    def __init__(self, *, timeout: float = 10.0, workers: int | None = None) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("Answers are compared by math-verify. Run: pip install 'trl-softgate[math]'")
        self.workers = default_workers() if workers is None else workers
        require_number("timeout", timeout, above=0)
        require_whole("workers", self.workers, minimum=1)
        self.timeout = timeout
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        # when the reward is no longer used, or the process ends
        weakref.finalize(self, _end_all, self._idle)

    def __call__(self, completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
        pairs = list(zip(map(extract_answer, completions), map(str, answer), strict=True))
        return grade(self._score, pairs, self.workers, "Checking answers")

    def close(self) -> None:
        """End the idle workers; the next call starts new ones."""
        _end_all(self._idle)

    def _score(self, pair: tuple[tuple[str, bool] | None, str]) -> float:
        extracted, right = pair
        if extracted is None:
            return 0.0
        given, boxed = extracted
        if given.split() == right.split():
            return 1.0
        if not boxed:
            number = _number(given)
            return float(number is not None and number.is_finite() and number == _number(right))
        if len(given) > _LONGEST:
            return 0.0
        worker = self._worker()
        verdict = worker.compare(right, given, self.timeout)
        if verdict is None:
            worker.end()
            return 0.0
        self._idle.put(worker)
        return float(verdict)

    def _worker(self) -> _Worker:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            return _Worker()
        if worker.is_alive():
            return worker
        worker.end()
        return self._worker()


class _Worker:
    def __init__(self) -> None:
        process = subprocess.Popen(
            _WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
        )
        assert process.stdin is not None
        self._dialogue = Dialogue(process, process.stdin.fileno())
        self._fresh = True

    def compare(self, right: str, given: str, timeout: float) -> bool | None:
        """Math-Verify's verdict, or None if it did not come in time; the worker is then of no further use."""
        if self._fresh:
            self._fresh = False
            if self._dialogue.ask(json.dumps([timeout]).encode(), time.monotonic() + _START, _REPLY) is None:
                raise RuntimeError(f"Math-Verify does not start: see `{' '.join(_WORKER)}`.")
        line = json.dumps([right, given]).encode()
        reply = self._dialogue.ask(line, time.monotonic() + timeout, _REPLY)
        return None if reply is None else reply == b"true"

    def is_alive(self) -> bool:
        return self._dialogue.process.poll() is None

    def end(self) -> None:
        process = self._dialogue.process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _end_all(workers: queue.SimpleQueue[_Worker]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            workers.get_nowait().end()


def _environment() -> dict[str, str]:
    """The worker finds this package where this process found it."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
