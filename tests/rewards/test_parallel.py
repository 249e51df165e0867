"""Grading many answers: order, errors, the progress bar."""

import io
import threading
import time

import pytest

from trl_softgate.rewards import parallel
from trl_softgate.rewards.parallel import default_workers, grade


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_scores_keep_their_order_and_run_together():
    together = threading.Barrier(4, timeout=10)

    def score(item: float) -> float:
        together.wait()
        time.sleep(0.01 * (item % 3))
        return item

    assert grade(score, [float(i) for i in range(8)], 4, "x") == [float(i) for i in range(8)]
    assert grade(score, [], 4, "x") == []


def test_an_error_stops_the_rest():
    done = []

    def score(item: int) -> float:
        if item == 0:
            raise RuntimeError("no")
        time.sleep(0.05)
        done.append(item)
        return 1.0

    with pytest.raises(RuntimeError, match="no"):
        grade(score, range(200), 2, "x")
    assert len(done) < 100


@pytest.mark.parametrize(
    ("stream", "seconds", "shown"), [(Terminal, 0.4, True), (Terminal, 0, False), (io.StringIO, 0.4, False)]
)
def test_progress_bar(monkeypatch, stream, seconds, shown):
    monkeypatch.setattr(parallel, "_PATIENCE", 0.2)
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    grade(lambda _: time.sleep(seconds) or 1.0, range(3), 3, "Running programs")
    assert ("Running programs" in stderr.getvalue()) is shown


def test_cores_are_shared_among_the_processes_of_a_machine(monkeypatch):
    alone = default_workers()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert default_workers() == max(1, alone // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert default_workers() == 1
