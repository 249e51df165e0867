"""The local teacher: right numbers, over the right vocabulary, and nothing of it trained."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from teachers.scoring import local_teacher, reference, request
from transformers import AutoModelForCausalLM

from trl_softgate.teachers import LocalTeacher, check_end_of_sequence, check_vocabulary

VOCAB = 300


def teacher(model: Any, vocab_size: int = VOCAB, **kwargs: Any) -> LocalTeacher:
    return local_teacher(model, **{"student_vocab_size": vocab_size, "max_tokens_per_batch": 16, **kwargs})


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("rows_of_teacher", [VOCAB, VOCAB + 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_matches_a_plain_forward(tie: bool, rows_of_teacher: int, temperature: float) -> None:
    asked = request(temperature)
    expected = reference(tiny.model(3, vocab_size=rows_of_teacher, tie=tie), asked, VOCAB)
    scored = teacher(tiny.model(3, vocab_size=rows_of_teacher, tie=tie), temperature=temperature)(asked)
    assert scored.dtype == torch.float32
    torch.testing.assert_close(scored.double(), expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("max_tokens", [1, 20, 30, 1000])
def test_batches_do_not_matter(max_tokens: int) -> None:
    expected = reference(tiny.model(3), request(), VOCAB)
    scored = teacher(tiny.model(3), max_tokens_per_batch=max_tokens)(request())
    torch.testing.assert_close(scored.double(), expected, atol=2e-6, rtol=1e-6)


def test_is_frozen_and_in_eval_mode() -> None:
    model = tiny.model(3).train()
    made = teacher(model)
    assert not made.model.training
    assert not any(parameter.requires_grad for parameter in made.model.parameters())
    made.model.train()  # whoever did this, scoring undoes it
    assert not made(request()).requires_grad
    assert not made.model.training


def test_loads_a_model_folder_an_adapter_folder_and_a_peft_model(tmp_path: Path) -> None:
    base = tiny.model(3)
    base.save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    expected = teacher(tiny.model(3))(request())
    torch.testing.assert_close(teacher(str(tmp_path / "base"), tokenizer=None)(request()), expected)

    torch.manual_seed(0)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(init_lora_weights=False, r=4)
    )
    adapted.save_pretrained(str(tmp_path / "adapter"))
    from_folder = teacher(str(tmp_path / "adapter"))(request())
    assert (from_folder - expected).abs().max() > 1e-3
    torch.testing.assert_close(teacher(adapted)(request()), from_folder, atol=1e-5, rtol=0)


def test_keeps_its_own_dtype(tmp_path: Path) -> None:
    tiny.model(3).bfloat16().save_pretrained(tmp_path)
    assert teacher(str(tmp_path)).model.dtype == torch.bfloat16
    made = teacher(str(tmp_path), model_init_kwargs={"dtype": "float32"})
    assert made.model.dtype == torch.float32
    assert made(request()).dtype == torch.float32


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_and_dtype_by_init_kwargs(attention: str, tmp_path: Path) -> None:
    tiny.model(3).save_pretrained(tmp_path)
    expected = reference(tiny.model(3), request(), VOCAB).float()
    made = teacher(str(tmp_path), model_init_kwargs={"attn_implementation": attention})
    assert made.model.config._attn_implementation == attention
    torch.testing.assert_close(made(request()), expected, atol=2e-6, rtol=1e-6)
    half = teacher(str(tmp_path), model_init_kwargs={"attn_implementation": attention, "dtype": "bfloat16"})
    assert half.model.dtype == torch.bfloat16
    # measured: at most 0.0029 where log-probabilities are about -3.3
    assert 0 < (half(request()) - expected).abs().max() < 0.02


def test_init_kwargs_of_a_loaded_model_are_refused() -> None:
    with pytest.raises(ValueError, match="`teacher_model_init_kwargs` has no effect on a model object"):
        teacher(tiny.model(3), model_init_kwargs={"dtype": "bfloat16"})


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
# measured: mean difference 0.0005 at 8 bit, 0.0089 at 4, of log-probabilities of -3.3 on average; with the adapter as
# without, while merged into the quantized weights it came to 0.0013 and 0.0133
@pytest.mark.parametrize("bits, tolerance", [(8, 0.001), (4, 0.011)])
def test_quantized(bits: int, tolerance: float, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny.model(3, hidden=64).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    torch.manual_seed(0)
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    get_peft_model(tiny.model().from_pretrained(base), config).save_pretrained(str(tmp_path / "adapter"))
    for path in (base, tmp_path / "adapter"):
        full = teacher(str(path))(request())
        made = teacher(str(path), model_init_kwargs={"quantization_config": {f"load_in_{bits}bit": True}})
        quantized = made.model.get_base_model() if isinstance(made.model, PeftModel) else made.model
        assert quantized.is_quantized and not made.model.training
        assert made._device == torch.device("cpu")
        assert not any(parameter.requires_grad for parameter in made.model.parameters())
        difference = (made(request()) - full).abs().mean().item()
        assert 0 < difference < tolerance


def test_a_token_that_nothing_precedes() -> None:
    asked = request()
    alone = replace(asked, prompt_ids=asked.prompt_ids[:, :0], prompt_mask=asked.prompt_mask[:, :0])
    scores = teacher(tiny.model(3))(alone)
    assert torch.isnan(scores[:, 0]).all()
    expected = reference(tiny.model(3), alone, VOCAB)
    torch.testing.assert_close(scores.double(), expected, atol=2e-6, rtol=1e-6, equal_nan=True)


def test_an_adapter_of_the_head_is_merged_or_refused(tmp_path: Path) -> None:
    tiny.model(3, tie=False).save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["lm_head"])
    made = get_peft_model(tiny.model().from_pretrained(tmp_path / "base"), config)
    made.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="adapter changes the LM head, .*: pass `model.merge_and_unload"):
        teacher(made)
    expected = reference(made, request(), VOCAB)
    scores = teacher(str(tmp_path / "adapter"))(request())
    torch.testing.assert_close(scores.double(), expected, atol=2e-6, rtol=1e-6)


def test_the_answer_is_where_the_request_is() -> None:
    """The teacher's device is its own; here `meta` stands for another one."""
    made = teacher(tiny.model(3))
    assert made._device == torch.device("cpu")
    made._device = torch.device("meta")
    places: list[str] = []

    def score(input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places.extend(str(tensor.device) for tensor in (input_ids, attention_mask, labels))
        raise InterruptedError

    made._score = score  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        made(request())
    assert places == ["meta"] * 3


class TestEndOfSequence:
    @pytest.mark.parametrize("declared", [3, [3, 2], None])
    def test_another_end_is_refused(self, declared: Any) -> None:
        model = tiny.model(3)
        model.generation_config.eos_token_id = declared
        other = tiny.tokenizer()
        other.eos_token = "<|im_end|>"
        with pytest.raises(
            ValueError, match=r"ends a completion with '<\|eos\|>' .* the teacher with .*'<\|im_end\|>'"
        ):
            teacher(model, tokenizer=other)

    @pytest.mark.parametrize("declared", [1, [3, 1], [0, 1]])
    def test_one_that_the_generation_config_lists_is_accepted(self, declared: Any) -> None:
        model = tiny.model(3)
        model.generation_config.eos_token_id = declared
        other = tiny.tokenizer()
        other.eos_token = "<|im_end|>"
        teacher(model, tokenizer=other)

    def test_a_teacher_that_names_none_is_accepted(self) -> None:
        check_end_of_sequence(1, [], {})

    def test_an_unknown_id_is_named_as_it_is(self) -> None:
        with pytest.raises(ValueError, match="the teacher with 7:"):
            check_end_of_sequence(1, [7], {1: "<|eos|>"})


def test_loading_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    tiny.model(3).save_pretrained(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    teacher(str(tmp_path))
    assert torch.equal(torch.rand(3), expected)


def test_other_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature 1\.0"):
        teacher(tiny.model(3))(request(temperature=0.5))


def test_one_object_cannot_be_a_teacher_at_two_temperatures() -> None:
    shared = tiny.model(3)
    teacher(shared)
    with pytest.raises(ValueError, match="already a teacher at temperature 1.0"):
        teacher(shared, temperature=0.5)


def test_an_adapter_without_tokenizer_is_compared_by_its_base(tmp_path: Path) -> None:
    tiny.model(3).save_pretrained(tmp_path / "base")
    tiny.tokenizer(swap=(50, 60)).save_pretrained(tmp_path / "base")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(r=4))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="id 50 is"):
        teacher(str(tmp_path / "adapter"), tokenizer=None)


