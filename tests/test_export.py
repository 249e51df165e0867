"""A merged adapter computes what base and adapter compute, and a model card says how the model came about."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer
from trl_softgate.cli import main
from trl_softgate.export import ExportError, complete_card, merge_adapter, settings

LORA: dict[str, Any] = dict(r=4, target_modules="all-linear", init_lora_weights=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.model(hidden=64).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def adapter_of(base: Path, folder: Path, **options: Any) -> Any:
    """Save an adapter that changes the model, and return both."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **options)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(**LORA))
    adapted.save_pretrained(str(folder))
    return adapted.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(4, 40).unsqueeze(0)).logits


def test_merged_model_computes_the_same(base, tmp_path):
    adapted = adapter_of(base, tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not isinstance(merged, PeftModel)
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logits(merged) - logits(plain)).abs().max() > 0.01
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert "model.safetensors" in names and not any(name.endswith((".bin", ".pt")) for name in names)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE


def test_base_of_a_qlora_student_is_not_quantized(base, tmp_path):
    pytest.importorskip("bitsandbytes")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    adapted = adapter_of(base, tmp_path / "adapter", quantization_config=four_bits)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert getattr(merged.config, "quantization_config", None) is None
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    exact = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(merged), logits(exact), atol=1e-5, rtol=1e-5)
    assert (logits(merged) - logits(adapted)).abs().max() > 1e-3  # what four bits cost


def test_dtype_tokenizer_and_card_of_the_adapter_go_along(base, tmp_path):
    adapter_of(base, tmp_path / "adapter")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").write_text("how it came about")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="bfloat16")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tokenizer.chat_template
    assert (tmp_path / "merged" / "README.md").read_text() == "how it came about"


def test_a_moved_base_is_named(base, tmp_path, capsys):
    adapter_of(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "runs/no/base"}))
    arguments = ["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]
    capsys.readouterr()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "The base model runs/no/base of" in error and "--base" in error and error.count("\n") == 1
    assert not (tmp_path / "merged").exists()
    assert main([*arguments, "--base", str(base)]) == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_refuses_what_is_no_adapter(base, tmp_path):
    with pytest.raises(ExportError, match="is no folder of an adapter"):
        merge_adapter(base, tmp_path / "merged")
    adapter_of(base, tmp_path / "adapter")
    with pytest.raises(ExportError, match="holds something already"):
        merge_adapter(tmp_path / "adapter", base)
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="int8")


CARDS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "gspo": (GSPOTrainer, GSPOConfig, {"epsilon": 2e-4}, "zheng2025gspo"),
    "sapo": (SAPOTrainer, SAPOConfig, {"sapo_temperature_neg": 1.2}, "gao2025sapo"),
    "saf": (SAFDistillTrainer, SAFDistillConfig, {"opd_tanh_coef": 0.3, "opd_warmup_steps": 0}, "safopd2026"),
}


@pytest.mark.parametrize("method", CARDS)
def test_card_holds_method_settings_and_citation(method, tmp_path):
    trainer_class, config_class, options, key = CARDS[method]
    args = tiny.config(config_class, tmp_path, **options)
    teacher = tiny.teacher() if method == "saf" else {}
    trainer = trainer_class(
        tiny.model(),
        reward_funcs=tiny.reward,
        args=args,
        train_dataset=tiny.dataset(),
        processing_class=tiny.tokenizer(),
        **teacher,
    )
    trainer.create_model_card(dataset_name="openai/gsm8k")
    file = tmp_path / "README.md"
    text = file.read_text()
    complete_card(trainer)
    assert file.read_text() == text
    card = ModelCard.load(file)
    assert {"trl", "trl-softgate"} <= set(card.data.to_dict()["tags"])
    assert trainer._paper["id"] in text and f"{{{key}," in text and "https://huggingface.co/None" not in text
    listed = yaml.safe_load(text.split("### Settings")[1].split("```yaml\n")[1].split("```")[0])
    assert options.items() <= listed.items()
    assert listed["learning_rate"] == 1e-3
    assert str(tmp_path) not in text and "None" not in text.partition("### Settings")[0]


def test_settings_hold_no_secrets_and_no_places(tmp_path):
    args = tiny.config(
        SAFDistillConfig,
        tmp_path,
        hub_token="secret",
        run_name="mine",
        opd_warmup_steps=1,
        teacher_server_url=["http://localhost:1"],
        teacher_server_api_key_env="KEY",
        teacher_tokenizer_name_or_path=str(tmp_path / "tokenizer"),
    )
    found = settings(args)
    assert not {"hub_token", "run_name", "output_dir", "teacher_server_api_key_env"} & found.keys()
    assert found["opd_top_k_percent"] == 20.0  # a default, but the method's own
    assert found["teacher_tokenizer_name_or_path"] == "tokenizer"
    assert "secret" not in json.dumps(found) and str(tmp_path) not in json.dumps(found)
    assert "sapo_temperature_pos" not in found  # of no effect with policy_objective grpo
