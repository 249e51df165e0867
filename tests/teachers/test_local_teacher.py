"""The local teacher: right numbers, over the right vocabulary, and nothing of it trained."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trl_softgate.teachers import LocalTeacher, TeacherRequest, check_vocabulary

VOCAB = 300


def request(temperature: float = 1.0, rows: int = 5, seed: int = 0) -> TeacherRequest:
    """Ragged prompts (left-padded) and completions (right-padded), one of length 1 and one of the maximum."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths, completion_lengths = [1, 3, 6, 2, 5], [1, 7, 4, 2, 6]
    ids = torch.randint(4, 260, (rows, 13), generator=generator)
    prompt_mask = torch.tensor([[int(6 - n <= i) for i in range(6)] for n in prompt_lengths[:rows]])
    completion_mask = torch.tensor([[int(i < n) for i in range(7)] for n in completion_lengths[:rows]])
    return TeacherRequest(
        ids[:, :6] * prompt_mask, prompt_mask, ids[:, 6:] * completion_mask, completion_mask, temperature
    )


def teacher(model: Any, vocab_size: int = VOCAB, **kwargs: Any) -> LocalTeacher:
    defaults: dict[str, Any] = dict(
        temperature=1.0,
        student_vocabulary=tiny.tokenizer().get_vocab(),
        student_vocab_size=vocab_size,
        tokenizer=tiny.tokenizer(),
        batch_size=2,
        device=torch.device("cpu"),
    )
    return LocalTeacher(model, **{**defaults, **kwargs})


def reference(model: Any, request: TeacherRequest, vocab_size: int) -> torch.Tensor:
    """Full logits in float64, row by row without padding, softmax over the student's rows."""
    model = model.double()
    scores = torch.zeros(request.completion_ids.shape, dtype=torch.float64)
    for i in range(scores.shape[0]):
        prompt = request.prompt_ids[i][request.prompt_mask[i] == 1]
        completion = request.completion_ids[i][request.completion_mask[i] == 1]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, :, :vocab_size]
        logps = torch.log_softmax(logits / request.temperature, dim=-1)
        for t, token in enumerate(completion):
            scores[i, t] = logps[len(prompt) + t - 1, token]
    return scores


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("rows_of_teacher", [VOCAB, VOCAB + 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_matches_a_plain_forward(tie: bool, rows_of_teacher: int, temperature: float) -> None:
    asked = request(temperature)
    expected = reference(tiny.model(3, vocab_size=rows_of_teacher, tie=tie), asked, VOCAB)
    scored = teacher(tiny.model(3, vocab_size=rows_of_teacher, tie=tie), temperature=temperature)(asked)
    assert scored.dtype == torch.float32
    torch.testing.assert_close(scored.double(), expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_chunks_do_not_matter(batch_size: int) -> None:
    whole = teacher(tiny.model(3), batch_size=5)(request())
    torch.testing.assert_close(teacher(tiny.model(3), batch_size=batch_size)(request()), whole, atol=1e-6, rtol=0)


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

    def test_refused_at_construction(self) -> None:
        with pytest.raises(ValueError, match="id 50 is"):
            teacher(tiny.model(3), tokenizer=tiny.tokenizer(swap=(50, 60)))
        with pytest.raises(ValueError, match="280 rows"):
            teacher(tiny.model(3, vocab_size=280))
