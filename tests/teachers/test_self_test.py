"""The self-test: a working teacher passes, and each way to be wrong is called by its name."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from teachers.scoring import local_teacher

from trl_softgate.teachers import SelfTestedTeacher, TeacherError, TeacherRequest, check_teacher
from trl_softgate.teachers.base import start

LENGTHS = [9, 1, 40, 0, 2, 17, 12, 30, 25, 3, 8]


def request(lengths: list[int] | None = None, seed: int = 0) -> TeacherRequest:
    """Completions that count upward from the last token of the prompt."""
    lengths = LENGTHS if lengths is None else lengths
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(10, 100, (len(lengths), 1), generator=generator)
    longest = max(max(lengths), 1)
    mask = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None]).long()
    return TeacherRequest(
        first + torch.arange(-2, 1)[None],
        torch.ones(len(lengths), 3, dtype=torch.long),
        (first + 1 + torch.arange(longest)[None]) * mask,
        mask,
        1.0,
        [{"row": i} for i in range(len(lengths))],
    )


def good(asked: TeacherRequest) -> torch.Tensor:
    """Expects each token to be the one before it plus 1."""
    ids = torch.cat([asked.prompt_ids[:, -1:], asked.completion_ids], dim=1)
    return -0.1 - (ids[:, 1:] - ids[:, :-1] - 1).abs().float()


class Counting:
    """Remembers what it was asked."""

    def __init__(self, teacher: Callable[[TeacherRequest], torch.Tensor] = good) -> None:
        self.teacher = teacher
        self.requests: list[TeacherRequest] = []

    def __call__(self, asked: TeacherRequest) -> torch.Tensor:
        self.requests.append(asked)
        return self.teacher(asked)


def flipped(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each row's valid cells in reverse order."""
    lengths = mask.sum(1, keepdim=True)
    places = torch.arange(mask.shape[1])[None]
    return values.gather(1, torch.where(places < lengths, lengths - 1 - places, places))


def scores_reversed_tokens(asked: TeacherRequest) -> torch.Tensor:
    ids = flipped(asked.completion_ids, asked.completion_mask)
    return good(TeacherRequest(asked.prompt_ids, asked.prompt_mask, ids, asked.completion_mask, 1.0))


def left(asked: TeacherRequest) -> torch.Tensor:
    """Position t holds token t + 1; behind the last one, what stands in the padding."""
    ids = torch.cat([asked.completion_ids, torch.zeros_like(asked.completion_ids[:, :1])], dim=1)
    return -0.1 - (ids[:, 1:] - ids[:, :-1] - 1).abs().float()


def right(asked: TeacherRequest) -> torch.Tensor:
    return torch.nn.functional.pad(good(asked), (1, 0), value=-1.0)[:, :-1]


def noisy(scale: float, teacher: Callable[[TeacherRequest], torch.Tensor] = good) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def scored(asked: TeacherRequest) -> torch.Tensor:
        scores = teacher(asked)
        return scores + scale * torch.randn(scores.shape, generator=generator)

    return scored


def holes(asked: TeacherRequest) -> torch.Tensor:
    return good(asked).index_fill(1, torch.tensor([1]), float("nan"))


def looks_ahead(asked: TeacherRequest) -> torch.Tensor:
    total = (asked.completion_ids * asked.completion_mask).sum(1, keepdim=True)
    return good(asked) - (total % 7).float()


