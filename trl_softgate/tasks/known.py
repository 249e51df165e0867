"""The data sets that a recipe can name: where they are, what a row holds, and how a row becomes a prompt and a check.

Nothing is downloaded at import. A local copy of the same schema can stand in for each of them.
"""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
FENCED = "Write the solution in Python, in one ```python block at the end of your answer."


@dataclass(frozen=True)
class KnownDataset:
    """One data set.

    Attributes:
        hub: its name on the hub.
        columns: what a row must have; other columns are dropped.
        kind: "math", whose rows become `prompt` and `answer`, or "code", whose rows become `prompt` and `tests`.
        convert: turns a row into `(problem, answer)` or `(problem, tests)`, the tests as in `rewards.code`, before
            the instruction is added; None leaves the row out.
        config: configuration of the hub's data set, or None.
        split: the default split.
        data_files: files of the hub's data set to read instead of a configuration, for data sets that come with a
            loading script.
        instruction: what is added to each problem by default.
        min_difficulty: the default of `TaskArguments.min_difficulty`; None where the data set has no difficulty.
        metric: "avg" (mean score over `samples` completions) or "pass" (share of problems that at least one of
            `samples` completions solves): how the papers evaluate on it.
        samples: completions per problem.
        temperature: of the evaluation; 0 is greedy.
    """

    hub: str
    columns: tuple[str, ...]
    kind: Literal["math", "code"]
    convert: Callable[[Row], tuple[str, str | dict[str, Any]] | None]
    config: str | None = None
    split: str = "test"
    data_files: tuple[str, ...] = ()
    instruction: str = BOXED
    min_difficulty: float | None = None
    metric: Literal["avg", "pass"] = "avg"
    samples: int = 1
    temperature: float = 0.0


def _fields(problem: str, answer: str) -> Callable[[Row], tuple[str, str]]:
    def convert(row: Row) -> tuple[str, str]:
        if row[answer] is None:
            raise ValueError(f"`{answer}` is empty.")
        return row[problem], str(row[answer])

    return convert


def _gsm8k(row: Row) -> tuple[str, str]:
    return row["question"], row["answer"].rpartition("####")[2].strip().replace(",", "")


def _eurus(row: Row) -> tuple[str, dict[str, Any]] | None:
    if row["ability"] != "code":
        return None
    # The system message of the data set asks for the format of another model.
    problem = "\n\n".join(message["content"] for message in row["prompt"] if message["role"] == "user")
    truth = json.loads(row["reward_model"]["ground_truth"])
    inputs, outputs = truth["inputs"], truth["outputs"]
    if not inputs or len(inputs) != len(outputs):
        return None
    if truth.get("fn_name"):
        # The value is written as a list of one.
        if all(isinstance(output, list) and len(output) == 1 for output in outputs):
            outputs = [output[0] for output in outputs]
        return problem, {"kind": "calls", "function": truth["fn_name"], "inputs": inputs, "outputs": outputs}
    return problem, {"kind": "stdin", "inputs": [*map(_text, inputs)], "outputs": [*map(_text, outputs)]}


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))


def _humaneval(row: Row) -> tuple[str, dict[str, Any]]:
    problem = f"Complete this Python function:\n\n```python\n{row['prompt'].rstrip()}\n```"
    # The prompt brings imports and helpers, which an answer may leave out. It defines the function without a body.
    test = f"{row['test']}\ncheck({row['entry_point']})\n"
    return problem, {"kind": "asserts", "prefix": row["prompt"], "test": test}


def _mbpp(row: Row) -> tuple[str, dict[str, Any]]:
    examples = "\n".join(row["test_list"])
    problem = f"{row['prompt'].strip()}\n\nThe function must pass these tests:\n\n```python\n{examples}\n```"
    return problem, {"kind": "asserts", "test": row["test"]}


def _livecodebench(row: Row) -> tuple[str, dict[str, Any]]:
    cases = json.loads(row["public_test_cases"]) + json.loads(_private_cases(row["private_test_cases"]))
    problem = row["question_content"].strip()
    if not row["starter_code"].strip():
        problem += "\n\nThe program reads from standard input and writes to standard output."
        inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
        return problem, {"kind": "stdin", "inputs": inputs, "outputs": outputs}
    problem += f"\n\nStart from this code:\n\n```python\n{row['starter_code'].rstrip()}\n```"
    return problem, {
        "kind": "calls",
        "function": json.loads(row["metadata"])["func_name"],
        # each line of the input is one argument
        "inputs": [[json.loads(line) for line in case["input"].split("\n") if line.strip()] for case in cases],
        "outputs": [json.loads(case["output"]) for case in cases],
    }


def _private_cases(text: str) -> str:
    """The JSON text inside of base64, zlib and a pickled string, read without unpickling."""
    if text.lstrip().startswith("["):
        return text
    wanted = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
    plain = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
    strings = []
    for opcode, value, _ in pickletools.genops(zlib.decompress(base64.b64decode(text))):
        if opcode.name in wanted:
            strings.append(value)
        elif opcode.name not in plain:
            raise ValueError(f"private_test_cases must hold one string, found the opcode {opcode.name}.")
    if len(strings) != 1:
        raise ValueError(f"private_test_cases must hold one string, found {len(strings)}.")
    return strings[0]


def _contest(hub: str, split: str = "train") -> KnownDataset:
    return KnownDataset(
        hub, ("problem", "answer"), "math", _fields("problem", "answer"), split=split, samples=32, temperature=1.0
    )


KNOWN: dict[str, KnownDataset] = {
    "deepmath": KnownDataset(
        "zwhe99/DeepMath-103K",
        ("question", "final_answer", "difficulty"),
        "math",
        _fields("question", "final_answer"),
        split="train",
        min_difficulty=6.0,
    ),
    "eurus_rl_code": KnownDataset(
        "PRIME-RL/Eurus-2-RL-Data",
        ("prompt", "ability", "reward_model"),
        "code",
        _eurus,
        split="train",
        instruction="",  # the problems ask for a ```python block themselves
    ),
    "gsm8k": KnownDataset("openai/gsm8k", ("question", "answer"), "math", _gsm8k, config="main", split="train"),
    "aime24": _contest("HuggingFaceH4/aime_2024"),
    "aime25": _contest("MathArena/aime_2025"),
    "hmmt25_feb": _contest("MathArena/hmmt_feb_2025"),
    "hmmt25_nov": _contest("MathArena/hmmt_nov_2025"),
    "math500": KnownDataset("HuggingFaceH4/MATH-500", ("problem", "answer"), "math", _fields("problem", "answer")),
    "humaneval_plus": KnownDataset(
        "evalplus/humanevalplus", ("prompt", "test", "entry_point"), "code", _humaneval, instruction=FENCED
    ),
    "mbpp_plus": KnownDataset("evalplus/mbppplus", ("prompt", "test_list", "test"), "code", _mbpp, instruction=FENCED),
    "livecodebench_v6": KnownDataset(
        "livecodebench/code_generation_lite",
        ("question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata"),
        "code",
        _livecodebench,
        data_files=("test6.jsonl",),  # what the sixth release added, 175 problems
        instruction=FENCED,
        metric="pass",
        samples=4,
        temperature=1.0,
    ),
}
