"""Questions to processes that do not behave."""

import subprocess
import sys
import time

import pytest

from trl_softgate.rewards.dialogue import Dialogue


@pytest.fixture
def talk():
    started = []

    def start(program: str) -> Dialogue:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdin is not None
        return Dialogue(process, process.stdin.fileno())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def later(seconds: float) -> float:
    return time.monotonic() + seconds


def test_answers_belong_to_their_questions(talk):
    echo = talk(
        "import sys\nfor line in sys.stdin.buffer:\n"
        "    sys.stdout.buffer.write(line[::-1].strip() + b'\\n'); sys.stdout.flush()"
    )
    big = b"ab" * 300_000  # more than a pipe holds, both ways
    for line in (b"abc", b"", big, b"x"):
        assert echo.ask(line, later(30), len(big) + 1) == line[::-1]


@pytest.mark.parametrize(
    "program",
    [
        "while True: print('x' * 65536, end='')",  # an answer without end
        "import time; time.sleep(99)",  # no answer
        "",  # gone
        "import os, time; os.close(0); print('x' * 2000, end='', flush=True); time.sleep(99)",  # half an answer
    ],
)
@pytest.mark.parametrize("question", [b"x", b"x" * 10_000_000])
def test_no_answer_in_time_or_too_much_of_it(talk, program, question):
    dialogue = talk(program)
    start = time.monotonic()
    assert dialogue.ask(question, later(1.5), 10_000) is None
    assert time.monotonic() - start < 10


def test_an_endless_answer_is_given_up_at_its_limit(talk):
    dialogue = talk("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    start = time.monotonic()
    assert dialogue.ask(b"x", later(60), 10_000) is None
    assert time.monotonic() - start < 30
