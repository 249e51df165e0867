"""DDP, FSDP2 and DeepSpeed ZeRO-1/2/3 in two processes over gloo give what one process gives.

The ranks write their results to files; exit codes say nothing, as gloo sometimes aborts while a process shuts down.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from distributed import launch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(900)

CASES = [f"{method}-{kind}" for method in ("gspo", "sapo", "saf") for kind in ("full", "lora")]
OTHERS = [*CASES, "adapter-lora", "moe-full"]
RESUMED = ("gspo-full", "sapo-lora", "saf-full")
WRAPPERS = {
    "ddp": ("DistributedType.MULTI_", "DistributedDataParallel"),
    "fsdp2": ("DistributedType.FSDP", "FSDP"),
    "zero1": ("DistributedType.DEEPSPEED", "DeepSpeedEngine"),
    "zero2": ("DistributedType.DEEPSPEED", "DeepSpeedEngine"),
    "zero3": ("DistributedType.DEEPSPEED", "DeepSpeedEngine"),
}
EARLY = ("zero1", "zero2")  # whose checkpoints are ZeRO-3's without the weights
# ZeRO-1 is ZeRO-2 without the partition of gradients
BACKENDS = [pytest.param(name, marks=pytest.mark.slow) if name == "zero1" else name for name in launch.BACKENDS]
MODELS = ("base", "teacher", "adapter", "moe")
SHARDED = ("fsdp2", "zero3")
NOT_COMPARED = ("step_time", "epoch")
NOT_COMPARED += tuple(f"eval_{name}" for name in ("runtime", "samples_per_second", "steps_per_second"))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the models that every run starts from."""
    root = tmp_path_factory.mktemp("distributed")
    for name, seed in (("base", 0), ("teacher", 7)):
        tiny.model(seed).save_pretrained(root / name)
        tiny.tokenizer().save_pretrained(root / name)
    tiny.moe_model().save_pretrained(root / "moe")
    tiny.tokenizer().save_pretrained(root / "moe")
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(root / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(str(root / "adapter"))
    return root


def folder_with_models(folder: Path, root: Path) -> Path:
    folder.mkdir()
    for name in MODELS:
        (folder / name).symlink_to(root / name)
    return folder


class Runs:
    """Result folders of the scenario `both`, each run when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._done: dict[str | None, Path] = {}

    def __call__(self, backend: str | None) -> Path:
        if backend not in self._done:
            folder = folder_with_models(self._root / (backend or "one"), self._root)
            self._done[backend] = folder
            done = launch.run(backend, "both", folder, timeout=600)
            ranks = [folder / f"rank{rank}.json" for rank in range(launch.ranks_of(backend))]
            assert all(path.is_file() for path in ranks), done.stdout[-6000:]
        return self._done[backend]

    def result(self, backend: str | None, rank: int = 0) -> dict[str, Any]:
        return json.loads((self(backend) / f"rank{rank}.json").read_text())


@pytest.fixture(scope="session")
def runs(root: Path) -> Runs:
    return Runs(root)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The saved model or adapter; FSDP2 saves a tied LM head under both of its names."""
    (path,) = [*folder.glob("model.safetensors"), *folder.glob("adapter_model.safetensors")]
    saved = load_file(path)
    head = saved.pop("lm_head.weight", None)
    assert head is None or torch.equal(head, saved["model.embed_tokens.weight"])
    return saved


def assert_same_numbers(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours.keys() == expected.keys()
    for name in expected.keys() - set(NOT_COMPARED):
        if isinstance(expected[name], float):
            # a small difference of two KLs, each right to about 1e-6 of itself
            absolute = 2e-5 if name == "distill/kl_relative_drop" else 2e-6
            assert math.isclose(ours[name], expected[name], rel_tol=1e-5, abs_tol=absolute), name


@pytest.mark.parametrize("backend", BACKENDS)
class TestParity:
    def test_it_is_the_backend_that_was_asked_for(self, backend: str, runs: Runs) -> None:
        whole = sum(parameter.numel() for parameter in tiny.model().parameters())
        for rank in range(2):
            for case in CASES:
                facts = runs.result(backend, rank)["parity"][case]
                assert facts["world_size"] == 2
                kind, wrapper = WRAPPERS[backend]
                assert facts["type"].startswith(kind) and wrapper in facts["wrapper"]
                if case.endswith("full"):
                    share = facts["local_parameters"] / whole
                    assert share < 0.6 if backend in SHARDED else share == 1
                assert len(facts["teacher_parameters"]) == case.startswith("saf")
                for held in facts["teacher_parameters"]:
                    assert held < 0.6 * whole if backend in SHARDED else held == whole

    @pytest.mark.parametrize("case", OTHERS)
    def test_weights(self, backend: str, case: str, runs: Runs) -> None:
        one, two = (weights(runs(name) / "parity" / case / "model") for name in (None, backend))
        assert one.keys() == two.keys()
        start = load_file(runs(None) / ("moe" if case == "moe-full" else "base") / "model.safetensors")
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)
        assert any(name not in start or not torch.equal(start[name], weight) for name, weight in one.items())

    @pytest.mark.parametrize("case", OTHERS)
    def test_metrics_and_schedule(self, backend: str, case: str, runs: Runs) -> None:
        one = runs.result(None)["parity"][case]
        for rank in range(2):
            two = runs.result(backend, rank)["parity"][case]
            if rank == 0:
                for ours, expected in zip(two["history"], one["history"], strict=True):
                    assert_same_numbers(ours, expected)
                assert_same_numbers(two["evaluation"], one["evaluation"])
            if one["schedule"] is not None:
                assert case == "adapter-lora" or one["schedule"]["frozen_at"] is not None
                assert two["schedule"]["frozen_at"] == one["schedule"]["frozen_at"]

    def test_rows_of_no_signal_are_left_out_alike(self, backend: str, runs: Runs) -> None:
        """Micro-batches are empty on both ranks at once, with DeepSpeed never; the gradient is that of all rows."""
        left, plain = (weights(runs(backend) / "parity" / case / "model") for case in ("sapo-full", "plain-full"))
        for name, weight in plain.items():
            torch.testing.assert_close(left[name], weight, rtol=1e-5, atol=1e-6)
        counts = [runs.result(backend, rank)["parity"]["sapo-full"]["empty_micro_batches"] for rank in range(2)]
        assert counts[0] == counts[1]
        assert (counts[0] == 0) == backend.startswith("zero")
        history = runs.result(backend)["parity"]["sapo-full"]["history"]
        assert any(0 < entry.get("skipped_rows_share", 0) < 1 for entry in history)

    @pytest.mark.parametrize("case", OTHERS)
    def test_the_record_is_that_of_one_process(self, backend: str, case: str, runs: Runs) -> None:
        """Histograms of all ranks, added up, and the rows of all."""
        one, two = (runs(name) / "parity" / case / "record" for name in (None, backend))
        for name, whole in pd.read_parquet(one / "histograms").groupby("name"):
            histograms = pd.read_parquet(two / "histograms")
            counts = histograms[histograms.name == name].counts
            assert len(counts) == len(whole) > 0
            for ours, expected in zip(counts, whole.counts, strict=True):
                # rounding moves a value over an edge now and then
                assert sum(ours) == sum(expected)
                assert abs(ours - expected).sum() <= 0.1 * sum(expected)
        keys = ["step", "advantage", "length"]
        expected, ours = (
            pd.read_parquet(path / "rows", columns=[*keys, "log_ratio_variance"])
            .sort_values(by=keys)
            .reset_index(drop=True)
            for path in (one, two)
        )
        pd.testing.assert_frame_equal(ours, expected, atol=1e-5)
        if case == "moe-full":
            experts = [
                pd.read_parquet(path / "scalars").query("name.str.startswith('moe/')").sort_values(by=["step", "name"])
                for path in (one, two)
            ]
            assert experts[0].value.max() > 0
            assert experts[1].value.tolist() == pytest.approx(experts[0].value.tolist())

    @pytest.mark.parametrize("case", RESUMED)
    def test_a_resumed_run_is_bitwise_the_whole_one(self, backend: str, case: str, runs: Runs) -> None:
        folder = runs(backend) / "resume"
        whole, resumed = (weights(folder / name / case / "model") for name in ("whole", "resumed"))
        assert whole.keys() == resumed.keys()
        for name, weight in whole.items():
            assert torch.equal(resumed[name], weight), name

    def test_a_rollback_is_that_of_one_process(self, backend: str, runs: Runs) -> None:
        """To the checkpoint of step 2, on all ranks, and on with half the learning rate."""
        one, two = runs(None) / "guarded", runs(backend) / "guarded"
        for rank in range(2):
            assert runs.result(backend, rank)["guarded"] == {"rollbacks": 1, "step": 5, "state": "healthy"}
        for folder in (one, two):
            lines = [json.loads(line) for line in (folder / "record" / "health.jsonl").read_text().splitlines()]
            assert [line["action"] for line in lines if line["action"]] == ["rollback to checkpoint-2"]
        rates = pd.read_parquet(two / "record" / "scalars").query("name == 'learning_rate'").sort_values(by="step")
        assert rates.value.tolist() == pytest.approx([1e-3] * 2 + [5e-4] * 3)
        expected = weights(one / "model")
        for name, weight in weights(two / "model").items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("kind", ["full", "lora"])
    def test_what_is_saved_loads_plainly(self, backend: str, kind: str, runs: Runs) -> None:
        folder = runs(backend) / "parity" / f"saf-{kind}" / "model"
        saved = weights(folder)
        if kind == "full":
            loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        else:
            base = AutoModelForCausalLM.from_pretrained(runs(backend) / "base")
            adapter = PeftModel.from_pretrained(base, str(folder))
            loaded = {name.replace(".default.", "."): value for name, value in adapter.named_parameters()}
        assert saved
        for name, weight in saved.items():
            if name in loaded:
                assert torch.equal(loaded[name], weight), name
        assert len(saved.keys() & loaded.keys()) >= len(saved) - 1  # a tied LM head is saved under one name


@pytest.mark.parametrize("backend", ["ddp", "zero3"])
class TestNoHang:
    def test_ranks_with_unlike_work_finish(self, backend: str, root: Path) -> None:
        folder = folder_with_models(root / f"uneven-{backend}", root) / "run"
        done = launch.run(backend, "uneven", folder, timeout=240)
        for rank in range(2):
            path = folder / f"rank{rank}.json"
            assert path.is_file(), done.stdout[-6000:]
            for name, history in json.loads(path.read_text()).items():
                assert rank == 1 or len(history) == 3, name
                for entry in history:
                    assert all(math.isfinite(value) for value in entry.values() if isinstance(value, float)), name


class TestFailure:
    def test_an_exception_on_one_rank_ends_all_and_is_shown_once(self, root: Path) -> None:
        begin = time.monotonic()
        done = launch.run("ddp", "raises", root / "raises", timeout=120)
        assert done.returncode != 0
        assert done.stdout.count("ZeroDivisionError: the reward of rank 1") == 1, done.stdout[-6000:]
        # with the start of two interpreters on two cores
        assert time.monotonic() - begin < 90

    def test_a_teacher_that_fails_one_rank_stops_all_after_a_checkpoint(self, root: Path) -> None:
        folder = root / "no-answer"
        done = launch.run("ddp", "no_answer", folder, timeout=120)
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        assert len(results) == 2, done.stdout[-6000:]
        first, second = (result["fails"] for result in results)
        assert "failed in 1 other process" in first["error"]
        assert second["error"] == "no answer for rank 1"
        assert (folder / "fails" / f"checkpoint-{first['step']}" / "softgate_complete").is_file()
        # an answer without rows, and one without a value
        first, second = (result["is_empty"] for result in results)
        assert "failed in 1 other process" in first["error"]
        assert "has shape (0, " in second["error"]
        for result in results:
            assert "gave no finite log-probability" in result["knows_nothing"]["error"]


KILLS = {"ddp": "checkpoint", "fsdp2": "step", "zero1": "step", "zero2": "step", "zero3": "checkpoint"}


@pytest.mark.parametrize("backend", [pytest.param(b, marks=pytest.mark.slow) if b in EARLY else b for b in KILLS])
def test_a_killed_run_goes_on_from_the_last_good_checkpoint(backend: str, root: Path, runs: Runs) -> None:
    folder = folder_with_models(root / f"killed-{backend}", root) / KILLS[backend]
    launch.run(backend, "killed", folder, timeout=240)
    assert not list(folder.glob("rank*.json")), "it was not killed"
    second = folder / "run" / "checkpoint-2"
    assert second.is_dir()
    assert (second / "softgate_complete").is_file() == (KILLS[backend] == "step")
    done = launch.run(backend, "killed", folder, timeout=240)
    assert (folder / "rank0.json").is_file(), done.stdout[-6000:]
    whole = weights(runs(backend) / "resume" / "whole" / "saf-full" / "model")
    for name, weight in weights(folder / "model").items():
        assert torch.equal(weight, whole[name]), name
