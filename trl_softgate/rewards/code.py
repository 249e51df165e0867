"""Reward for programs: the last ```python block of a completion must pass all tests of its problem.

`tests` is JSON (see `pack_tests`) of one of three kinds:

* ``{"kind": "stdin", "inputs": [...], "outputs": [...]}``: texts. The program runs once per input; what it prints must
  agree with the output in every line, up to blanks at the ends and the way numbers are written.
* ``{"kind": "calls", "function": name, "inputs": [[argument, ...], ...], "outputs": [...]}``: plain values. The
  function, or the method of a class `Solution`, must return the outputs; tuples count as lists, numbers with a decimal
  point agree to 1e-6.
* ``{"kind": "asserts", "test": text, "prefix": text}``: a test suite in Python, which fails by raising. Names that it
  uses and nobody defines are the functions under test. `prefix` is run before the program: imports, helpers.

What a program can do to its verdict: it runs in a sandbox that holds neither expected outputs nor tests. For "stdin"
and "calls" this process compares plain values. An assert suite runs in a second sandbox, without the program; the
functions are called through pipes and answer with plain builtin values, so that no object, exit code or printed text
of the program's is ever taken for a verdict. Suites that pass objects other than plain values to a function, or expect
it to raise or to change its arguments, score 0; and a suite that is too lax stays so, but for one thing: numpy's
`allclose` asks for equal shapes here, its other comparisons of close values refuse an empty list beside a number.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import time
import zlib
from decimal import Decimal, InvalidOperation
from typing import Any

from ..validation import require_whole
from . import inside
from .dialogue import Dialogue
from .parallel import default_workers, final_text, grade
from .sandbox import Sandbox, read_all

_OPENING = re.compile(r"```(?:python|py)3?", re.IGNORECASE)
_PACKED = "zlib:"
# A program that printed this many bytes more than expected is wrong.
_SURPLUS = 1 << 20
# Seconds for two interpreters to start and import numpy, added to the wall time of a test suite.
_START = 5.0


def extract_program(completion: Any) -> str | None:
    """The last ```python block behind the thoughts, or None."""
    program, lines = None, None
    for line in (final_text(completion) or "").split("\n"):
        fence = line.strip()
        if _OPENING.fullmatch(fence):
            lines = []
        elif lines is not None and fence.startswith("```"):
            program, lines = "\n".join(lines), None
        elif lines is not None:
            lines.append(line)
    return program  # a block that was cut off is none


def code_reward(
    *, timeout: float = 10.0, memory_mb: int = 1024, workers: int | None = None, allow_unsandboxed: bool = False
) -> Any:
    """Reward function over the columns `completions` and `tests`: 1.0 where all tests pass, else 0.0.

    Args:
        timeout: seconds for one test of "stdin" and "calls", for a whole suite of "asserts"; the CPU time of a program
            that is called is limited to it in all. Grading stops at the first test that fails.
        memory_mb: memory of a program in MiB.
        workers: programs graded at the same time; None: one per core.
        allow_unsandboxed: see `Sandbox`.

    Raises:
        ValueError: as `Sandbox`, or `workers` is below 1.
    """
    count = default_workers() if workers is None else workers
    require_whole("workers", count, minimum=1)
    sandbox = Sandbox(timeout, memory_mb, allow_unsandboxed)

    def score(item: tuple[Any, str]) -> float:
        program = extract_program(item[0])
        return float(program is not None and passes(sandbox, program, unpack_tests(item[1])))

    def code(completions: list[Any], tests: list[str], **_: Any) -> list[float]:
        return grade(score, list(zip(completions, tests, strict=True)), count, "Running programs")

    return code


def pack_tests(tests: dict[str, Any]) -> str:
    """`tests` as text: JSON, compressed if it is long (some problems have many megabytes of it)."""
    text = json.dumps(tests)
    return text if len(text) < 10_000 else _PACKED + base64.b85encode(zlib.compress(text.encode("ascii"))).decode()


