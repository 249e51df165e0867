"""What `trl-softgate env` counts and computes, against real models, DeepSpeed's estimates and sums by hand."""

import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_softgate import __version__, environment
from trl_softgate.environment import (
    BACKENDS,
    METHODS,
    TEACHERS,
    Backend,
    EnvironmentProblem,
    Method,
    ModelSize,
    Setup,
    Teacher,
    devices,
    estimate,
    estimates,
    first_that_fits,
    model_size,
    print_environment,
    print_estimates,
    recipes_for,
    tools,
    versions,
)

GIVEN = ModelSize(
    name="given",
    parameters=1_000_000,
    largest_layer=10_000,
    quantizable=800_000,
    lora=20_000,
    layers=3,
    hidden=64,
    vocabulary=500,
    block_bytes=900,
)
LARGER = ModelSize(**{**vars(GIVEN), "name": "larger", "parameters": 4_000_000, "largest_layer": 30_000})


def config_folder(folder: Path, model: Any) -> str:
    """`config.json` alone, no weights."""
    model.config.save_pretrained(folder)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    return str(folder)


def terms(setup: Setup | None) -> dict[str, float]:
    assert setup is not None
    return {term.name: term.size for term in setup.terms}


def given(
    method: Method = "full", teacher: Teacher = "none", backend: Backend = "DDP", **options: Any
) -> dict[str, float]:
    return terms(estimate(GIVEN, method, teacher, backend, **{"tokens": 100, **options}))


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_counts_are_those_of_the_real_model(kind: str, tmp_path: Path) -> None:
    model: Any = tiny.moe_model() if kind == "moe" else tiny.model(tie=kind == "tied")
    size = model_size(config_folder(tmp_path / "model", model), lora_rank=5)
    assert size.parameters == model.num_parameters() == sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    assert size.largest_layer == max(*blocks, model.lm_head.weight.numel())
    assert (size.layers, size.hidden, size.vocabulary) == (2, 32, 300)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=5, target_modules="all-linear"))
    assert size.lora == adapted.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize("build", [tiny.model, tiny.moe_model])
def test_four_bits_are_what_bitsandbytes_makes_of_the_model(build: Any, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = build()
    model.save_pretrained(tmp_path / "model")
    size = model_size(str(tmp_path / "model"))
    quantized: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    )
    found = [module for module in quantized.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert sum(module.in_features * module.out_features for module in found) == size.quantizable > 0
    weight = found[0].weight
    stored = weight.nbytes + weight.quant_state.absmax.nbytes
    assert stored == environment._FOUR_BIT * found[0].in_features * found[0].out_features


@pytest.mark.parametrize("experts", [0, 2, 4])
def test_a_block_keeps_what_its_backward_needs(experts: int) -> None:
    """The activations that autograd saves in one block, counted as the difference between two blocks and one."""
    tokens, saved = 256, []
    for layers in (1, 2):
        config: Any = (tiny.moe_model() if experts else tiny.model()).config
        changes = dict(num_hidden_layers=layers, hidden_size=128, num_attention_heads=4, head_dim=32)
        changes |= (
            dict(moe_intermediate_size=96, num_experts_per_tok=experts) if experts else dict(intermediate_size=384)
        )
        for name, value in changes.items():
            setattr(config, name, value)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, weights: set[int] = weights, kept: Any = kept) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(torch.arange(tokens)[None])
        saved.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    assert environment._block_bytes(config) * tokens == pytest.approx(saved[1] - saved[0], rel=0.05)


