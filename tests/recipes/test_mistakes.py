"""A mistake in a recipe ends it with one sentence and exit code 2, before a model is loaded."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPTS = {"gspo": (GSPOTrainer, GSPOConfig), "saf_distill": (SAFDistillTrainer, SAFDistillConfig)}


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("common")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes") / "model"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def base(model, tmp_path) -> dict[str, Any]:
    """Options that would train."""
    return dict(
        model_name_or_path=str(model),
        task_name="chain_sum",
        train_size=8,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        output_dir=str(tmp_path / "out"),
    )


def error_of(
    common: Any,
    options: dict[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *words: str,
    script: str = "gspo",
) -> str:
    """What the script says of options in a YAML file and words on the command line."""

    def loaded(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was about to be loaded")

    monkeypatch.setattr(GRPOTrainer, "__init__", loaded)
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(options))
    monkeypatch.setattr("sys.argv", [f"{script}.py", "--config", str(file), *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        common.run(*SCRIPTS[script])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith(f"{script}.py: error: ")
    assert "Traceback" not in error
    return last


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"lerning_rate": 1.0},
            "recipe.yaml has the key lerning_rate, which is no option: did you mean learning_rate?",
        ),
        ({"xyzzy": 1}, "has the key xyzzy, which is no option: --help lists them all."),
        ({"max_steps": "ten"}, "max_steps in {} must be a whole number, got 'ten'."),
        ({"max_steps": 1.5}, "max_steps in {} must be a whole number, got 1.5."),
        ({"learning_rate": [1e-5]}, "learning_rate in {} must be a number, got [1e-05]."),
        ({"use_peft": "maybe"}, "use_peft in {} must be true or false, got 'maybe'."),
        ({"epsilon_high": "wide"}, "epsilon_high in {} must be a number or null, got 'wide'."),
        ({"output_dir": False}, "output_dir in {} must be text"),
        ({"task_config": 3}, "task_config in {} must be a mapping or text (in quotes"),
        ({"epsilon": 2.0}, "`epsilon` must be a finite number at least 0 and below 1, got 2.0."),
        ({"dtype": "int8"}, "dtype in {} must be one of auto, bfloat16, float16, float32, got 'int8'."),
        ({"run_name": 3}, "run_name in {} must be text (in quotes, where YAML reads something else) or null, got 3."),
        ({"model_name_or_path": None}, "Name the model to train: --model_name_or_path FOLDER"),
        ({"model_name_or_path": "runs/no/model"}, "reached: another command makes such a folder, and the"),
        ({"model_name_or_path": "nobody/nothing"}, "nobody/nothing is neither a folder here nor the name of"),
        ({"model_name_or_path": "nobody/nothing"}, "that can be reached: HF_HUB_OFFLINE is set, so only"),
        (
            {"bf16": None, "use_cpu": False},
            "no accelerator for bfloat16: set `bf16=False`, for the CPU `use_cpu=True`",
        ),
        ({"load_in_4bit": True}, "Weights in four bits cannot be trained: with load_in_4bit set use_peft, too."),
        ({"task_name": "chainsum"}, "Did you mean chain_sum"),
        ({"dataset_name": "nothing.jsonl", "task_name": None}, "There is no file 'nothing.jsonl'"),
        (
            {"num_generations": 3},
            "1 processes x per_device_train_batch_size 4 x gradient_accumulation_steps 1 = 4 completions of a rollout "
            "are no multiple of num_generations (3): set gradient_accumulation_steps to 3, for example.",
        ),
        ({"num_generations": 3, "steps_per_generation": 2}, "set steps_per_generation to 3, for example."),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0."),
        ({"train_size": 1}, "The task has 1 training problems, but one rollout takes 2 prompts"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options(common, base, changed, sentence, tmp_path, monkeypatch, capsys):
    said = error_of(common, base | changed, tmp_path, monkeypatch, capsys)
    assert sentence.format(tmp_path / "recipe.yaml") in said


def test_options_that_are_right_reach_the_model(common, base, tmp_path, monkeypatch, capsys):
    with pytest.raises(AssertionError, match="a model was about to be loaded"):
        error_of(common, base, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lerning_rate", "1"], "--lerning_rate on the command line is no option: did you mean learning_rate?"),
        (["--learning_rate", "x"], "argument --learning_rate/--learning-rate: invalid float value: 'x'"),
        (["stray"], "stray on the command line is no option"),
        (
            ["--aggregation", "token_mean", "--gradient_accumulation_steps", "2", "--steps_per_generation", "1"],
            "`aggr",
        ),
    ],
)
def test_command_line(common, base, words, sentence, tmp_path, monkeypatch, capsys):
    assert sentence in error_of(common, base, tmp_path, monkeypatch, capsys, *words)


def test_batch_counts_the_processes(common, base, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    said = error_of(common, base | {"num_generations": 8}, tmp_path, monkeypatch, capsys)
    assert "3 processes x per_device_train_batch_size 4 x gradient_accumulation_steps 1 = 12 completions" in said
    assert "set gradient_accumulation_steps to 2" in said


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "There is no file"),
        ("a: [1", "is not valid YAML"),
        ("- a\n- b\n", "must be a YAML mapping of options"),
    ],
)
def test_config_file(common, content, sentence, tmp_path):
    file = tmp_path / "recipe.yaml"
    if content is not None:
        file.write_text(content)
    parser = common.make_parser(GSPOConfig)
    for words in (["--config", str(file)], [f"--config={file}"]):
        with pytest.raises(common.Mistake, match=sentence):
            parser.parse_args_and_config(words)
    with pytest.raises(common.Mistake, match="--config needs the path"):
        parser.parse_args_and_config(["--config"])


def test_folder_of_the_model(common, base, model, tmp_path, monkeypatch, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    said = error_of(common, base | {"model_name_or_path": str(empty)}, tmp_path, monkeypatch, capsys)
    assert f"model_name_or_path: the folder {empty} has no config.json" in said

    adapter = tmp_path / "adapter"
    adapted: Any = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules="all-linear"))
    adapted.save_pretrained(adapter)
    said = error_of(common, base | {"model_name_or_path": str(adapter)}, tmp_path, monkeypatch, capsys)
    assert f"`trl-softgate merge {adapter} OUTPUT`" in said

    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink()
    said = error_of(common, base | {"model_name_or_path": str(bare)}, tmp_path, monkeypatch, capsys)
    assert f"The tokenizer of {bare} has no chat template" in said
    for file in bare.glob("tokenizer*"):
        file.unlink()
    said = error_of(common, base | {"model_name_or_path": str(bare)}, tmp_path, monkeypatch, capsys)
    assert f"The folder {bare} has no tokenizer" in said


def test_columns_of_the_data(common, base, tmp_path, monkeypatch, capsys):
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n" for _ in range(8)))
    del base["task_name"], base["train_size"]
    said = error_of(common, base | {"dataset_name": str(file)}, tmp_path, monkeypatch, capsys)
    assert "'prompt'" in said and "'question'" in said


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "SAF distillation needs a teacher: set teacher_model_name_or_path, teacher_adapter"),
        ({"teacher_adapter": "base"}, "teacher_adapter shares the base model of a LoRA student: set use_peft, too."),
        (
            {"teacher_adapter": "runs/no/one", "use_peft": True},
            "teacher_adapter: runs/no/one is neither a folder",
        ),
        ({"teacher_model_name_or_path": "runs/no/one"}, "teacher_model_name_or_path: runs/no/one is neither a folder"),
        ({"opd_warmup_steps": 9}, "`opd_warmup_steps=9` is longer than the run of 1 steps"),
    ],
)
def test_teacher(common, base, changed, sentence, tmp_path, monkeypatch, capsys):
    options = base | {"opd_warmup_steps": 0} | changed
    assert sentence in error_of(common, options, tmp_path, monkeypatch, capsys, script="saf_distill")
