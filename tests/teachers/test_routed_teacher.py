"""Several teachers: each row goes to its own, and to no other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from teachers.scoring import local_teacher, request

from trl_softgate.teachers import RoutedTeacher, TeacherError, TeacherRequest
from trl_softgate.teachers.base import start


def asked(names: list[Any]) -> TeacherRequest:
    return replace(request(rows=len(names)), inputs=[{"prompt": i, "teacher": name} for i, name in enumerate(names)])


class Recording:
    def __init__(self, value: float) -> None:
        self.value = value
        self.requests: list[TeacherRequest] = []

    def __call__(self, asked: TeacherRequest) -> torch.Tensor:
        self.requests.append(asked)
        return self.value + asked.completion_ids.double()


class Remote(Recording):
    """One that is asked in the background."""

    def __init__(self, value: float, order: list[str], name: str) -> None:
        super().__init__(value)
        self.order, self.name = order, name

    def start(self, asked: TeacherRequest) -> Callable[[], torch.Tensor]:
        self.order.append(f"start {self.name}")

        def finish() -> torch.Tensor:
            self.order.append(f"finish {self.name}")
            return self(asked)

        return finish


def test_kinds_are_mixed_and_rows_without_a_name_left_out() -> None:
    local = local_teacher(tiny.model(3))
    remote, plain = Remote(1000, [], "remote"), Recording(2000)
    teacher = RoutedTeacher({"model": local, "remote": remote, "plain": plain}, "teacher")
    made = asked(["plain", "model", None, "remote", "model"])
    scores = teacher(made)
    assert scores.dtype == torch.float32 and scores.shape == made.completion_ids.shape
    torch.testing.assert_close(scores[[1, 4]], local(made)[[1, 4]], atol=2e-6, rtol=1e-6)
    assert torch.equal(scores[0], 2000 + made.completion_ids[0].float())
    assert torch.equal(scores[3], 1000 + made.completion_ids[3].float())
    assert torch.isnan(scores[2]).all() and not torch.isnan(scores[[0, 1, 3, 4]]).any()
    assert teacher.rows_with_teacher(made).tolist() == [True, True, False, True, True]
    (seen,) = remote.requests
    assert [row["prompt"] for row in seen.inputs] == [3]
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        assert torch.equal(getattr(seen, name), getattr(made, name)[[3]])


def test_one_without_rows_is_not_asked() -> None:
    idle, busy = Recording(1), Recording(2)
    teacher = RoutedTeacher({"idle": idle, "busy": busy}, "teacher")
    teacher(asked(["busy", "", "busy"]))
    assert idle.requests == [] and len(busy.requests) == 1


@pytest.mark.parametrize("empty", [None, ""])
def test_nobody_is_asked_where_no_row_names_a_teacher(empty: str | None) -> None:
    idle = Recording(1)
    teacher = RoutedTeacher({"idle": idle}, "teacher")
    made = asked([empty] * 3)
    assert torch.isnan(teacher(made)).all() and idle.requests == []
    assert teacher.rows_with_teacher(made).tolist() == [False] * 3
    assert teacher.rows_with_teacher(made).dtype == torch.bool


def test_all_are_started_before_any_is_awaited() -> None:
    order: list[str] = []
    teacher = RoutedTeacher({name: Remote(0, order, name) for name in "abc"}, "teacher")
    finish = start(teacher, asked(["c", "a", "b", "a"]))
    assert order == ["start a", "start b", "start c"]
    finish()
    assert order[3:] == ["finish a", "finish b", "finish c"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'teacher' names the teacher 'maths'; there are \['code', 'math'\]. Leave"):
        RoutedTeacher({"math": Recording(0), "code": Recording(0)}, "teacher")(asked(["math", "maths"]))


def test_a_missing_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no column 'kind' .* it has \['prompt', 'teacher'\]. .* `teacher_column`"):
        RoutedTeacher({"math": Recording(0)}, "kind")(asked(["math"]))
    with pytest.raises(ValueError, match="`request.inputs` has 0 rows for 5 completions"):
        RoutedTeacher({"math": Recording(0)}, "teacher")(request())


def test_an_answer_of_another_shape_is_told_by_name() -> None:
    def short(asked: TeacherRequest) -> torch.Tensor:
        return torch.zeros(len(asked.completion_ids), 1)

    with pytest.raises(TeacherError, match=r"the teacher 'math' has shape \(2, 1\); its completions have \(2, 7\)"):
        RoutedTeacher({"math": short}, "teacher")(asked(["math", None, "math"]))


def test_a_teacher_may_leave_out_rows_of_its_own() -> None:
    class Some(Recording):
        def rows_with_teacher(self, asked: TeacherRequest) -> torch.Tensor:
            return torch.tensor([row["prompt"] > 1 for row in asked.inputs])

    teacher = RoutedTeacher({"some": Some(0), "all": Recording(0)}, "teacher")
    made = asked(["all", "some", "some", None, "some"])
    assert teacher.rows_with_teacher(made).tolist() == [True, False, True, False, True]
