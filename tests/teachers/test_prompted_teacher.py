"""Another prompt for the teacher: the right ids in front of the student's completion."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from teachers.scoring import local_teacher, request
from tokenizers.processors import TemplateProcessing

from trl_softgate.teachers import PromptedTeacher, TeacherRequest
from trl_softgate.teachers.base import start

BOS = 0
MESSAGES = [{"role": "system", "content": "hint"}, {"role": "user", "content": "ask"}]
RENDERED = "<|im_start|>system\nhint<|im_end|>\n<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\n"


def with_bos(template_writes_it: bool = True) -> Any:
    """A tokenizer that puts a BOS in front of each text, as Llama's does."""
    made = tiny.tokenizer()
    made.bos_token = "<|pad|>"
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", BOS)])
    if template_writes_it:
        made.chat_template = "{{ bos_token }}" + tiny.CHAT_TEMPLATE
    return made


def encoded(text: str) -> list[int]:
    return tiny.tokenizer()(text)["input_ids"]


def asked(prompts: list[Any], column: str = "hinted") -> TeacherRequest:
    made = request(rows=len(prompts))
    return replace(made, inputs=[{"prompt": "p", column: prompt} for prompt in prompts])


class Recording:
    def __init__(self) -> None:
        self.requests: list[TeacherRequest] = []

    def __call__(self, asked: TeacherRequest) -> torch.Tensor:
        self.requests.append(asked)
        return asked.completion_ids.float()

    def prompts(self) -> list[list[int]]:
        (asked,) = self.requests
        return [ids[mask == 1].tolist() for ids, mask in zip(asked.prompt_ids, asked.prompt_mask, strict=True)]


@pytest.mark.parametrize("prompt", ["hinted", lambda row: row["hinted"]], ids=["column", "function"])
def test_strings_and_messages_by_column_and_by_function(prompt: Any) -> None:
    teacher = Recording()
    made = asked(["a", "longer text", MESSAGES])
    scores = PromptedTeacher(teacher, prompt, tiny.tokenizer())(made)
    assert teacher.prompts() == [encoded("a"), encoded("longer text"), encoded(RENDERED)]
    (seen,) = teacher.requests
    # left-padded, and all else as it was
    assert seen.prompt_mask.diff(dim=1).min() >= 0 and seen.prompt_mask[:, -1].all()
    for name in ("completion_ids", "completion_mask", "temperature", "inputs"):
        assert getattr(seen, name) is getattr(made, name)
    assert seen.prompt_ids.dtype == made.prompt_ids.dtype
    assert torch.equal(scores, made.completion_ids.float())


def test_messages_as_a_dataset_gives_them() -> None:
    rows: list[Any] = list(Dataset.from_dict({"hinted": [MESSAGES, MESSAGES[1:]]}))
    made = PromptedTeacher(Recording(), "hinted", tiny.tokenizer())
    assert made.token_ids(rows[0]) == encoded(RENDERED)
    assert made.token_ids(rows[1]) == encoded(RENDERED[RENDERED.index("<|im_start|>user") :])


class TestBos:
    @pytest.mark.parametrize(
        "prompt, text",
        [("ask", "ask"), (MESSAGES, RENDERED), ("<|pad|>" + RENDERED, RENDERED)],
        ids=["string", "messages", "rendered-text"],
    )
    def test_is_written_once(self, prompt: Any, text: str) -> None:
        ids = PromptedTeacher(Recording(), "hinted", with_bos()).token_ids({"hinted": prompt})
        assert ids == [BOS, *encoded(text)]

    def test_is_up_to_the_template(self) -> None:
        ids = PromptedTeacher(Recording(), "hinted", with_bos(False)).token_ids({"hinted": MESSAGES})
        assert ids == encoded(RENDERED)


def test_the_teachers_own_template_and_its_variables() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}{% if add_generation_prompt %}:{% endif %}"
    )
    made = PromptedTeacher(Recording(), "hinted", tokenizer, {"mood": "!"})
    assert made.token_ids({"hinted": MESSAGES}) == encoded("[hint][ask]!:")
    assert PromptedTeacher(Recording(), "hinted", tokenizer).token_ids({"hinted": MESSAGES}) == encoded("[hint][ask]:")


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"prompt": "p", "other": 1}, r"no column 'hinted' with the teacher's prompt; it has \['other', 'prompt'\]"),
        ({"hinted": ""}, "prompt is empty: give it at least one token"),
        ({"hinted": []}, "prompt is empty: give it at least one token"),
        ({"hinted": None}, "must be a string or a list of messages, got None"),
        ({"hinted": 5}, "must be a string or a list of messages, got 5"),
        ({"hinted": ["a", "b"]}, "must be a string or a list of messages"),
        ({"hinted": {"role": "user", "content": "a"}}, "must be a string or a list of messages"),
    ],
)
def test_what_is_no_prompt_is_refused(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PromptedTeacher(Recording(), "hinted", tiny.tokenizer()).token_ids(row)


def test_a_request_without_rows_of_the_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="`request.inputs` has 0 for 5 completions"):
        PromptedTeacher(Recording(), "hinted", tiny.tokenizer())(request())


def test_scores_are_those_of_a_request_with_that_prompt() -> None:
    teacher = local_teacher(tiny.model(3))
    prompts = ["a", "a longer prompt", "mid", MESSAGES, "zz"]
    scores = PromptedTeacher(teacher, "hinted", tiny.tokenizer())(asked(prompts))
    assert (scores - teacher(request())).abs().max() > 0.1
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([encoded(prompt if isinstance(prompt, str) else RENDERED)])
        alone = replace(request().rows([i]), prompt_ids=ids, prompt_mask=torch.ones_like(ids))
        torch.testing.assert_close(scores[i : i + 1], teacher(alone), atol=2e-6, rtol=1e-6)


def test_the_teacher_is_started_in_the_background() -> None:
    class Remote(Recording):
        def start(self, asked: TeacherRequest) -> Callable[[], torch.Tensor]:
            self.requests.append(asked)
            return lambda: torch.zeros(asked.completion_ids.shape)

    teacher = Remote()
    finish = start(PromptedTeacher(teacher, "hinted", tiny.tokenizer()), asked(["a"]))
    assert teacher.prompts() == [encoded("a")]
    assert torch.equal(finish(), torch.zeros(1, 7))


def test_which_rows_have_a_teacher_is_passed_on() -> None:
    class Some(Recording):
        def rows_with_teacher(self, asked: TeacherRequest) -> torch.Tensor:
            return torch.tensor([row["hinted"] != "a" for row in asked.inputs])

    made = PromptedTeacher(Some(), "hinted", tiny.tokenizer())
    assert made.rows_with_teacher(asked(["a", "b"])).tolist() == [False, True]  # type: ignore[attr-defined]
    assert not hasattr(PromptedTeacher(Recording(), "hinted", tiny.tokenizer()), "rows_with_teacher")
