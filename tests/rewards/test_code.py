"""The code reward on honest programs: which block counts, what passes, what the score is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards.programs import answer, needs_sandbox

from trl_softgate.rewards import inside
from trl_softgate.rewards.code import (
    _agree,
    code_reward,
    extract_program,
    pack_tests,
    passes,
    same_output,
    unpack_tests,
)
from trl_softgate.rewards.sandbox import Sandbox

SUM = {"kind": "stdin", "inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(seconds=20)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "a"),
        ("```python\na\n```\n```python\nb\nc\n```\ntext", "b\nc"),
        ("```py\na\n```", "a"),
        ("  ```Python3\n  a\n  ```", "  a"),
        ("```python\r\na\r\n```\r\n", "a\r"),
        ("```python\na\n```\n```cpp\nb\n```", "a"),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a"),
        ("a", None),
        ("", None),
        ("```python\na\n```</think>none", None),
        ("<think>```python\na\n```</think>\n```python\nb\n```", "b"),
        ("<think>\n```python\na\n```", None),
        ([{"role": "assistant", "content": "```python\na\n```"}], "a"),
        ([{"role": "assistant", "content": None}], None),
    ],
)
def test_last_block(completion, program):
    assert extract_program(completion) == program


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2 \n3\n\n", "1 2\n3\n", True),
        ("1 2\r\n3", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("5", "5.0", True),
        ("5.0", "5", True),
        ("5.1", "5", False),
        ("0.3333333", "0.33333333333", True),
        ("0.3334", "0.33333333333", False),
        ("1000000007", "1000000008", False),
        ("nan", "1.0", False),
        ("1e999999999999999", "1.5", False),
        ("inf", "inf", True),
        ("YES", "Yes", False),
        ("", "0", False),
        ("", "", True),
    ],
)
def test_same_output(printed, expected, same):
    assert same_output(printed, expected) is same


@given(st.text(), st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_can_be_compared(printed, expected):
    assert same_output(expected, expected)
    same_output(printed, expected)
    extract_program(f"```python\n{printed}\n```{expected}")


VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
        st.complex_numbers(allow_nan=False),
    ),
    lambda items: (
        st.lists(items)
        | st.lists(items).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), items)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=10,
)


@given(VALUES)
@settings(max_examples=50, deadline=None)
def test_values_survive_the_pipe(value):
    back = inside.decode(json.loads(json.dumps(inside.encode(value))))
    assert back == value and type(back) is type(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda items: st.lists(items) | st.dictionaries(st.text(), items),
    max_leaves=10,
)


@given(JSON, JSON)
@settings(max_examples=50, deadline=None)
def test_values_agree_with_themselves(value, other):
    assert _agree(inside.encode(value), value)
    if _agree(inside.encode(value), other):
        assert value == other or "." in json.dumps([value, other])
    assert unpack_tests(pack_tests({"x": [value] * 500})) == {"x": [value] * 500}


def test_long_tests_are_packed():
    assert len(pack_tests({"x": "a" * 100_000})) < 1000


@needs_sandbox
class TestPrograms:
    @pytest.mark.parametrize(
        ("program", "right"),
        [
            ("a, b = map(int, input().split())\nprint(a + b)", True),
            ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nexit()", True),
            ("if __name__ == '__main__':\n    print(eval(input().replace(' ', '+')))", True),
            ("import numpy as np\nprint(np.sum(np.array(input().split(), int)))", True),
            (
                "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
                "def f(n): return n and 1 + f(n - 1)\n"
                "t = threading.Thread(target=lambda: print(sum(map(int, input().split())) + f(50000) - 50000))\n"
                "t.start(); t.join()",
                True,
            ),
            ("print(3)", False),
            ("print(sum(map(int, input().split())))\nraise ValueError", False),
            ("print(sum(map(int, input().split())) + 1)", False),
        ],
    )
    def test_stdin(self, sandbox, program, right):
        assert passes(sandbox, program, SUM) is right

    def test_no_tests_are_no_pass(self, sandbox):
        assert not passes(sandbox, "", {"kind": "stdin", "inputs": [], "outputs": []})
        assert not passes(sandbox, "", {"kind": "calls", "function": "f", "inputs": [], "outputs": []})
        assert not passes(sandbox, "", {"kind": "asserts", "test": "assert True"})

    @pytest.mark.parametrize(
        ("program", "right"),
        [
            ("def f(a, b): return (a + b, {'x': a})", True),
            (
                "class Solution:\n  def f(self, a: int, b: int):\n    print('noise')\n    return [a + b, dict(x=a)]",
                True,
            ),
            (
                "from collections import Counter as C\nimport numpy\ndef f(a, b): return [numpy.int64(a + b), C(x=a)]",
                True,
            ),
            ("def f(a, b): return [a + b, {'x': b}]", False),
            ("def f(a, b): return [a + b]", False),
            ("def f(a, b): return object()", False),
            ("def f(a, b): raise ValueError", False),
            ("def g(a, b): return 1", False),
        ],
    )
    def test_calls(self, sandbox, program, right):
        tests = {"kind": "calls", "function": "f", "inputs": [[1, 2], [3, 4]]}
        assert passes(sandbox, program, {**tests, "outputs": [[3, {"x": 1}], [7, {"x": 3}]]}) is right

    def test_asserts_call_every_function_of_the_program(self, sandbox):
        test = (
            "from math import inf\nimport numpy as np\n"
            "def check(candidate):\n"
            "    for x in (1, 2.5, 'a', (1, (2,)), {1: {2}}, None, True, b'x', 1j, [inf]):\n"
            "        y = candidate(x, key=[x])\n        assert y == x and type(y) is type(x), (x, y)\n"
            "    assert decode(encode('abc')) == 'abc'\n"
            "    assert np.allclose(candidate([0.1, 0.2], key=[0]), [0.1, 0.2])\n"
            "check(same)"
        )
        prefix = "def encode(x): return x[::-1]\ndef same(x, key):\n    '''doc'''\n"
        good = "def same(x, key): return x\ndef decode(x): return x[::-1]"
        assert passes(sandbox, good, {"kind": "asserts", "prefix": prefix, "test": test})
        assert not passes(sandbox, "def same(x, key): return x", {"kind": "asserts", "prefix": prefix, "test": test})
        assert not passes(sandbox, "def decode(x): return x", {"kind": "asserts", "prefix": prefix, "test": test})

    def test_reward(self):
        reward = code_reward(timeout=20.0, workers=2)
        right = answer("print(sum(map(int, input().split())))")
        completions = [right, [{"role": "assistant", "content": right}], answer("print(3)"), "", right[:-6], "\ud800"]
        tests = [pack_tests(SUM)] * len(completions)
        assert reward(completions=completions, tests=tests, prompts=None) == [1, 1, 0, 0, 0, 0]
        assert reward.__name__ == "code"

    def test_workers_are_checked(self):
        with pytest.raises(ValueError, match="`workers` must be a finite number at least 1"):
            code_reward(workers=0)
