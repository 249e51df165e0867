"""Every recipe file parses, says what the paper says, adds up, and starts on a tiny model of its architecture."""

import ast
import importlib
import json
import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers
import yaml
from peft import LoraConfig, get_peft_model

from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer
from trl_softgate.recipes import Recipe, read_recipe
from trl_softgate.rewards.reasoning_gym import ReasoningGymArguments

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CONFIGS = sorted((RECIPES / "configs").glob("*.yaml"))
SCRIPTS = {
    "saf_distill.py": (SAFDistillTrainer, SAFDistillConfig),
    "gspo.py": (GSPOTrainer, GSPOConfig),
    "sapo.py": (SAPOTrainer, SAPOConfig),
}
EACH = pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("common")


@pytest.fixture
def written(monkeypatch):
    """The script that writes the files."""
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("write_configs")


def parser_of(common, recipe: Recipe):
    return common.make_parser(SCRIPTS[Path(recipe.script).name][1])


def processes(recipe: Recipe) -> int:
    if recipe.accelerate is None:
        return 1
    return yaml.safe_load((ROOT / recipe.accelerate).read_text())["num_processes"]


# What the files say


@EACH
def test_config_parses_and_every_value_arrives(common, config, tmp_path, monkeypatch):
    recipe = read_recipe(config)
    monkeypatch.setenv("WORLD_SIZE", "1")  # the batch of several processes is checked below
    cpu = ["--use_cpu", "true", "--bf16", "false"]
    args = ["--config", str(config), "--output_dir", str(tmp_path), *cpu]
    parsed = parser_of(common, recipe).parse_args_and_config(args)
    values = {}
    for part in parsed:
        values.update({option.name: getattr(part, option.name) for option in fields(part)})
    expected = yaml.safe_load(config.read_text())
    expected["output_dir"] = str(tmp_path)
    expected["report_to"] = []  # what "none" becomes
    if "lora_target_modules" in expected:
        expected["lora_target_modules"] = "all-linear"  # trl.ModelConfig unpacks a list of one
    if "teacher_server_url" in expected:
        expected["teacher_server_url"] = [expected["teacher_server_url"]]
    for key, value in expected.items():
        assert values[key] == value or str(getattr(values[key], "value", None)) == value, key


def test_configs_are_in_step_with_the_script_that_writes_them(written):
    files = written.files()
    assert {path.stem for path in CONFIGS} == set(files)
    for path in CONFIGS:
        assert path.read_text() == files[path.stem], f"{path.name}: run python recipes/write_configs.py"


@EACH
def test_every_value_is_marked(config):
    for line in config.read_text().splitlines():
        assert not line or line.startswith("#") or re.search(r"[^ ] # (paper|ours)(: .+)?$", line), line


@EACH
def test_header_names_what_exists(config):
    recipe = read_recipe(config)
    assert recipe.launch[:2] == ("accelerate", "launch")
    named = [word for word in recipe.launch if word.endswith((".py", ".yaml"))]
    assert all((ROOT / word).is_file() for word in named)
    assert recipe.launch[recipe.launch.index("--config") + 1] == f"recipes/configs/{config.name}"
    assert {"Hardware", "Memory", "Batch", "Status"} <= recipe.notes.keys()
    assert all(len(line) <= 119 for line in config.read_text().splitlines())


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_launches_what_exists(script):
    text = (RECIPES / script).read_text()
    for word in re.findall(r"recipes/[\w./-]+\.(?:py|yaml)", text):
        assert (ROOT / word).is_file(), word
    backends = ("single_gpu", "ddp", "fsdp2", "zero3", "multi_node")
    assert all(f"recipes/accelerate/{name}" in text for name in backends)
    assert all(name in text for name in ("_lora_", "_qlora_", "colocate", "vllm_mode server"))