def test_the_arithmetic_by_hand() -> None:
    # one block border has 64 numbers, float32 where autocast finds float32 weights, else bfloat16
    tile, gradient, head = 2 * 100 * 32768, 4 * 100 * 64, 4 * 500 * 64
    assert given() == {
        "weights": 6e6,
        "gradients": 4e6,
        "AdamW": 8e6,
        "activations": 100 * (3 * 64 * 4 + 900),
        "LM head": tile + gradient + head,
    }
    assert given("LoRA", "adapter") == {
        "weights": 2e6 + 6 * 20_000,
        "gradients": 4 * 20_000,
        "AdamW": 8 * 20_000,
        "activations": 100 * (3 * 64 * 2 + 900),
        "LM head": tile + gradient,
        "teacher": 4 * 20_000,
    }
    assert given("QLoRA")["weights"] == 0.5625 * 800_000 + 2 * 200_000 + 6 * 20_000
    assert given(teacher="local")["teacher"] == 2e6
    assert given(teacher="local", local_teacher=LARGER)["teacher"] == 8e6
    assert given(teacher="server")["teacher"] == 0
    # DDP keeps its buckets beside the gradients; 4,096 tokens at a time go through the LM head
    assert given(gpus=2)["gradients"] == 8e6
    assert given(tokens=8192)["LM head"] == 2 * 4096 * 32768 + 4 * 8192 * 64 + head
    setup = estimate(GIVEN, "full", "none", "DDP", tokens=100)
    assert setup is not None
    assert setup.total == sum(given().values())


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_model_states_are_those_of_deepspeed(gpus: int) -> None:
    zero2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2", reason="deepspeed is not installed")
    zero3 = pytest.importorskip("deepspeed.runtime.zero.stage3", reason="deepspeed is not installed")
    _, expected = zero2.estimate_zero2_model_states_mem_needs(1_000_000, gpus, cpu_offload=False)
    found = given(backend="ZeRO-2", gpus=gpus)
    assert found["weights"] + found["gradients"] + found["AdamW"] == expected
    _, expected, _ = zero3.estimate_zero3_model_states_mem_needs(1_000_000, 10_000, gpus, cpu_offload=False)
    found = given(backend="FSDP2/ZeRO-3", gpus=gpus)
    assert found["weights"] + found["gradients"] + found["AdamW"] + found["gathered"] == expected


def test_what_is_sharded_is_divided_by_the_gpus() -> None:
    one, eight = (given(backend="FSDP2/ZeRO-3", teacher="local", gpus=gpus) for gpus in (1, 8))
    for name in ("weights", "gradients", "AdamW"):
        assert eight[name] == one[name] / 8
    assert eight["gathered"] == one["gathered"] == 4 * 10_000
    assert eight["teacher"] == 2e6 / 8 + 4 * 10_000
    for name in ("activations", "LM head"):
        assert eight[name] == one[name]
    second = given(backend="ZeRO-2", teacher="local", gpus=8)
    assert second["weights"] == 2e6 + 4e6 / 8
    assert second["teacher"] == 2e6
    assert given("LoRA", backend="FSDP2/ZeRO-3", gpus=8)["weights"] == 2e6 / 8 + 6 * 20_000 / 8
    four_bits = 0.5625 * 800_000 + 2 * 200_000
    assert given("QLoRA", backend="FSDP2/ZeRO-3", gpus=8)["weights"] == four_bits + 6 * 20_000 / 8


def test_more_tokens_take_more_and_more_gpus_take_less() -> None:
    few, many = (estimates(GIVEN, tokens=tokens, gpus=2) for tokens in (100, 101))
    assert all(a.total < b.total for a, b in zip(few, many, strict=True))
    more = estimates(GIVEN, tokens=100, gpus=4)
    assert all(a.total >= b.total for a, b in zip(few, more, strict=True))
    assert all(a.total > b.total for a, b in zip(few, more, strict=True) if a.backend != "DDP")


def test_every_setup_there_is() -> None:
    setups = estimates(GIVEN, tokens=1)
    assert len(setups) == len({(s.method, s.teacher, s.backend) for s in setups}) == 3 * 4 * 3 - 3
    assert {s.method for s in setups} == {*METHODS}
    assert {s.teacher for s in setups} == {*TEACHERS}
    # an adapter teaches only a student that is an adapter itself
    assert estimate(GIVEN, "full", "adapter", "DDP", tokens=1) is None


def test_the_first_that_fits_communicates_least() -> None:
    setups = estimates(GIVEN, tokens=100, gpus=8)
    full = {s.backend: s for s in setups if (s.method, s.teacher) == ("full", "none")}
    totals = [full[backend].total for backend in BACKENDS]
    assert totals == sorted(totals, reverse=True)
    for backend in BACKENDS:
        # a tenth stays free
        best = first_that_fits(setups, full[backend].total / 0.9 / 1e9 * 1.001)
        assert best["full", "none"].backend == backend
    assert first_that_fits(setups, 1e-6) == {}
    assert not full["DDP"].fits(full["DDP"].total / 1e9)


