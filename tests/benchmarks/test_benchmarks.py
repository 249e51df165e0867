"""The benchmark scripts run, at a size at which their numbers mean nothing."""

import json
from pathlib import Path

import pytest
import tiny
from scripts import execute


def test_gpu_check_without_a_gpu_does_nothing(tmp_path: Path) -> None:
    output = execute("benchmarks/gpu_check.py", "--output", str(tmp_path / "out.json"))
    assert "nothing was checked" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_gpu_check_itself(tmp_path: Path) -> None:
    cases = ["SAF, LoRA, base teaches", "log-probs, fused LM head", "benchmarks/teachers.py"]
    execute("benchmarks/gpu_check.py", "--cpu", "--output", str(tmp_path / "out.json"), "--only", *cases)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(cases, "ok")


@pytest.mark.slow
def test_teachers(tmp_path: Path) -> None:
    tiny.model(vocab_size=300).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    size = ["--rows", "3", "--max_tokens", "8", "--repeat", "1", "--output", str(tmp_path / "out.json")]
    output = execute(
        "benchmarks/teachers.py", "--model", str(tmp_path / "model"), *size, "--cases", "local", "adapter"
    )
    assert "rows/s" in output
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    # an untrained adapter is the base model
    assert abs(results["local"]["mean"] - results["adapter"]["mean"]) < 1e-6


@pytest.mark.slow
def test_step(tmp_path: Path) -> None:
    output = execute("benchmarks/step.py", "--size", "tiny", "--repeat", "1", "--output", str(tmp_path / "out.json"))
    assert "ours / the other's" in output
    written = json.loads((tmp_path / "out.json").read_text())
    assert {"torch", "trl", "transformers", "cpu", "threads", "size", "repeat", "gemm_gflops"} <= set(
        written["environment"]
    )
    cases = {case["case"]: case for case in written["cases"]}
    assert len(cases) == len(written["cases"])
    compared = 0
    for name, case in cases.items():
        assert {"case", "ratio", "bar", "grad_rel_diff"} <= set(case), name
        assert isinstance(case["ratio"], float), name
        if case["grad_rel_diff"] is not None:
            compared += 1
            assert case["grad_rel_diff"] <= 1e-5, name
    assert compared >= 7  # three methods, three rollouts that are cheaper for us, SAF without its teacher
    # nothing of ours is kept beside what stock TRL holds; counted, not measured
    assert cases["equal lengths, SAPO: memory of a step"]["ratio"] < 1.05