@EACH
def test_batches_add_up(config):
    """Numbers of the header against keys and processes, and prompts against the paper's."""
    recipe = read_recipe(config)
    values = recipe.values
    rows, group = values["per_device_train_batch_size"], values["num_generations"]
    accumulation = values.get("gradient_accumulation_steps", 1)
    steps = values.get("steps_per_generation", accumulation)
    rollout = processes(recipe) * rows * steps
    assert steps % accumulation == 0
    assert rollout % group == 0
    batch = recipe.notes["Batch"]
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", batch.partition(" completions")[0])]
    factors = numbers[:-1] if " = " in batch.partition(" completions")[0] else numbers
    product = 1
    for factor in factors:
        product *= factor
    assert product == rollout
    prompts = re.search(r"= ([\d,]+) prompts x (\d+)", batch)
    assert prompts is not None
    assert (int(prompts[1].replace(",", "")), int(prompts[2])) == (rollout // group, group)
    updates = steps // accumulation
    assert {1: "one update" in batch or "update" not in batch, 2: "two" in batch, 4: "four" in batch}[updates]


def test_papers_settings():
    """The papers' tables, typed in once more."""
    for size in ("1.7b", "4b", "8b"):
        for data, steps, tokens in (("math", (300, 100), 16384), ("code", (200, 50), 8192)):
            for variant in ("grpo", "opd_only", "fixed", "saf"):
                recipe = read_recipe(RECIPES / "configs" / f"qwen3_{size}_{data}_{variant}.yaml")
                values, alone = recipe.values, variant == "opd_only"
                assert (
                    recipe.method == dict(grpo="GRPO", opd_only="OPD only", fixed="fixed fusion", saf="SAF")[variant]
                )
                assert recipe.model == f"Qwen/Qwen3-{size.upper()}"
                assert values["max_steps"] == steps[alone]
                assert (values["max_prompt_tokens"], values["max_completion_length"]) == (2048, tokens)
                assert values["learning_rate"] == 1e-6
                assert (values["temperature"], values["top_p"], values["beta"]) == (1, 1, 0)
                assert values["num_generations"] == (1 if alone else 8)
                rows = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
                assert processes(recipe) * rows // values["num_generations"] == (1024 if alone else 128)
                assert "steps_per_generation" not in values  # one mini-batch per rollout
                if data == "math":
                    assert (values["dataset_name"], values["min_difficulty"]) == ("deepmath", 6)
                else:
                    assert values["dataset_name"] == "eurus_rl_code"
                if variant != "grpo":
                    assert values["teacher_server_model"] == "Qwen/Qwen3-30B-A3B-Instruct-2507"
                if variant == "saf":
                    assert (values["opd_top_k_percent"], values["opd_tanh_coef"]) == (20, 0.1)
                    assert (values["opd_warmup_steps"], values["opd_kl_drop_threshold"]) == (100, 0.2)
                    assert (values["opd_anneal"], values["opd_anneal_min"]) == (True, 0)
    for method, own in (
        ("gspo", {"epsilon": 3e-4, "epsilon_high": 4e-4}),
        ("sapo", {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "max_steps": 1750}),
    ):
        recipe = read_recipe(RECIPES / "configs" / f"qwen3_30b_a3b_{method}.yaml")
        assert recipe.values["steps_per_generation"] == 4 * recipe.values["gradient_accumulation_steps"]
        assert own.items() <= recipe.values.items()


def test_each_ablation_differs_from_saf_in_one_stage():
    saf = read_recipe(RECIPES / "configs" / "qwen3_4b_math_saf.yaml").values
    for name, key, method in (
        ("top_k", "opd_top_k_percent", "top-k"),
        ("tanh", "opd_tanh_coef", "tanh"),
        ("warmup", "opd_warmup_steps", "warm-up"),
        ("anneal", "opd_anneal", "anneal"),
    ):
        recipe = read_recipe(RECIPES / "configs" / f"qwen3_4b_math_saf_no_{name}.yaml")
        assert recipe.method == f"SAF without {method}"
        changed = {option for option in saf if recipe.values.get(option, "absent") != saf[option]}
        # what belongs to the stage has no place without it
        assert changed - {"output_dir", "opd_kl_drop_threshold", "opd_anneal_min"} == {key}


def test_small_recipes_fit_their_gpu(written):
    models = written.sizes()
    assert {recipe.gpu for recipe in written.SMALL} == {8, 12, 16, 24}
    for recipe in written.SMALL:
        setup, sampling = written.small_memory(recipe, models)
        assert setup.fits(recipe.gpu), recipe.name
        assert sampling <= 0.9 * recipe.gpu * 1e9, recipe.name


def test_teacher_example_trains_on_the_recipe_s_task():
    teacher = runpy.run_path(str(ROOT / "examples" / "smollm2_teacher_adapter.py"))["TeacherArguments"]()
    recipe = yaml.safe_load((RECIPES / "configs" / "smollm2_saf_lora_cpu.yaml").read_text())
    for key in ("task_name", "task_config", "system_prompt"):
        assert getattr(teacher, key) == recipe[key]
    assert (teacher.model, teacher.output) == (recipe["model_name_or_path"], recipe["teacher_adapter"])
    # Problem i is drawn from seed + i: the two sets of problems must not meet.
    assert teacher.task_seed > ReasoningGymArguments("chain_sum").task_seed + recipe["train_size"]


# Every kind of recipe starts


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders of tiny models by architecture, each with its tokenizer, a teacher, and an adapter."""
    folder = tmp_path_factory.mktemp("models")
    llama = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    built = {
        "qwen3": lambda: tiny.model(0, hidden=64),
        "qwen3_moe": tiny.moe_model,
        "llama": lambda: transformers.LlamaForCausalLM(llama),
        "teacher": lambda: tiny.model(7, hidden=64),
    }
    for name, build in built.items():
        build().save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    for name in ("qwen3", "llama"):
        adapted: Any = get_peft_model(
            built[name](), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
        adapted.save_pretrained(folder / f"{name}_adapter")
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> Path:
    """Files with the columns of the data sets."""
    folder = tmp_path_factory.mktemp("problems")
    question = "What is {} + 1?"
    code = {"inputs": ["1\n"], "outputs": ["2\n"]}
    rows = {
        "deepmath": [
            {"question": question.format(i), "final_answer": str(i + 1), "difficulty": 6.0} for i in range(32)
        ],
        "gsm8k": [{"question": question.format(i), "answer": f"Add.\n#### {i + 1}"} for i in range(32)],
        "eurus_rl_code": [
            {
                "prompt": [{"role": "user", "content": question.format(i)}],
                "ability": "code",
                "reward_model": {"ground_truth": json.dumps(code), "style": "rule"},
            }
            for i in range(32)
        ],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def kind(config: Path) -> tuple[Any, ...]:
    """What makes a start different from that of another file."""
    recipe = read_recipe(config)
    data = recipe.values.get("dataset_name", recipe.values.get("task_name"))
    return (recipe.script, recipe.method, recipe.training, recipe.teacher, data, architecture(recipe))


def architecture(recipe: Recipe) -> str:
    if "smollm2" in recipe.model:
        return "llama"
    return "qwen3_moe" if "A3B" in recipe.model else "qwen3"


KINDS = {kind(config): config for config in CONFIGS}
# one of each kind; the others, which differ in numbers, among the slow tests
STARTED = [
    pytest.param(config, marks=[] if config in KINDS.values() else [pytest.mark.slow], id=config.stem)
    for config in CONFIGS
]


@pytest.mark.filterwarnings("ignore:Programs that the model wrote run without a sandbox")
@pytest.mark.parametrize("config", STARTED)
def test_it_starts(common, config, models, problems, tmp_path):
    recipe = read_recipe(config)
    values = dict(recipe.values)
    values["model_name_or_path"] = str(models / architecture(recipe))
    if recipe.teacher == "server":
        for key in list(values):
            if key.startswith("teacher_server"):
                del values[key]
        values["teacher_model_name_or_path"] = str(models / "teacher")
    elif recipe.teacher == "adapter":
        values["teacher_adapter"] = str(models / f"{architecture(recipe)}_adapter")
    if recipe.teacher != "none":
        values["teacher_self_test"] = False  # untrained
    if values.get("opd_warmup_steps"):
        values["opd_warmup_steps"] = 1
    if "dataset_name" in values:
        values["reward_workers"] = 1
        values["dataset_path"] = str(problems / f"{values['dataset_name']}.jsonl")
        values.pop("dataset_split", None)
    if values.get("dataset_name") == "eurus_rl_code":
        values["allow_unsandboxed_code"] = True  # the tiny model writes noise
    updates = values.get("steps_per_generation", 1) // values.get("gradient_accumulation_steps", 1)
    if "steps_per_generation" in values:
        values["steps_per_generation"] = updates
    for key in [key for key in values if key.startswith("vllm_")]:
        del values[key]
    group = values["num_generations"]
    values |= dict(use_vllm=False, use_cpu=True, bf16=False, dtype="float32", save_strategy="no", max_steps=1)
    values |= dict(per_device_train_batch_size=max(group, 2), gradient_accumulation_steps=1)
    values |= dict(max_completion_length=4, disable_tqdm=True, output_dir=str(tmp_path / "out"))
    values.pop("save_steps", None)
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(values))
    trainer_class, config_class = SCRIPTS[Path(recipe.script).name]

    trainer = common.train(trainer_class, config_class, args=["--config", str(file)])
    assert trainer.state.global_step == 1
    assert trainer.args.num_generations == group
    log = trainer.state.log_history[0]
    assert all(log[name] == log[name] for name in ("loss", "grad_norm"))  # no NaN
    taught = [name for name in log if name.startswith("distill/")]
    assert bool(taught) == (recipe.teacher != "none")
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert ("adapter_model.safetensors" if recipe.training != "full" else "model.safetensors") in saved
    quantized = any(type(module).__name__ == "Linear4bit" for module in trainer.model.modules())
    assert quantized == (recipe.training == "QLoRA")
    card = (tmp_path / "out" / "README.md").read_text()
    assert trainer._paper["id"] in card


# The command line


def test_scale_rewards_may_be_written_as_a_boolean(common, tmp_path):
    file = tmp_path / "mine.yaml"
    values = yaml.safe_load((RECIPES / "configs" / "smollm2_gspo_lora_cpu.yaml").read_text())
    file.write_text(yaml.safe_dump({**values, "scale_rewards": False, "output_dir": str(tmp_path)}))
    _, training, _ = common.make_parser(GSPOConfig).parse_args_and_config(["--config", str(file)])
    assert training.scale_rewards == "none"
    words = ["--config", str(file), "--scale_rewards", "true"]
    assert common.make_parser(GSPOConfig).parse_args_and_config(words)[1].scale_rewards == "group"


def test_command_line_overrides_the_file(common, tmp_path):
    config = RECIPES / "configs" / "smollm2_saf_lora_cpu.yaml"
    task, training, model = common.make_parser(SAFDistillConfig).parse_args_and_config(
        ["--config", str(config), "--output_dir", str(tmp_path), "--opd_top_k_percent", "50", "--lora_r", "4"]
        + ["--task_name", "spell_backward", "--task_config", '{"max_word_len": 4}', "--policy_objective", "sapo"]
    )
    assert (training.opd_top_k_percent, training.policy_objective, model.lora_r) == (50.0, "sapo", 4)
    assert (task.task_name, task.task_config) == ("spell_backward", {"max_word_len": 4})


@pytest.mark.parametrize(
    "script",
    [
        *(RECIPES / name for name in (*SCRIPTS, "evaluate.py", "write_configs.py")),
        *sorted((ROOT / "examples").glob("smollm2_*.py")),
    ],
    ids=lambda path: path.stem,
)
def test_script_shows_help(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr("sys.argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "usage:" in said
    # launch lines stay as they are, to be copied
    for line in (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines():
        assert not line.startswith("    ") or line in said


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("true", True), ("True", True), (True, True), ("runs/a/checkpoint-3", "runs/a/checkpoint-3")],
)
def test_resume_from_the_newest_checkpoint(common, value, expected):
    assert common.checkpoint_of(value) is expected


def test_configs_are_plain_json_types():
    for config in CONFIGS:
        json.dumps(yaml.safe_load(config.read_text()))
