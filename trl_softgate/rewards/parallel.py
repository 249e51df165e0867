"""Many answers graded at the same time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from typing import Any, TypeVar

Item = TypeVar("Item")

# Seconds after which a progress bar appears.
_PATIENCE = 1.0


def default_workers() -> int:
    """CPU cores of this process, shared among the training processes of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def grade(score: Callable[[Item], float], items: Sequence[Item], workers: int, title: str) -> list[float]:
    """`score` of each item, `workers` of them at a time, with a progress bar on a terminal if it takes a while."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="reward")
    try:
        futures = [pool.submit(score, item) for item in items]
        slow = wait(futures, timeout=_PATIENCE).not_done
        if slow and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            with Progress(console=Console(stderr=True), transient=True) as progress:
                bar = progress.add_task(title, total=len(futures), completed=len(futures) - len(slow))
                for _ in as_completed(slow):
                    progress.advance(bar)
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def final_text(completion: Any) -> str | None:
    """The text of a completion behind its thoughts; None where the thoughts do not end.

    Args:
        completion: text, or chat messages of which the last one counts.
    """
    text = completion if isinstance(completion, str) else completion[-1]["content"] or ""
    _, end, answer = text.rpartition("</think>")
    if end:
        return answer
    return None if "<think>" in text else text