WRONG: dict[str, tuple[Any, str]] = {
    "wrong-shape": (lambda asked: good(asked)[:, 1:], "has shape .*; the completions have .*: give one log-prob"),
    "nan": (lambda asked: good(asked) * float("nan"), "are not finite. Try float32"),
    "infinite": (lambda asked: good(asked) * float("inf"), "are not finite. Try float32"),
    "holes": (holes, "are not finite. Try float32"),
    "random": (noisy(1.0), "scored twice differ by .* Is dropout on"),
    "shifted-left": (left, "the log-probability before it, .*: the answer is shifted to the left"),
    "rolled-left": (lambda asked: good(asked).roll(-1, 1), "the answer is shifted to the left"),
    "shifted-right": (right, "leaves its own log-probability .*: the answer is shifted to the right"),
    "shifted-right-by-a-noisy-engine": (noisy(0.005, right), "the answer is shifted to the right"),
    "constant": (lambda asked: torch.full(asked.completion_ids.shape, -1.0), "as if the answer did not depend on"),
    "by-position": (
        lambda asked: -1.0 - torch.arange(asked.completion_ids.shape[1]).repeat(len(asked.completion_ids), 1) / 50,
        "as if the answer did not depend on",
    ),
    "reversed-answer": (lambda asked: flipped(good(asked), asked.completion_mask), "as if .* were in reverse order"),
    "reversed-tokens": (scores_reversed_tokens, "as if .* were in reverse order"),
    "reversed-both-ways": (
        lambda asked: flipped(scores_reversed_tokens(asked), asked.completion_mask),
        "self-test: .*(reverse order|shifted to the left)",
    ),
    "sees-what-follows": (looks_ahead, "or the teacher saw what follows"),
    "other-tokens": (lambda asked: -10 - good(asked), "permuted tokens less likely in only 0 of 8 rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_teacher_is_told_what_is_wrong(name: str) -> None:
    teacher, sentence = WRONG[name]
    with pytest.raises(TeacherError, match=sentence) as caught:
        check_teacher(teacher, request())
    if name != "wrong-shape":
        assert "teacher_self_test=False" in str(caught.value)


@pytest.mark.parametrize("length", [2, 3, 500])
@pytest.mark.parametrize("name", ["shifted-left", "shifted-right", "reversed-answer", "reversed-tokens", "constant"])
def test_at_any_length(name: str, length: int) -> None:
    """An average over a long row would hide what is wrong at one place."""
    with pytest.raises(TeacherError, match="self-test"):
        check_teacher(WRONG[name][0], request([length] * 8))


@pytest.mark.parametrize("lengths", [LENGTHS, [2], [2] * 8, [500] * 3, [3, 1, 1]])
@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_a_good_teacher_passes(lengths: list[int], scale: float) -> None:
    assert check_teacher(noisy(scale), request(lengths))


def test_single_gaps_are_let_through() -> None:
    def gap(asked: TeacherRequest) -> torch.Tensor:
        scores = good(asked)
        scores[0, -1] = float("nan")  # the last token of the longest row
        return scores

    assert check_teacher(gap, request([100] * 8))


def test_a_completion_of_one_token_over_and_over_says_nothing_of_the_order() -> None:
    asked = request([6] * 4)
    same = TeacherRequest(asked.prompt_ids, asked.prompt_mask, torch.full((4, 6), 9), asked.completion_mask, 1.0)
    assert check_teacher(good, same)


def test_a_trained_model_passes_and_one_with_dropout_does_not() -> None:
    model = tiny.model(3, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(40):
        asked = request([12] * 16, seed=step)
        ids = torch.cat([asked.prompt_ids, asked.completion_ids], dim=1)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    teacher = local_teacher(model)
    asked = request([12] * 6, seed=99)
    assert check_teacher(teacher, asked)

    def dropping(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, 0.1)

    model.get_input_embeddings().register_forward_hook(dropping)
    with pytest.raises(TeacherError, match="Is dropout on"):
        check_teacher(teacher, asked)


def test_asks_of_eight_rows_with_two_tokens_or_more() -> None:
    teacher = Counting()
    check_teacher(teacher, request())
    assert len(teacher.requests) == 4
    for asked in teacher.requests:
        assert [row["row"] for row in asked.inputs] == [2, 7, 8, 5, 6, 0, 10, 9]


@pytest.mark.parametrize("lengths", [[1, 1], [0, 0], [1, 0, 1]])
def test_a_request_without_such_rows_is_left_to_the_next(lengths: list[int]) -> None:
    counting = Counting()
    teacher = SelfTestedTeacher(counting)
    assert torch.equal(teacher(request(lengths)), good(request(lengths)))
    assert len(counting.requests) == 1
    teacher(request())
    assert len(counting.requests) == 6


def test_is_done_once() -> None:
    counting = Counting()
    teacher = SelfTestedTeacher(counting)
    for _ in range(3):
        assert torch.equal(teacher(request()), good(request()))
    assert len(counting.requests) == 4 + 3


def test_one_that_failed_is_tested_again() -> None:
    teacher = SelfTestedTeacher(right)
    for _ in range(2):
        with pytest.raises(TeacherError, match="shifted to the right"):
            teacher(request())


def test_leaves_the_request_and_the_random_numbers_alone() -> None:
    asked, untouched = request(), request()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    check_teacher(good, asked)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(asked.completion_ids, untouched.completion_ids)


def test_starts_in_the_background_once_checked() -> None:
    order: list[str] = []

    class Remote(Counting):
        def start(self, asked: TeacherRequest) -> Callable[[], torch.Tensor]:
            order.append("start")
            return lambda: self(asked)

    teacher = SelfTestedTeacher(Remote())
    finish = start(teacher, request())
    assert order == ["start"]
    assert torch.equal(finish(), good(request()))


def test_rows_without_teacher_are_not_checked() -> None:
    class Some(Counting):
        def rows_with_teacher(self, asked: TeacherRequest) -> torch.Tensor:
            return torch.tensor([row["row"] % 2 == 0 for row in asked.inputs])

    teacher = SelfTestedTeacher(Some())
    assert torch.equal(teacher.rows_with_teacher(request()), torch.arange(11) % 2 == 0)  # type: ignore[attr-defined]
    teacher(request())
    asked = teacher.teacher.requests[0]  # type: ignore[attr-defined]
    assert [row["row"] for row in asked.inputs] == [2, 8, 6, 0, 10, 4]
    assert not hasattr(SelfTestedTeacher(Counting()), "rows_with_teacher")