def unpack_tests(text: str) -> dict[str, Any]:
    """The inverse of `pack_tests`."""
    if text.startswith(_PACKED):
        text = zlib.decompress(base64.b85decode(text.removeprefix(_PACKED))).decode("ascii")
    return json.loads(text)


def passes(sandbox: Sandbox, program: str, tests: dict[str, Any]) -> bool:
    """Whether `program` passes all `tests`; see the module for their kinds."""
    if tests["kind"] == "stdin":
        return _passes_stdin(sandbox, program, tests["inputs"], tests["outputs"])
    if tests["kind"] == "calls":
        return _passes_calls(sandbox, program, tests["function"], tests["inputs"], tests["outputs"])
    return _passes_asserts(sandbox, f"{tests.get('prefix', '')}\n{program}", tests["test"])


def _passes_stdin(sandbox: Sandbox, program: str, inputs: list[str], outputs: list[str]) -> bool:
    for text, expected in zip(inputs, outputs, strict=True):
        printed = sandbox.run(program, text, len(expected) + _SURPLUS)
        if printed is None or not same_output(printed, expected):
            return False
    return bool(inputs)


def same_output(printed: str, expected: str) -> bool:
    """Equal lines, but for blanks at the ends of lines and of the text; numbers may be written differently, and agree
    to 1e-6 where the expected one has a decimal point."""
    left, right = ([line.split() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(left) == len(right) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(left, right, strict=True)
    )


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    try:
        a, b = Decimal(printed), Decimal(expected)
        if not (a.is_finite() and b.is_finite()):
            return False
        if "." not in expected:
            return a == b
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6)
    except (InvalidOperation, OverflowError):
        return False


def _passes_calls(sandbox: Sandbox, program: str, function: str, inputs: list[list[Any]], outputs: list[Any]) -> bool:
    to_program, requests = os.pipe()
    try:
        process = sandbox.start("serve", program, stdin=to_program)
    finally:
        os.close(to_program)
    dialogue = Dialogue(process, requests)
    waiting = _START
    try:
        for arguments, expected in zip(inputs, outputs, strict=True):
            request = {"function": function, "arguments": [inside.encode(a) for a in arguments], "options": {}}
            deadline = time.monotonic() + sandbox.seconds + waiting
            waiting = 0.0
            limit = len(json.dumps(expected)) + _SURPLUS
            reply = dialogue.ask(json.dumps(request).encode(), deadline, limit)
            if reply is None or not _same_value(reply, expected):
                return False
        return bool(inputs)
    finally:
        os.close(requests)
        sandbox.kill(process)


def _same_value(reply: bytes, expected: Any) -> bool:
    try:
        return _agree(json.loads(reply)["value"], expected)
    # The program may write to the pipe what the runner never would.
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return False


def _agree(value: Any, expected: Any) -> bool:
    """Whether `value`, as `inside.encode` writes it, is `expected`. No object of the program's is built or hashed."""
    if isinstance(value, dict):
        ((tag, content),) = value.items()
        if tag == "dict":
            pairs = {str(key): item for key, item in content}
            return (
                isinstance(expected, dict)
                and len(pairs) == len(content) == len(expected)
                and all(key in pairs and _agree(pairs[key], item) for key, item in expected.items())
            )
        if tag != "tuple":
            return False
        value = content
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_agree, value, expected))
    if isinstance(value, (list, dict)):
        return False
    if isinstance(expected, float) and isinstance(value, (int, float)):
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6)
    return value == expected


def _passes_asserts(sandbox: Sandbox, program: str, test: str) -> bool:
    to_program, requests = os.pipe()
    replies, from_program = os.pipe()
    processes = []
    try:
        try:
            processes.append(sandbox.start("serve", program, stdin=to_program, stdout=from_program))
            checker = sandbox.start("check", test, stdin=replies, request_fd=requests)
            processes.append(checker)
        finally:
            for descriptor in (to_program, requests, replies, from_program):
                os.close(descriptor)
        verdict = read_all(checker, time.monotonic() + sandbox.seconds + _START, len(inside.PASSED))
        return verdict == inside.PASSED
    finally:
        for process in processes:
            sandbox.kill(process)
