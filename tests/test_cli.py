"""The command line, and the demo at toy size."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from trl_softgate import __version__
from trl_softgate.cli import main
from trl_softgate.demo import DemoError, DemoScale, run_demo
from trl_softgate.tasks.cold_start import ColdStartRecipe

TINY = ColdStartRecipe(digits=2, hidden_size=32, layers=1, heads=1, steps=3, batch_size=4)
TOY = DemoScale(
    student=TINY,
    teacher=ColdStartRecipe(digits=2, hidden_size=64, layers=1, heads=2, steps=3, batch_size=4),
    held_out=12,
    train_problems=16,
    prompts=2,
    completions=4,
)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "demo" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"trl-softgate {__version__}"
    assert main(["demo", "--help"]) == 0
    output = capsys.readouterr().out
    for option in ("--trainer", "--steps", "--seed", "--output-dir", "runs/demo"):
        assert option in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--trainer", "ppo"], "--trainer must be one of saf, gspo, sapo, got 'ppo'."),
        (["demo", "--steps", "1"], "--steps must be at least 2, got 1."),
        (["demo", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["demo", "--seed", "-1"], "--seed must be between 0 and 4294967295, got -1."),
        (["demo", "--output-dir", f"{__file__}/runs"], "--output-dir must be a folder"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_missing_matplotlib_is_said_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert main(["demo", "--output-dir", str(tmp_path / "out")]) == 1
    assert "pip install 'trl-softgate[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(**kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trl_softgate.demo.run_demo", interrupt)
    assert main(["demo"]) == 130
    assert "stopped" in capsys.readouterr().err


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'rich', 'matplotlib', 'numpy'}"
    code = f"import sys, trl_softgate.cli, trl_softgate.demo; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_run_demo_refuses_what_the_command_line_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trainer must be one of"):
        run_demo(trainer="ppo", output_dir=tmp_path)
    with pytest.raises(ValueError, match="steps must be at least 2"):
        run_demo(steps=1, output_dir=tmp_path)
    assert issubclass(DemoError, Exception)


@pytest.mark.parametrize("trainer", ["saf", "gspo", "sapo"])
def test_a_toy_demo_leaves_its_results(trainer: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    console = Console(record=True, width=100, force_terminal=False)
    cache_dir = tmp_path_factory.getbasetemp() / "demo-cache"
    summary = run_demo(
        trainer=trainer,
        steps=5,
        seed=1,
        output_dir=tmp_path / "demo",
        scale=TOY,
        cache_dir=cache_dir,
        console=console,
    )
    assert summary == json.loads((tmp_path / "demo" / "summary.json").read_text())
    for key in ("student_accuracy_before", "student_accuracy_after", "teacher_accuracy"):
        assert 0 <= summary[key] <= 1
    assert summary["seconds"] > 0
    assert summary["trainer"] == trainer
    assert Path(summary["figure"]).read_bytes().startswith(PNG_SIGNATURE)

    history = json.loads((tmp_path / "demo" / "history.json").read_text())
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5]
    assert all(("distill/multiplier" in entry) == (trainer == "saf") for entry in history)

    text = console.export_text()
    assert "sampled at temperature 1" in text
    assert summary["figure"] in text.replace("\n", "")
    student = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "student")
    assert student.config.vocab_size == 15
    # The caller's settings are back.
    assert torch.get_num_threads() == threads
    assert transformers.logging.get_verbosity() == verbosity
