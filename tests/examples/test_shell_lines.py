"""Every shell line of README, CONTRIBUTING and docs, in their order, as a newcomer types it: in a copy of the project,
whose environment its own `make demo` makes.

What this machine lacks is replaced, nothing else: after it was prepared once, the 135M model by an untrained tiny one,
hub names by a local folder, GPUs by CPU processes, the second machine by this one. An option shortens what would take
long. `make lint`, `make test-slow` and `make test-server` are lines of `.ci/run` itself.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml
from test_readme import shell_lines

ROOT = Path(__file__).parents[2]
RUN_BY_CI = ("make lint", "make test-slow", "make test-server")
# these two go with a server of a large model: see `TestDocumentedServer` in tests/teachers
WITH_A_SERVER = ("vllm serve", "python benchmarks/teachers.py")
TINY = "--model_name_or_path runs/smollm2/base --dataset_path gsm8k"
ON_CPU = "--use_cpu true --bf16 false --dtype float32"
# what a line looks like -> what is added to it
ADDED = {
    r"^make demo$": "DEMO_ARGS='--steps 4'",
    r"^make test$": "PYTEST_ARGS=tests/fusion",
    r"^make notebooks$": "NOTEBOOKS=01",
    r"^make bench$": "BENCH_ARGS='--size tiny --repeat 1'",
    r"smollm2_teacher_adapter\.py": "--steps 2 --batch_size 2 --train_size 8 --eval_size 2",
    r"configs/smollm2_saf": "--teacher_self_test false",  # which untrained models fail
    r"--use_cpu false": ON_CPU,
    r"configs/qwen3_": f"{TINY} {ON_CPU} --max_steps 1 --max_completion_length 8",
    r"recipes/evaluate\.py": "--dataset_path gsm8k --train_size 2 --bootstrap_resamples 100",
}


def lines() -> list[list[str]]:
    """The words of each command, in the order of the pages, none twice."""
    found: list[list[str]] = []
    for line in shell_lines():
        words = shlex.split(line, comments=True)
        command = " ".join(words)
        if command in RUN_BY_CI or command.startswith(WITH_A_SERVER):
            continue
        for pattern, more in ADDED.items():
            if re.search(pattern, command):
                words += shlex.split(more)
        words = ["127.0.0.1" if word == "10.0.0.1" else word for word in words]
        if words not in found:
            found.append(words)
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project under version control, with accelerate's files rewritten for two CPU processes."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    copy = tmp_path / "project"
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    for path in (copy / "recipes" / "accelerate").glob("*.yaml"):
        settings = yaml.safe_load(path.read_text())
        settings |= {"use_cpu": True, "mixed_precision": "no", "num_processes": min(settings["num_processes"], 2)}
        if "main_process_port" in settings:
            settings["main_process_port"] = port
        path.write_text(yaml.safe_dump(settings))
    (copy / "gsm8k").mkdir()
    problems = [{"question": f"What is {i} + 1?", "answer": f"It is one more.\n#### {i + 1}"} for i in range(64)]
    for split in ("train", "test"):
        (copy / "gsm8k" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, problems)) + "\n")
    return copy


def environment(project: Path) -> dict[str, str]:
    """That of a shell in which the project's own environment is active."""
    taken_out = ("MAKE", "MFLAGS", "PYTHON", "PYTEST", "VENV", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(taken_out)}
    return env | {
        "PATH": os.pathsep.join([str(project / ".venv" / "bin"), os.environ["PATH"]]),
        "PYTHON": sys.executable,  # for `make`
        "TRL_SOFTGATE_CACHE": str(project / "cache"),
        "NOTEBOOK_STEPS": "12",
        "NOTEBOOK_PROBLEMS": "8",
    }


def put_tiny_model(project: Path) -> None:
    base = project / "runs" / "smollm2" / "base"
    assert (base / "model.safetensors").stat().st_size > 2e8
    shutil.rmtree(base)
    tiny.model(max_position_embeddings=4096).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)


class Line:
    """A command that runs, and the file that its output goes to."""

    def __init__(self, words: list[str], project: Path, log: Path) -> None:
        self.text, self.log = shlex.join(words), log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                words, cwd=project, env=environment(project), stdout=output, stderr=subprocess.STDOUT
            )

    def failure(self) -> str | None:
        """What it said if it failed, once it has ended."""
        status = self.process.wait()
        return f"{self.text}: exit status {status}\n{self.log.read_text()[-5000:]}" if status != 0 else None


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_lines_in_their_order(project: Path, tmp_path: Path) -> None:
    failed = []
    first_machine: Line | None = None
    for number, words in enumerate(lines()):
        line = Line(words, project, tmp_path / f"{number}.log")
        if "--machine_rank 0" in line.text:  # it waits for the second
            first_machine = line
            continue
        failed.append(line.failure())
        if first_machine is not None:
            if failed[-1]:
                first_machine.process.terminate()
            failed.append(first_machine.failure())
            first_machine = None
        if "examples/smollm2_prepare.py" in words:
            put_tiny_model(project)
    failed = [text for text in failed if text]
    assert not failed, "\n\n".join(failed)
    assert (project / "runs" / "demo" / "summary.json").is_file()
    assert (project / "runs" / "site" / "index.html").is_file()
    assert (project / ".git" / "hooks" / "pre-commit").is_file()
    assert (project / "report.html").stat().st_size > 10_000
    assert (project / "runs" / "mine-merged" / "model.safetensors").is_file()
    assert json.loads((project / "runs" / "evaluation" / "results.json").read_text())


def test_the_other_lines_are_run_by_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(re.search(rf"^ *step \S+ {line}$", ci, flags=re.MULTILINE) for line in RUN_BY_CI)
