"""The benchmark scripts run, at a size at which their numbers mean nothing."""

import json
from pathlib import Path

import tiny
from scripts import execute


def test_gpu_check_without_a_gpu_does_nothing(tmp_path: Path) -> None:
    output = execute("benchmarks/gpu_check.py", "--output", str(tmp_path / "out.json"))
    assert "nothing was checked" in output
    assert not list(tmp_path.iterdir())


def test_gpu_check_itself(tmp_path: Path) -> None:
    cases = ["SAF, LoRA, base teaches", "log-probs, fused LM head", "benchmarks/teachers.py"]
    execute("benchmarks/gpu_check.py", "--cpu", "--output", str(tmp_path / "out.json"), "--only", *cases)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(cases, "ok")


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
