"""The shell lines of README and docs, run in their order, from a folder in which a tiny model stands for the real one.

Left out are those that install, that `make` runs, and that start eight processes or two machines; `test_readme.py`
checks their words. What a line names on the hub is a local folder here, and what needs a GPU runs on the CPU.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from test_readme import shell_lines

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("make", "pip", "pre-commit")
TINY = ["--model_name_or_path", "runs/smollm2/base", "--dataset_path", "gsm8k"]
ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--dtype", "float32"]
SHORT = ["--max_steps", "1", "--max_completion_length", "8"]
# words of a line -> what is added to it
CHANGES: dict[str, list[str]] = {
    "smollm2_teacher_adapter.py": ["--steps", "2", "--batch_size", "2", "--train_size", "8", "--eval_size", "2"],
    "configs/smollm2_saf": ["--teacher_self_test", "false"],  # which untrained models fail
    "configs/qwen3_": [*TINY, *ON_CPU, *SHORT],
    "recipes/evaluate.py": ["--dataset_path", "gsm8k", "--train_size", "2", "--bootstrap_resamples", "100"],
}


def runnable() -> list[list[str]]:
    lines = [shlex.split(line, comments=True) for line in shell_lines()]
    lines = [words for words in lines if words[0] not in LEFT_OUT and "examples/smollm2_prepare.py" not in words]
    found: list[list[str]] = []
    for words in lines:
        line = " ".join(words)
        if "multi_node" in line or "accelerate/ddp" in line:
            continue
        for part, more in CHANGES.items():
            if part in line:
                words = [*words, *more]
        if "--config_file" in words:
            at = words.index("--config_file")
            del words[at : at + 2]
        if words not in found:
            found.append(words)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    base = tmp_path / "runs" / "smollm2" / "base"
    tiny.model(max_position_embeddings=4096).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    (tmp_path / "gsm8k").mkdir()
    problems = [{"question": f"What is {i} + 1?", "answer": f"It is one more.\n#### {i + 1}"} for i in range(64)]
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, problems)) + "\n")
    return tmp_path


def command(words: list[str]) -> list[str]:
    if words[0] == "trl-softgate":
        return [sys.executable, "-c", "import sys; from trl_softgate.cli import main; sys.exit(main())", *words[1:]]
    if words[0] == "accelerate":
        return [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", *words[2:]]
    assert words[0] == "python", words
    return [sys.executable, *words[1:]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lines_in_their_order(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    failed = []
    for words in runnable():
        done = subprocess.run(command(words), cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            failed.append(f"{shlex.join(words)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    assert not failed, "\n\n".join(failed)
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "runs" / "mine-merged" / "model.safetensors").is_file()
    assert json.loads((folder / "runs" / "evaluation" / "results.json").read_text())
