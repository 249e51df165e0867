"""Tasks of the recipes: data sets from local files of the hub's schema, the user's own files, and what errors say."""

import base64
import dataclasses
import json
import pickle
import subprocess
import sys
import zlib

import pytest
import tiny
from datasets import Dataset, DatasetDict
from rewards.programs import answer, needs_sandbox
from trl import GRPOConfig, ModelConfig, TrlParser

from trl_softgate.rewards.code import unpack_tests
from trl_softgate.tasks.known import BOXED, FENCED, KNOWN
from trl_softgate.tasks.loading import TaskArguments, load_task


def private(cases):
    """How LiveCodeBench writes its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


HUMANEVAL_TEST = """
import numpy as np

def assertion(out, exp, atol):
    assert out == exp

def check(candidate):
    for inp, exp in zip([[2], [3]], [4, 9]):
        assertion(candidate(*inp), exp, 0)
"""

# A row or two of each data set, in its own schema; a completion that is right for the last one, and one that is wrong.
SQUARE = answer("def square(x): return x * x")
PRINT = answer("print(int(input()) ** 2)")
ROWS = {
    "deepmath": [
        {"question": "easy?", "final_answer": "1", "difficulty": 5.5, "topic": "Algebra", "r1_solution_1": "..."},
        {
            "question": "1/2?",
            "final_answer": r"\frac{1}{2}",
            "difficulty": 6.0,
            "topic": "Algebra",
            "r1_solution_1": "",
        },
    ],
    "gsm8k": [{"question": "How many?", "answer": "He has <<1+1=2>>2.\nSo 1,002.\n#### 1,002"}],
    "aime24": [{"id": 60, "problem": "p", "solution": "s", "answer": "033", "url": "u", "year": "2024"}],
    "aime25": [{"problem_idx": 1, "problem": "p", "answer": 70, "problem_type": ["Algebra"]}],
    "hmmt25_feb": [{"problem_idx": 1, "problem": "p", "answer": "103", "problem_type": ["Algebra"]}],
    "hmmt25_nov": [{"problem_idx": 1, "problem": "p", "answer": r"\sqrt{6}", "problem_type": ["Algebra"]}],
    "math500": [{"problem": "p", "solution": "s", "answer": r"\left( 3, \frac{\pi}{2} \right)", "subject": "Algebra"}],
    "humaneval_plus": [
        {
            "task_id": "HumanEval/0",
            "prompt": "from typing import List\n\n\ndef square(x: int) -> int:\n    '''Square.'''\n",
            "canonical_solution": "    return x * x\n",
            "entry_point": "square",
            "test": HUMANEVAL_TEST,
        }
    ],
    "mbpp_plus": [
        {
            "task_id": 2,
            "code": "def square(x): return x * x",
            "prompt": "Write a function to square.",
            "source_file": "f",
            "test_imports": [],
            "test_list": ["assert square(2) == 4", "assert square(3) == 9"],
            "test": "inputs = [[2], [3]]\nresults = [4, 9]\n"
            "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assert square(*inp) == exp\n",
        }
    ],
    "eurus_rl_code": [
        {
            "data_source": "numina_olympiads",
            "prompt": [{"content": "s", "role": "system"}, {"content": "math", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": "7", "style": "rule"},
            "extra_info": {"index": 0, "split": "dummy"},
        },
        {
            "data_source": "codecontests",
            "prompt": [
                {"content": "When tackling tasks, [ASSESS].", "role": "system"},
                {"content": "Square.\n\nWrite Python code. Present it in\n```python\nYour code\n```", "role": "user"},
            ],
            "ability": "code",
            "reward_model": {
                "ground_truth": json.dumps({"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}),
                "style": "rule",
            },
            "extra_info": {"index": 1, "split": "dummy"},
        },
    ],
    "livecodebench_v6": [
        {
            "question_title": "t",
            "question_content": "Square the number.",
            "platform": "atcoder",
            "question_id": "abc1",
            "starter_code": "",
            "difficulty": "easy",
            "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
            "private_test_cases": private([{"input": "3\n", "output": "9\n", "testtype": "stdin"}]),
            "metadata": "{}",
        },
        {
            "question_title": "t",
            "question_content": "Square the number.",
            "platform": "leetcode",
            "question_id": "3",
            "starter_code": "class Solution:\n    def square(self, x: int) -> int:\n        ",
            "difficulty": "easy",
            "public_test_cases": json.dumps([{"input": "2", "output": "4", "testtype": "functional"}]),
            "private_test_cases": private([{"input": "3", "output": "9", "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "square"}),
        },
    ],
}
RIGHT = {
    "humaneval_plus": SQUARE,
    "mbpp_plus": SQUARE,
    "eurus_rl_code": PRINT,
    "livecodebench_v6": answer("class Solution:\n    def square(self, x): return x * x"),
    "deepmath": r"\boxed{0.5}",
    "gsm8k": r"\boxed{1002}",
    "aime24": r"\boxed{33}",
    "math500": r"\boxed{(3, \pi/2)}",
    "aime25": r"\boxed{70}",
    "hmmt25_feb": r"\boxed{103}",
    "hmmt25_nov": r"\boxed{\sqrt{6}}",
}
CODE = [name for name, known in KNOWN.items() if known.kind == "code"]
MATH = [name for name, known in KNOWN.items() if known.kind == "math"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(tmp_path, name, rows=None, **kwargs):
    kwargs.setdefault("dataset_path", write(tmp_path / "rows.jsonl", ROWS[name] if rows is None else rows))
    return load_task(TaskArguments(dataset_name=name, **kwargs))


def own(tmp_path, rows, tokenizer=None, **kwargs):
    path = write(tmp_path / "own.jsonl", rows)
    return load_task(TaskArguments(dataset_name=path, **kwargs), tokenizer)


def score(task, completion, row=-1):
    columns = {name: [value] for name, value in task.train_dataset[row].items()}
    return task.reward_func(completions=[[{"role": "assistant", "content": completion}]], **columns)


def numbers(count):
    return [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(count)]


class TestKnown:
    def test_every_data_set_has_rows_here(self):
        assert ROWS.keys() == KNOWN.keys() == RIGHT.keys()

    @pytest.mark.parametrize("name", [*MATH, *(pytest.param(name, marks=needs_sandbox) for name in CODE)])
    def test_rows_of_the_schema_become_a_task(self, tmp_path, name):
        task = load(tmp_path, name, reward_timeout=20.0)
        assert task.eval_dataset is None
        assert task.train_dataset.column_names == ["prompt", "tests" if name in CODE else "answer"]
        assert score(task, RIGHT[name]) == [1.0]
        assert score(task, answer("print(1)") if name in CODE else "no\nbox") == [0.0]
        assert task.reward_func.__name__ == KNOWN[name].kind  # pyright: ignore[reportFunctionMemberAccess]
        message = task.train_dataset[-1]["prompt"][-1]
        assert message["role"] == "user"
        assert message["content"].endswith(KNOWN[name].instruction)

    @needs_sandbox
    def test_prompts_of_code(self, tmp_path):
        def prompt(name, row=-1):
            (message,) = load(tmp_path, name).train_dataset[row]["prompt"]
            return message["content"]

        assert prompt("eurus_rl_code") == ROWS["eurus_rl_code"][1]["prompt"][1]["content"]
        assert "from typing import List" in prompt("humaneval_plus") and FENCED in prompt("humaneval_plus")
        assert "assert square(3) == 9" in prompt("mbpp_plus")
        assert "standard input" in prompt("livecodebench_v6", 0)
        assert "class Solution:" in prompt("livecodebench_v6") and "standard input" not in prompt("livecodebench_v6")

    @needs_sandbox
    def test_stdin_problem_of_livecodebench(self, tmp_path):
        task = load(tmp_path, "livecodebench_v6", reward_timeout=20.0)
        assert (score(task, PRINT, 0), score(task, answer("print(4)"), 0)) == ([1.0], [0.0])

    @needs_sandbox
    def test_functions_of_eurus(self, tmp_path):
        truth = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
        rows = [
            ROWS["eurus_rl_code"][0],
            {**ROWS["eurus_rl_code"][1], "reward_model": {"ground_truth": json.dumps(truth)}},
        ]
        rows[0] = {**rows[0], "reward_model": {"ground_truth": "7"}}
        task = load(tmp_path, "eurus_rl_code", rows, reward_timeout=20.0)
        assert unpack_tests(task.train_dataset[0]["tests"])["outputs"] == [3, 7]
        assert score(task, answer("def f(a, b): return a + b")) == [1.0]

    def test_private_tests_are_not_unpickled(self, tmp_path):
        class Hostile:
            def __reduce__(self):
                return print, ("run",)

        row = dict(ROWS["livecodebench_v6"][0])
        row["private_test_cases"] = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
        from trl_softgate.tasks.known import _private_cases

        with pytest.raises(ValueError, match="must hold one string, found the opcode"):
            _private_cases(row["private_test_cases"])
        assert _private_cases(" [1]") == " [1]"
        for protocol in range(2, 6):
            packed = base64.b64encode(zlib.compress(pickle.dumps("[1]", protocol))).decode()
            assert _private_cases(packed) == "[1]"

    def test_difficulty(self, tmp_path):
        assert len(load(tmp_path, "deepmath").train_dataset) == 1
        assert len(load(tmp_path, "deepmath", min_difficulty=0.0).train_dataset) == 2
        with pytest.raises(ValueError, match="No problem is left of deepmath: lower min_difficulty"):
            load(tmp_path, "deepmath", min_difficulty=9.0)
        with pytest.raises(ValueError, match="lacks the column 'difficulty'"):
            load(tmp_path, "gsm8k", min_difficulty=3.0)

    def test_folders(self, tmp_path):
        dataset = Dataset.from_list(ROWS["gsm8k"] * 3)
        dataset.save_to_disk(tmp_path / "saved")
        DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(tmp_path / "splits")
        (tmp_path / "files").mkdir()
        dataset.to_parquet(tmp_path / "files" / "train-00000-of-00001.parquet")
        dataset.select([0]).to_parquet(tmp_path / "files" / "test-00000-of-00001.parquet")
        for folder in ("saved", "splits", "files"):
            assert len(load(tmp_path, "gsm8k", dataset_path=str(tmp_path / folder)).train_dataset) == 3
        for folder in ("splits", "files"):
            path = str(tmp_path / folder)
            assert len(load(tmp_path, "gsm8k", dataset_path=path, dataset_split="test").train_dataset) == 1
            with pytest.raises(ValueError, match="cannot be read as a data set"):
                load(tmp_path, "gsm8k", dataset_path=path, dataset_split="dev")

    @needs_sandbox
    def test_folder_of_livecodebench(self, tmp_path):
        write(tmp_path / "test6.jsonl", ROWS["livecodebench_v6"])
        write(tmp_path / "test5.jsonl", ROWS["livecodebench_v6"])
        assert len(load(tmp_path, "livecodebench_v6", dataset_path=str(tmp_path)).train_dataset) == 2

    @pytest.mark.parametrize("name", ["deepmath", *(pytest.param("livecodebench_v6", marks=needs_sandbox),)])
    def test_hub_out_of_reach(self, name):
        with pytest.raises(ValueError, match=f"{KNOWN[name].hub} cannot be loaded .*dataset_path"):
            load_task(TaskArguments(dataset_name=name))

    def test_code_needs_a_sandbox(self, tmp_path, monkeypatch):
        path = write(tmp_path / "rows.jsonl", ROWS["mbpp_plus"])
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ValueError, match="allow_unsandboxed_code=True"):
            load(tmp_path, "mbpp_plus", dataset_path=path)
        with pytest.warns(UserWarning, match="without a sandbox"):
            task = load(tmp_path, "mbpp_plus", dataset_path=path, allow_unsandboxed_code=True, reward_timeout=20.0)
        assert (score(task, SQUARE), score(task, answer("def square(x): return x"))) == ([1.0], [0.0])

    def test_bad_row(self, tmp_path):
        rows = [ROWS["gsm8k"][0], {"question": "q", "answer": None}]
        with pytest.raises(ValueError, match="Row 2 of .*rows.jsonl is not what it should be"):
            load(tmp_path, "gsm8k", rows)
        rows = [ROWS["aime25"][0], {**ROWS["aime25"][0], "answer": None}]
        with pytest.raises(ValueError, match="Row 2 of .*`answer` is empty"):
            load(tmp_path, "aime25", rows)


class TestOwnFile:
    def test_text_and_answer_are_enough(self, tmp_path):
        task = own(tmp_path, [{"prompt": "What is 1 + 1?", "answer": 2}])
        assert task.train_dataset[0]["prompt"] == [{"role": "user", "content": f"What is 1 + 1?\n\n{BOXED}"}]
        for completion, right in ((r"So \boxed{2.0}", 1.0), ("2", 1.0), (r"\boxed{3}", 0.0), ("a\n2", 0.0)):
            assert score(task, completion) == [right]

    def test_messages_system_prompt_and_instruction(self, tmp_path):
        prompt = [{"role": "system", "content": "old"}, {"role": "user", "content": "Capital?"}]
        rows = [{"prompt": prompt, "answer": "Paris", "note": 1}]
        kept = own(tmp_path, rows, instruction="").train_dataset
        assert kept[0] == {"prompt": prompt, "answer": "Paris"}
        changed = own(tmp_path, rows, instruction="Be brief.", system_prompt="new").train_dataset[0]["prompt"]
        assert changed == [
            {"role": "system", "content": "new"},
            {"role": "user", "content": "Capital?\n\nBe brief."},
        ]

    @pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
    def test_formats(self, tmp_path, suffix):
        path = str(tmp_path / f"own{suffix}")
        dataset = Dataset.from_list(numbers(3))
        dataset.to_parquet(path) if suffix == ".parquet" else dataset.to_json(path, lines=suffix == ".jsonl")
        assert load_task(TaskArguments(dataset_name=path)).train_dataset["answer"][:] == ["1", "2", "3"]

    def test_sizes_and_seed(self, tmp_path):
        rows = numbers(20)
        assert own(tmp_path, rows).train_dataset["answer"][:] == [str(i + 1) for i in range(20)]

        def drawn(**kwargs):
            task = own(tmp_path, rows, **kwargs)
            assert task.eval_dataset is not None
            return task.train_dataset["answer"][:], task.eval_dataset["answer"][:]

        train, held_out = drawn(train_size=8, eval_size=4)
        assert (len(train), len(held_out)) == (8, 4)
        assert set(train).isdisjoint(held_out)
        assert drawn(train_size=8, eval_size=4) == (train, held_out)
        assert drawn(train_size=8, eval_size=4, task_seed=1) != (train, held_out)
        assert [len(part) for part in drawn(eval_size=4)] == [16, 4]

    def test_long_prompts_are_counted(self, tmp_path, capsys, monkeypatch):
        rows = [*numbers(3), {"prompt": "x" * 300, "answer": 1}]
        tokenizer = tiny.tokenizer()
        task = own(tmp_path, rows, tokenizer, max_prompt_tokens=200)
        assert len(task.train_dataset) == 3
        assert "1 of 4 problems are left out: their prompts have more than 200 tokens." in capsys.readouterr().out
        # the limit is that of the rendered prompt, exactly
        content = task.train_dataset[0]["prompt"][0]["content"]
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        exact = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert len(own(tmp_path, rows, tokenizer, max_prompt_tokens=exact).train_dataset) == 3
        with pytest.raises(ValueError, match=f"more than {exact - 1} tokens: raise max_prompt_tokens"):
            own(tmp_path, rows, tokenizer, max_prompt_tokens=exact - 1)
        capsys.readouterr()
        monkeypatch.setenv("RANK", "1")
        own(tmp_path, rows, tokenizer, max_prompt_tokens=200)
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([{"question": "a", "answer": "b"}], "lacks the column 'prompt'; it has 'question', 'answer'"),
            ([{"text": "a"}], "lacks the columns 'answer', 'prompt'; it has 'text'"),
            ([{"prompt": "a", "answer": " "}], "Row 1 .*`answer` is empty"),
            ([{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": None}], "Row 2 .*`answer` is empty"),
            ([{"prompt": "", "answer": "b"}], "Row 1 .*must end with what the user asks"),
            ([{"prompt": 5, "answer": "b"}], "Row 1 .*must be text or a list of chat messages, got 5"),
            ([{"prompt": [], "answer": "b"}], "Row 1 .*must be text or a list"),
            ([{"prompt": [{"role": "user"}], "answer": "b"}], "Row 1 .*`role` and `content`"),
            ([{"prompt": [{"role": "assistant", "content": "x"}], "answer": "b"}], "must end with what the user asks"),
            ([], "cannot be read as a data set|No problem is left"),
        ],
    )
    def test_bad_rows(self, tmp_path, rows, message):
        with pytest.raises(ValueError, match=message):
            own(tmp_path, rows)

    def test_not_json(self, tmp_path):
        (tmp_path / "own.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt"')
        with pytest.raises(ValueError, match="own.jsonl' cannot be read as a data set"):
            load_task(TaskArguments(dataset_name=str(tmp_path / "own.jsonl")))

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"train_size": 6}, "train_size 6 and eval_size 0 ask for more problems than the 5"),
            ({"train_size": 4, "eval_size": 2}, "more problems than the 5"),
            ({"eval_size": 5}, "more problems than the 5"),
        ],
    )
    def test_too_small(self, tmp_path, sizes, message):
        with pytest.raises(ValueError, match=message):
            own(tmp_path, numbers(5), **sizes)


class TestArguments:
    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({}, "either a reasoning-gym task .* or a data set .*, got neither"),
            ({"task_name": "chain_sum", "dataset_name": "gsm8k"}, "got both"),
            ({"task_name": "chain_sum", "dataset_path": "x"}, "dataset_path has no effect with task_name"),
            ({"task_name": "chain_sum", "min_difficulty": 1.0}, "min_difficulty has no effect with task_name"),
            ({"task_name": "chain_sum", "reward_timeout": 1.0}, "reward_timeout has no effect with task_name"),
            ({"dataset_name": "gsm8k", "task_config": {"a": 1}}, "task_config has no effect with dataset_name"),
            ({"dataset_name": "own.jsonl", "dataset_path": "x"}, "name your own file as dataset_name"),
            ({"dataset_name": "gsm8k", "dataset_path": ".", "dataset_revision": "x"}, "leave it out for a local file"),
            ({"dataset_name": "own.jsonl", "dataset_revision": "x"}, "leave it out for a local file"),
            ({"dataset_name": "livecodebench_v6", "dataset_split": "test"}, "livecodebench_v6 has no splits"),
            ({"dataset_name": "gsm8k", "train_size": 0}, "`train_size`"),
            ({"dataset_name": "gsm8k", "eval_size": -1}, "`eval_size`"),
            ({"dataset_name": "gsm8k", "max_prompt_tokens": 0}, "`max_prompt_tokens`"),
            ({"task_name": "chain_sum", "task_config": "{max"}, "task_config must be a JSON object"),
        ],
    )
    def test_refused_at_once(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            TaskArguments(**kwargs)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"dataset_name": "gsm8"}, "There is no data set named 'gsm8'. Did you mean gsm8k"),
            ({"dataset_name": "aime"}, "Did you mean aime2[45], aime2[45]"),
            ({"dataset_name": "openai/gsm8k"}, "Did you mean .*gsm8k"),
            ({"dataset_name": "???"}, "Known are deepmath, .*, and .jsonl, .json or .parquet files"),
            ({"dataset_name": "nowhere/own.jsonl"}, "There is no file 'nowhere/own.jsonl': correct dataset_name"),
            ({"dataset_name": __file__}, "must be a .jsonl, .json or .parquet file or the name"),
            (
                {"dataset_name": "gsm8k", "dataset_path": "nowhere"},
                "no file or folder 'nowhere': correct dataset_path",
            ),
            ({"dataset_name": "gsm8k", "dataset_path": __file__}, "must be a .jsonl, .json or .parquet file or a fol"),
            ({"dataset_name": "gsm8k", "max_prompt_tokens": 5}, "needs the tokenizer: call load_task"),
            ({"dataset_name": "gsm8k", "reward_workers": 0}, "`workers`"),
            ({"task_name": "chainsum"}, "Did you mean chain_sum"),
        ],
    )
    def test_refused_before_a_model_is_loaded(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            load_task(TaskArguments(**kwargs))

    def test_split_of_a_single_file(self, tmp_path):
        for name, rows in (("gsm8k", ROWS["gsm8k"]), (None, numbers(2))):
            path = write(tmp_path / "rows.jsonl", rows)
            args = TaskArguments(
                dataset_name=name or path, dataset_path=None if name is None else path, dataset_split="test"
            )
            with pytest.raises(ValueError, match="A single file has no splits"):
                load_task(args)

    def test_chat_template_is_needed(self):
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="has no chat template"):
            load_task(TaskArguments(task_name="chain_sum"), tokenizer)

    def test_no_name_is_taken_twice(self):
        names = {field.name for field in dataclasses.fields(TaskArguments)}
        for other in (GRPOConfig, ModelConfig):
            assert names.isdisjoint(field.name for field in dataclasses.fields(other))

    def test_parser(self, tmp_path):
        path = tmp_path / "own.yaml"
        path.write_text("task_name: chain_sum\ntask_config: {max_terms: 2}\ntrain_size: 3\n")
        parser = TrlParser((TaskArguments,))  # pyright: ignore[reportArgumentType]
        (args,) = parser.parse_args_and_config(["--config", str(path), "--instruction", "", "--eval_size", "2"])
        assert args == TaskArguments("chain_sum", {"max_terms": 2}, train_size=3, eval_size=2, instruction="")
        assert "100%" not in parser.format_help() and "boxed" in parser.format_help()


class TestReasoningGym:
    def test_as_before(self):
        task = load_task(TaskArguments("chain_sum", {"max_terms": 2}, train_size=4, eval_size=2), tiny.tokenizer())
        assert task.eval_dataset is not None
        assert (len(task.train_dataset), len(task.eval_dataset)) == (4, 2)
        assert score(task, task.train_dataset[-1]["answer"]) == [1.0]
        assert len(load_task(TaskArguments("chain_sum")).train_dataset) == 1000

    def test_instruction_and_limit(self):
        args = TaskArguments("chain_sum", train_size=30, instruction="Be brief.", max_prompt_tokens=130)
        plain = load_task(TaskArguments("chain_sum", train_size=30)).train_dataset["prompt"]
        kept = load_task(args, tiny.tokenizer()).train_dataset["prompt"]
        assert 0 < len(kept) < 30
        asked = [prompt[-1]["content"] + "\n\nBe brief." for prompt in plain]
        assert all(prompt[-1]["content"] in asked for prompt in kept)


def test_import_is_light():
    script = (
        "import sys, trl_softgate.tasks.loading\n"
        "print([name for name in ('torch', 'datasets', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
