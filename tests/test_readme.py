"""README and docs do what they say: each Python block runs, and each shell line names things that exist.

What a shell line names is checked here: make targets, requirements, scripts, config files and every option, the latter
against the `--help` of the command. `tests/examples/test_shell_lines.py` runs the lines.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", *DOCS)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], flags=re.MULTILINE | re.DOTALL)


def shell_lines() -> list[str]:
    """Every command of every shell block, continued lines joined, comments and blank lines left out."""
    text = "\n".join(block for page in PAGES for block in blocks(page, "bash")).replace("\\\n", " ")
    return [line for line in text.splitlines() if shlex.split(line, comments=True)]


@functools.cache
def help_of(*command: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def check_options(words: list[str], *command: str) -> None:
    """`command` shows its help, and every `--option` among `words` is in it."""
    text = help_of(*command)
    for option in (word.split("=")[0] for word in words if word.startswith("--")):
        assert re.search(rf"{re.escape(option)}\b", text), f"{' '.join(command)} has no {option}"


def check_make(words: list[str]) -> None:
    # Under `make test` the outer make's own flags would be inherited.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    result = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def check_pip(words: list[str]) -> None:
    assert words.pop(0) == "install"
    if "-c" in words:
        at = words.index("-c")
        assert (ROOT / words[at + 1]).is_file()
        del words[at : at + 2]
    for word in words:
        if match := re.fullmatch(r"\.(?:\[(.*)\])?", word):
            assert "-e" in words
            assert set((match[1] or "plots").split(",")) <= set(PROJECT["optional-dependencies"])
        elif not word.startswith("-"):
            assert re.search(rf"^{re.escape(word)}==", CONSTRAINTS, flags=re.MULTILINE), f"{word} is not pinned"


def check_script(words: list[str]) -> None:
    script = words.pop(0)
    assert (ROOT / script).is_file()
    for word in words:
        if word.endswith((".yaml", ".json")):
            assert (ROOT / word).is_file(), word
    check_options(words, script)


def check_accelerate(words: list[str]) -> None:
    assert words.pop(0) == "launch"
    while words[0].startswith("--"):
        option, value = words.pop(0), words.pop(0)
        assert option in ("--config_file", "--machine_rank", "--main_process_ip"), option
        assert option != "--config_file" or (ROOT / value).is_file(), value
    check_script(words)


def check_own_command(words: list[str]) -> None:
    assert PROJECT["scripts"] == {"trl-softgate": "trl_softgate.cli:main"}
    check_options(words, "-c", "import sys; from trl_softgate.cli import main; sys.exit(main())", words[0])


def check_vllm(words: list[str]) -> None:
    """Its options are checked where it is installed, in `tests/teachers/test_server_teacher.py`."""
    assert words[0] == "serve"


def check_jupyter(words: list[str]) -> None:
    assert words[0] == "execute"
    assert all((ROOT / word).is_file() for word in words[1:])


def check_pre_commit(words: list[str]) -> None:
    assert words == ["install"]
    assert (ROOT / ".pre-commit-config.yaml").is_file()


CHECKS = {
    "make": check_make,
    "pip": check_pip,
    "python": check_script,
    "accelerate": check_accelerate,
    "trl-softgate": check_own_command,
    "vllm": check_vllm,
    "jupyter": check_jupyter,
    "pre-commit": check_pre_commit,
}


@pytest.mark.parametrize("line", shell_lines())
def test_shell_line(line: str) -> None:
    command, *words = shlex.split(line, comments=True)
    assert command in CHECKS, f"no check for {command!r}: write one"
    CHECKS[command](words)


def test_both_commands_of_the_readme_are_there() -> None:
    lines = [shlex.split(line, comments=True) for line in shell_lines()]
    assert ["make", "demo"] in lines
    assert ["make", "test"] in lines


@pytest.fixture
def quick_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leaves the text of an example as it is, but its models take a few steps and its output a temporary folder."""
    from trl_softgate.diagnostics.record import RunRecord
    from trl_softgate.tasks import cold_start

    monkeypatch.setenv("TRL_SOFTGATE_CACHE", str(tmp_path / "cache"))
    for name, steps in (("STUDENT", 2), ("TEACHER", 4)):
        recipe = cold_start.ColdStartRecipe(hidden_size=32, layers=1, heads=2, steps=steps)
        monkeypatch.setattr(cold_start, name, recipe)
    monkeypatch.chdir(tmp_path)
    # the record that the README's run would leave
    RunRecord("runs/readme", step=0).append("scalars", [{"step": 1, "name": "reward", "value": 0.5}])


@pytest.mark.parametrize("source", [block for page in PAGES for block in blocks(page, "python")])
@pytest.mark.usefixtures("quick_models")
def test_python_block(source: str) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, "a page", "exec"), names)
    if "trainer" not in names:  # a line that goes with a run
        return
    trainer = names["trainer"]
    log = [entry for entry in trainer.state.log_history if "reward" in entry]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(log) > 0
    if not type(trainer).__name__.startswith("SAF"):
        return
    assert log[-1]["distill/missing_share"] == 0
    assert all(entry["distill/kl"] > 0 for entry in log)


def test_the_example_is_short() -> None:
    (source,) = blocks("README.md", "python")
    assert len([line for line in source.splitlines() if line.strip()]) <= 16


@pytest.mark.parametrize("page", PAGES)
def test_local_links_and_paths_exist(page: str) -> None:
    folder = Path(page).parent
    links = [str(folder / link) for link in re.findall(r"\]\((?!https?://|#)([^)#]+)\)", PAGES[page])]
    paths = re.findall(r"`((?:recipes|examples|tests|benchmarks|docs|trl_softgate|\.ci)/[\w./-]*)`", PAGES[page])
    missing = [name for name in [*links, *paths] if not (ROOT / name).exists()]
    assert not missing


def test_every_extra_is_named() -> None:
    for extra in PROJECT["optional-dependencies"]:
        assert f"`{extra}`" in PAGES["README.md"]


def test_options_of_the_text_exist() -> None:
    """Every `option=value` in the text is a field of a config."""
    from dataclasses import fields

    from trl import ModelConfig

    from trl_softgate import GSPOConfig, SAFDistillConfig, SAPOConfig
    from trl_softgate.tasks.loading import TaskArguments

    configs = (GSPOConfig, SAFDistillConfig, SAPOConfig, ModelConfig, TaskArguments)
    known = {field.name for config in configs for field in fields(config)}
    # options of vLLM and accelerate, which the docs name too
    others = {"fsdp_version", "num_processes"}
    named = set(re.findall(r"`([a-z]\w*)(?:=|: )[^`]+`", "".join(PAGES.values())))
    named |= {key for page in DOCS for block in blocks(page, "yaml") for key in yaml.safe_load(block)}
    assert named and named <= known | others
