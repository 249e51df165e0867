"""Every recipe file parses against the dataclasses of its script, and every script shows its help."""

import importlib
import json
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from trl_softgate import GSPOConfig, SAFDistillConfig, SAPOConfig
from trl_softgate.rewards.reasoning_gym import ReasoningGymArguments

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CONFIGS = sorted((RECIPES / "configs").glob("*.yaml"))
SCRIPTS = {"saf_distill.py": SAFDistillConfig, "gspo.py": GSPOConfig, "sapo.py": SAPOConfig}


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("common")


def launch_line(config: Path) -> list[str]:
    """The words of a config's first line: `# accelerate launch SCRIPT --config FILE`."""
    return config.read_text().splitlines()[0].removeprefix("# ").split()


def parser_of(common, config: Path):
    return common.make_parser(SCRIPTS[Path(launch_line(config)[2]).name])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_parses_and_every_value_arrives(common, config, tmp_path):
    args = ["--config", str(config), "--output_dir", str(tmp_path)]
    parsed = parser_of(common, config).parse_args_and_config(args)
    values = {}
    for part in parsed:
        values.update({option.name: getattr(part, option.name) for option in fields(part)})
    expected = yaml.safe_load(config.read_text())
    expected["output_dir"] = str(tmp_path)
    expected["report_to"] = []  # what "none" becomes
    expected["lora_target_modules"] = "all-linear"  # trl.ModelConfig unpacks a list of one
    for key, value in expected.items():
        assert values[key] == value or str(getattr(values[key], "value", None)) == value, key


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_unknown_key_is_an_error(common, config, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(config.read_text() + "\nopd_top_k_procent: 20\n")
    with pytest.raises(ValueError, match="opd_top_k_procent"):
        parser_of(common, config).parse_args_and_config(["--config", str(bad), "--output_dir", str(tmp_path)])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_names_its_own_launch_line(config):
    assert launch_line(config)[:2] == ["accelerate", "launch"]
    script, named = ROOT / launch_line(config)[2], ROOT / launch_line(config)[4]
    assert named == config
    assert f"--config recipes/configs/{config.name}" in script.read_text()


def test_command_line_overrides_the_file(common, tmp_path):
    config = RECIPES / "configs" / "smollm2_saf_lora_cpu.yaml"
    task, training, model = common.make_parser(SAFDistillConfig).parse_args_and_config(
        ["--config", str(config), "--output_dir", str(tmp_path), "--opd_top_k_percent", "50", "--lora_r", "4"]
        + ["--task_name", "spell_backward", "--task_config", '{"max_word_len": 4}', "--policy_objective", "sapo"]
    )
    assert (training.opd_top_k_percent, training.policy_objective, model.lora_r) == (50.0, "sapo", 4)
    assert (task.task_name, task.task_config) == ("spell_backward", {"max_word_len": 4})


def test_teacher_example_trains_on_the_recipe_s_task():
    teacher = runpy.run_path(str(ROOT / "examples" / "smollm2_teacher_adapter.py"))["TeacherArguments"]()
    recipe = yaml.safe_load((RECIPES / "configs" / "smollm2_saf_lora_cpu.yaml").read_text())
    for key in ("task_name", "task_config", "system_prompt"):
        assert getattr(teacher, key) == recipe[key]
    assert (teacher.model, teacher.output) == (recipe["model_name_or_path"], recipe["teacher_adapter"])
    # Problem i is drawn from seed + i: the two sets of problems must not meet.
    assert teacher.task_seed > ReasoningGymArguments("chain_sum").task_seed + recipe["train_size"]


@pytest.mark.parametrize(
    "script",
    [*(RECIPES / name for name in SCRIPTS), *sorted((ROOT / "examples").glob("smollm2_*.py"))],
    ids=lambda path: path.stem,
)
def test_script_shows_help(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr("sys.argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_model_is_asked_for(common, monkeypatch, tmp_path):
    from trl_softgate import GSPOTrainer

    argv = ["gspo.py", "--task_name", "chain_sum", "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(ValueError, match="--model_name_or_path"):
        common.run(GSPOTrainer, GSPOConfig)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("true", True), ("True", True), (True, True), ("runs/a/checkpoint-3", "runs/a/checkpoint-3")],
)
def test_resume_from_the_newest_checkpoint(common, value, expected):
    assert common.checkpoint_of(value) is expected


def test_configs_are_plain_json_types():
    for config in CONFIGS:
        json.dumps(yaml.safe_load(config.read_text()))