@pytest.mark.parametrize("path", ["nowhere", "runs/nowhere", "runs/deep/nowhere"])
def test_missing_folder_is_said(path: str) -> None:
    with pytest.raises(ValueError, match=f"The teacher '{path}' is neither a folder"):
        teacher(path)


def test_missing_tokenizer_is_said() -> None:
    with pytest.warns(UserWarning, match="teacher_processing_class"):
        teacher(tiny.model(3), tokenizer=None)


class TestVocabulary:
    def test_equal_maps_with_padding_rows_fit(self) -> None:
        vocabulary = tiny.tokenizer().get_vocab()
        check_vocabulary(vocabulary, vocabulary, 300, 320)

    def test_first_differing_token_is_named(self) -> None:
        student, other = tiny.tokenizer(), tiny.tokenizer(swap=(50, 60))
        name = student.convert_ids_to_tokens(50)
        with pytest.raises(ValueError, match="id 50 is") as caught:
            check_vocabulary(student.get_vocab(), other.get_vocab(), 300, 300)
        assert repr(name) in str(caught.value)

    def test_fewer_rows_are_refused(self) -> None:
        vocabulary = tiny.tokenizer().get_vocab()
        with pytest.raises(ValueError, match="280 rows"):
            check_vocabulary(vocabulary, vocabulary, 300, 280)

    def test_a_token_the_student_lacks_is_refused_where_it_could_be_sampled(self) -> None:
        student = tiny.tokenizer().get_vocab()
        inside = {**student, "<|think|>": 270}
        with pytest.raises(ValueError, match="<|think|>"):
            check_vocabulary(student, inside, 300, 320)
        check_vocabulary(student, {**student, "<|think|>": 310}, 300, 320)

    def test_a_missing_token_is_refused(self) -> None:
        student = tiny.tokenizer().get_vocab()
        fewer = {token: i for token, i in student.items() if i != 77}
        with pytest.raises(ValueError, match="id 77 is"):
            check_vocabulary(student, fewer, 300, 300)

    def test_tokens_beyond_the_students_rows_are_not_compared(self) -> None:
        vocabulary = tiny.tokenizer().get_vocab()
        check_vocabulary({**vocabulary, "<|a|>": 305}, {**vocabulary, "<|b|>": 305}, 300, 320)
        check_vocabulary({**vocabulary, "<|a|>": 305}, vocabulary, 300, 300)
        with pytest.raises(ValueError, match="id 295 is"):
            check_vocabulary({**vocabulary, "<|a|>": 295}, {**vocabulary, "<|b|>": 295}, 300, 320)

    def test_refused_at_construction(self) -> None:
        with pytest.raises(ValueError, match="id 50 is"):
            teacher(tiny.model(3), tokenizer=tiny.tokenizer(swap=(50, 60)))
        with pytest.raises(ValueError, match="280 rows"):
            teacher(tiny.model(3, vocab_size=280))
