"""The math reward: which answer counts, what is equal, and that nothing hangs."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_softgate.rewards.math import MathReward, extract_answer

HOSTILE = [
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{10^{10^{10}}!}",
    r"\boxed{\sum_{n=1}^{1000000000} \sin(n^n)}",
    r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
    r"\boxed{" + r"\sqrt{" * 300 + "2" + "}" * 300 + "}",
    r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}}",
    r"\boxed{__import__('os').system('touch hacked')}",
    r"\boxed{\frac{1}{0}}",
    r"\boxed{" + "7" * 100_000 + "}",
]


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(timeout=20.0, workers=2)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"So \boxed{5}.", "5"),
        (r"\boxed{4} no, \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}} and text", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{5}", "5"),
        (r"\boxed{5", None),
        (r"\boxed{\frac{1}{2}", None),
        ("5", "5"),
        (" 5\n", "5"),
        ("It is\n5", None),
        ("", None),
        (r"<think>\boxed{4}</think>\boxed{5}", "5"),
        (r"\boxed{4}</think>5", "5"),
        (r"<think>\boxed{5}", None),
        ([{"role": "user", "content": r"\boxed{4}"}, {"role": "assistant", "content": r"\boxed{5}"}], "5"),
        ([{"role": "assistant", "content": None}], None),
    ],
)
def test_extract_answer(completion, answer):
    found = extract_answer(completion)
    assert (None if found is None else found[0]) == answer


@pytest.mark.parametrize(
    ("given", "right", "score"),
    [
        ("5", "5", 1),
        ("5.0", "5", 1),
        (r"\frac{1}{2}", "0.5", 1),
        (r"\dfrac12", "1/2", 1),
        ("x = 5", "5", 1),
        ("1,000", "1000", 1),
        (r"\{2, 1\}", r"\{1, 2\}", 1),
        ("(1, 2)", "(1, 2)", 1),
        ("(2, 1)", "(1, 2)", 0),
        (r"2\sqrt{3}", r"\sqrt{12}", 1),
        (r"x^2 + 2x + 1", "(x+1)^2", 1),
        (r"\text{Paris}", "Paris", 1),
        ("Paris", "Paris", 1),
        ("Rome", "Paris", 0),
        ("6", "5", 0),
        ("5", r"$5$", 1),
        ("-5", "5", 0),
        ("0.33", r"\frac13", 0),
        (r"\infty", r"\infty", 1),
        (r"\pi", "3.14159", 0),
        ("", "5", 0),
    ],
)
def test_equal(reward, given, right, score):
    assert reward(completions=[rf"It is \boxed{{{given}}}."], answer=[right]) == [score]


@pytest.mark.parametrize(
    ("completion", "right", "score"),
    [
        ("42", "42", 1),
        ("1,042.0", "1042", 1),
        ("$42$", "42", 1),
        ("x^2", "x^2", 1),
        ("17 + 25", "42", 0),
        ("You see, that adds to the numbers 17 + 25.", "42", 0),
        ("Here 3 + 4 = 7", "7", 0),
        ("nan", "nan ", 1),
        ("sNaN", "42", 0),
        ("Infinity", "inf", 0),
    ],
)
def test_without_a_box_the_whole_completion_is_the_answer(reward, completion, right, score):
    assert reward(completions=[completion], answer=[right]) == [score]


def test_batch_in_order(reward):
    completions = [rf"\boxed{{{number}/2}}" for number in range(40)]
    answers = [number / 2 if number % 3 else "none" for number in range(40)]
    expected = [float(number % 3 > 0) for number in range(40)]
    assert reward(completions=completions, answer=answers, prompts=None) == expected
    assert reward.__name__ == "math"


def test_hostile_answers_end_in_time_in_any_thread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward = MathReward(timeout=1.5, workers=2)
    reward([r"\boxed{1/2}"] * 2, ["0.5"] * 2)  # the workers have started
    scores = []

    def score():
        scores.extend(reward([*HOSTILE, r"\boxed{1/2}"], ["0.5"] * (len(HOSTILE) + 1)))

    start = time.monotonic()
    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    # two at a time; a worker that is replaced takes a while to start
    assert time.monotonic() - start < 60
    assert scores == [0.0] * len(HOSTILE) + [1.0]
    assert os.listdir(tmp_path) == []
    reward.close()


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if "trl_softgate.rewards.math_worker" in child.cmdline()]


def test_dead_worker_is_replaced_and_close_ends_all():
    reward = MathReward(timeout=20.0, workers=1)
    before = {worker.pid for worker in workers_of(psutil.Process())}
    for _ in range(2):
        assert reward([r"\boxed{1/2}"], ["0.5"]) == [1.0]
        (worker,) = [worker for worker in workers_of(psutil.Process()) if worker.pid not in before]
        worker.kill()
        worker.wait()
    assert reward([r"\boxed{1/2}"], ["0.5"]) == [1.0]
    reward.close()
    assert {worker.pid for worker in workers_of(psutil.Process())} <= before


def test_workers_end_with_the_reward():
    before = {worker.pid for worker in workers_of(psutil.Process())}
    reward = MathReward(timeout=20.0, workers=1)
    reward([r"\boxed{1/2}"], ["0.5"])
    assert {worker.pid for worker in workers_of(psutil.Process())} > before
    del reward
    assert {worker.pid for worker in workers_of(psutil.Process())} <= before


def test_workers_end_with_their_owner():
    script = (
        "from trl_softgate.rewards.math import MathReward\n"
        "reward = MathReward(timeout=2.0, workers=1)\n"
        r"print(reward([r'\boxed{9^{9^{9^9}}}', r'\boxed{1/2}'], ['0.5'] * 2), flush=True)"
        "\ninput()"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdin is not None
    assert owner.stdout.readline() == "[0.0, 1.0]\n"
    (worker,) = workers_of(psutil.Process(owner.pid))
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    worker.wait(10)


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_any_text_gives_a_score(reward, pairs):
    completions = [text for pair in pairs for text in (pair[0], rf"\boxed{{{pair[0]}}}")]
    answers = [right for _, right in pairs for _ in range(2)]
    assert set(reward(completions, answers)) <= {0.0, 1.0}


def test_lone_surrogates_and_null_bytes(reward):
    assert reward(["\\boxed{\ud800}", "\\boxed{\0}", "\\boxed{\u2028}"], ["\udfff", "1", "2"]) == [0, 0, 0]


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"pip install 'trl-softgate\[math\]'"):
        MathReward()


@pytest.mark.parametrize("kwargs", [{"timeout": 0}, {"workers": 0}])
def test_options_are_checked(kwargs):
    with pytest.raises(ValueError, match=f"`{next(iter(kwargs))}`"):
        MathReward(**kwargs)
