"""Recipes with a vLLM in their own process, on the CPU: it evaluates as transformers does, it samples from the policy.

`make test-server` runs these; they need the path of a `vllm` executable in TRL_SOFTGATE_VLLM, in an environment that
also has what recipes need.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scripts import execute
from teachers import vllm_server
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_server.save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a rank that vLLM's own LoRA refuses, and with an effect on most next tokens."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    config = LoraConfig(r=12, target_modules="all-linear", init_lora_weights=False, lora_alpha=48)
    made: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), config)
    made.save_pretrained(folder)
    ids = torch.arange(10, 200)[None]
    with torch.no_grad(), made.disable_adapter():
        without = made(ids).logits.argmax(-1)
    assert (made(ids).logits.argmax(-1) != without).float().mean() > 0.5
    return folder


def with_vllm(*command: str, compiled: bool = False) -> None:
    """Run Python in the environment of vLLM."""
    env = vllm_server.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if compiled:
        del env["TORCHDYNAMO_DISABLE"]
    execute(*command, python=str(Path(env[vllm_server.EXECUTABLE]).with_name("python")), env=env)


def completions(model: Path, folder: Path, *options: str, vllm: bool) -> list[dict[str, Any]]:
    problems = folder / "problems.jsonl"
    problems.write_text("\n".join(json.dumps({"prompt": "What is " + "1+" * n + "1?", "answer": n}) for n in range(6)))
    output = folder / ("vllm" if vllm else "transformers")
    command = ["recipes/evaluate.py", "--model_name_or_path", str(model), "--dataset_name", str(problems)]
    command += ["--max_new_tokens", "24", "--dtype", "float32", "--output_dir", str(output), *options]
    if vllm:
        with_vllm(*command, "--backend", "vllm", "--enforce_eager", "true")
    else:
        execute(*command)
    return [json.loads(line) for line in (output / "completions.jsonl").read_text().splitlines()]


class TestGreedy:
    """Both backends write the same completions, with the same lengths and ends."""

    @pytest.mark.parametrize("which", ["base", "adapter"])
    def test_is_that_of_transformers(self, which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        model = request.getfixturevalue(which)
        ours, theirs = (completions(model, tmp_path, "--temperature", "0", vllm=vllm) for vllm in (True, False))
        assert len(ours) == 6
        assert ours == theirs


def test_samples_differ(base: Path, tmp_path: Path) -> None:
    options = ("--temperature", "1", "--samples", "3", "--train_size", "2", "--pass_k", "1", "3")
    rows = completions(base, tmp_path, *options, vllm=True)
    assert [row["problem"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert len({row["completion"] for row in rows}) == 6


@pytest.mark.skipif(shutil.which("g++") is None, reason="as TRL starts it, vLLM compiles for the CPU, with g++")
def test_sampler_follows_the_policy(base: Path, adapter: Path, tmp_path: Path) -> None:
    """A LoRA student takes large steps towards an adapter teacher; each rollout comes from its weights of that time.

    vLLM computes in bfloat16 here, which is 0.02 away; without the new weights, the second rollout is 0.8 away.
    """
    config = "recipes/configs/smollm2_saf_lora_cpu.yaml"
    command = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "recipes/saf_distill.py"]
    command += ["--config", config, "--model_name_or_path", str(base), "--teacher_adapter", str(adapter)]
    command += ["--teacher_self_test", "false", "--opd_warmup_steps", "0", "--learning_rate", "1e-2"]
    command += ["--max_steps", "4", "--use_vllm", "true", "--vllm_mode", "colocate", "--output_dir", str(tmp_path)]
    with_vllm(*command, compiled=True)
    scalars: Any = pd.read_parquet(tmp_path / "record" / "scalars").pivot(index="step", columns="name", values="value")
    assert len(scalars) == 4
    assert (scalars["sampling/sampling_logp_difference/mean"] < 0.05).all()
    assert (scalars["grad_norm"] > 0).all()