def test_configurations_exist() -> None:
    root = Path(__file__).parents[1]
    for gpus in (1, 8):
        for setup in estimates(GIVEN, tokens=1, gpus=gpus):
            assert (root / setup.config).is_file()
    assert (root / "recipes/accelerate/zero3_offload.yaml").is_file()
    found = recipes_for("runs/smollm2/base", root / "recipes" / "configs")
    assert {file.name for file in found} >= {"smollm2_saf_lora_cpu.yaml"}
    assert recipes_for("nobody/nothing", root / "recipes" / "configs") == []


def test_tile_sizes_are_those_of_trl() -> None:
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    assert environment._TILE_TOKENS == TOKEN_CHUNK_SIZE
    assert environment._TILE_VOCABULARY == _CHUNKED_LOGPROB_CHUNK_SIZE


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="has no config.json"):
        model_size(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    for name in (str(tmp_path), "nobody/nothing"):
        with pytest.raises(EnvironmentProblem, match="neither a folder with the config.json") as refused:
            model_size(name)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="`lora_rank`"):
        model_size(str(tmp_path), lora_rank=0)
    with pytest.raises(ValueError, match="`tokens`"):
        given(tokens=0)
    with pytest.raises(ValueError, match="`gpus`"):
        given(gpus=0)


def test_code_of_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("open('ran', 'w')")
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}')
    with pytest.raises(EnvironmentProblem):
        model_size(str(tmp_path))


def test_the_printed_estimate(tmp_path: Path) -> None:
    size = model_size(config_folder(tmp_path / "model", tiny.model()))
    console = Console(record=True, width=200)
    print_estimates(console, size, gpu_memory=24, gpus=1, tokens=512)
    text = console.export_text()
    for part in ("one GPU", "ZeRO-2", "FSDP2/ZeRO-3", "QLoRA", "--load_in_4bit true", "single_gpu.yaml", "LM head"):
        assert part in text
    assert text.count("arithmetic") == 1
    print_estimates(console, size, gpu_memory=1e-6, gpus=8, tokens=512, explain=True)
    text = console.export_text()
    assert "None fits" in text
    assert "DDP" in text
    assert text.count("arithmetic") == 33


def test_versions_and_devices() -> None:
    found = versions()
    assert found["trl_softgate"] == __version__
    assert found["torch"] == torch.__version__
    assert found["python"] == sys.version.split()[0]
    assert {*found} >= {"deepspeed", "vllm", "bitsandbytes", "peft", "datasets", "accelerate", "trl", "transformers"}
    assert all(device.memory > 1e8 for device in devices())


FAKES = {
    "vllm": "import os; os.kill(os.getpid(), 11)",
    "deepspeed": "import time; time.sleep(60)",
    "bitsandbytes": "raise OSError('libcudart.so: cannot open')",
    "flash_attn": "",
}


def test_libraries_that_crash_hang_or_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, code in FAKES.items():
        (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    crashed, hung, failed, unsupported = tools(time_limit=20)
    assert (crashed.name, crashed.installed, crashed.importable) == ("vLLM", True, False)
    assert crashed.reason == "crashed with signal 11"
    assert (hung.importable, hung.supported, hung.reason) == (False, None, "not done after 20 s")
    assert (failed.importable, failed.supported) == (False, None)
    assert failed.reason == "OSError: libcudart.so: cannot open"
    assert (unsupported.importable, unsupported.supported) == (True, False)
    assert unsupported.reason == "AssertionError: flash attention needs a GPU"
    # none of it in this process
    assert "flash_attn" not in sys.modules


def test_a_library_that_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = environment._Probe("thing", "no_such_module", "pip install thing", "")
    monkeypatch.setattr(environment, "_PROBES", (probe,))
    assert tools() == [environment.Tool("thing", False, None, None, "pip install thing")]
    console = Console(record=True, width=120)
    print_environment(console)
    text = console.export_text()
    assert "pip install thing" in text
    assert __version__ in text
    with pytest.raises(ValueError, match="`time_limit`"):
        tools(0)
