"""The command line, and the demo at toy size."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
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
    output = capsys.readouterr().out
    assert all(command in output for command in ("demo", "report", "drift", "env", "recipes", "merge"))
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
        (["report"], "the following arguments are required: RUN"),
        (["report", "run", "--output", "."], "--output must be a file, but . is a folder."),
        (["report", "run", "--figures", __file__], "--figures must be a folder"),
        (["drift", "base"], "the following arguments are required: CHECKPOINT"),
        (["drift", "base", "run", "--top-k", "0"], "--top-k must be at least 1, got 0."),
        (
            ["drift", "base", "run", "--output", "nowhere/drift.json"],
            "--output must be a file in a folder that exists",
        ),
        (["env", "--teacher", "model"], "--teacher and --explain need --model."),
        (["env", "--model", "model", "--gpu-memory", "0"], "--gpu-memory must be above 0, got 0.0."),
        (["env", "--model", "model", "--gpu-memory", "nan"], "--gpu-memory must be above 0, got nan."),
        (["env", "--model", "model", "--gpus", "0"], "--gpus must be at least 1, got 0."),
        (["env", "--model", "model", "--lora-rank", "0"], "--lora-rank must be at least 1, got 0."),
        (["merge", "adapter"], "the following arguments are required: OUTPUT"),
        (
            ["merge", "adapter", "out", "--dtype", "int8"],
            "--dtype must be one of auto, bfloat16, float16, float32",
        ),
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


def test_report_of_a_trainer_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = tmp_path / "run", tmp_path / "report.html"
    run.mkdir()
    assert main(["report", str(run), "-o", str(output)]) == 1
    captured = capsys.readouterr()
    assert "holds nothing to report" in captured.err
    assert captured.err.count("\n") == 1
    state = {"log_history": [{"step": step, "reward": step / 3} for step in (1, 2, 3)]}
    (run / "trainer_state.json").write_text(json.dumps(state))
    (run / "record").mkdir()
    (run / "record" / "run.json").write_text("{")
    assert main(["report", str(run), "-o", str(output), "--figures", str(tmp_path / "figures")]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{output}\n"
    assert captured.err == ("trl-softgate report: warning: run: record/run.json cannot be read and was left out.\n")
    assert "chart-reward" in output.read_text()
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"reward.png", "reward.svg"}


def test_a_report_without_its_extra_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bokeh" else find_spec(name))
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 1
    assert "pip install 'trl-softgate[report]'" in capsys.readouterr().err


def test_drift_prints_a_line_for_each_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        tiny.model(seed).save_pretrained(tmp_path / str(seed))
    base, run, other = (str(tmp_path / str(seed)) for seed in range(3))
    capsys.readouterr()
    assert main(["drift", base, run]) == 0
    output = capsys.readouterr().out
    assert "stable" in output
    assert "overlap" not in output

    file = tmp_path / "drift.json"
    assert main(["drift", base, run, other, "--top-k", "3", "--output", str(file)]) == 0
    output = capsys.readouterr().out
    assert "overlap" in output
    assert "…" not in output  # in 80 columns
    content = json.loads(file.read_text())
    assert [layer["layer"] for layer in content["layers"]] == ["0", "1", "embed_tokens"]
    assert len(content["matrices"]) == len(content["other"]) == len(content["overlaps"]) == 15
    assert all(0 < overlap["left"] < 1 for overlap in content["overlaps"])

    assert main(["drift", base, str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"trl-softgate drift: error: {tmp_path / 'nowhere'} is no folder.\n"
    assert captured.out == ""


def test_env_estimates_the_memory_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.model().config.save_pretrained(tmp_path / "student")
    tiny.moe_model().config.save_pretrained(tmp_path / "teacher")
    student, teacher = str(tmp_path / "student"), str(tmp_path / "teacher")
    assert main(["env", "--model", student, "--teacher", teacher, "--gpus", "2", "--tokens", "64"]) == 0
    output = capsys.readouterr().out
    assert "FSDP2/ZeRO-3" in output
    assert "cheapest that fits" in output
    (tmp_path / "empty").mkdir()
    assert main(["env", "--model", str(tmp_path / "empty")]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"trl-softgate env: error: The folder {tmp_path / 'empty'} has no config.json.\n"


def test_recipes_are_listed_by_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main(["recipes"]) == 0
    output = capsys.readouterr().out
    files = sorted(path.stem for path in Path("recipes/configs").glob("*.yaml"))
    assert all(f" {file} " in output for file in files)
    assert "…" not in output  # in 80 columns
    assert main(["recipes", "--model", "Qwen/Qwen3-30B-A3B"]) == 0
    output = capsys.readouterr().out
    assert "SAPO, full" in output and "46 GB" in output and "qwen3_8b" not in output
    assert main(["recipes", "--model", "nobody/nothing"]) == 1
    assert "No recipe in recipes/configs trains nobody/nothing; there are recipes for" in capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    assert main(["recipes"]) == 1
    captured = capsys.readouterr()
    assert "run this in a clone of the repository" in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    (tmp_path / "own.yaml").write_text("max_steps: 1\n")
    assert main(["recipes", "--dir", "."]) == 1
    assert "own.yaml is no recipe: it has no key model_name_or_path." in capsys.readouterr().err


def test_env_prints_what_is_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("trl_softgate.environment._PROBES", ())
    assert main(["env"]) == 0
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert __version__ in output


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
