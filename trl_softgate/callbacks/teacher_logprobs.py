"""Attaches the teacher's log-probabilities to each rollout."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from ..teachers.base import Teacher, TeacherRequest, start


class TeacherLogprobsCallback(TrainerCallback):
    """Asks `teacher` once per generation batch and puts the answer, (B, T), in the rollout as
    `teacher_per_token_logps`, from where `SAFDistillTrainer` takes it in every update that reuses the rollout.

    A teacher with `start` is asked as soon as the completions are there, and works while rewards are computed.

    `SAFDistillTrainer` adds this callback itself when it is given a teacher. Add it yourself to do without the
    trainer's options:

        >>> trainer = SAFDistillTrainer(..., callbacks=[TeacherLogprobsCallback(my_scoring_function)])

    Args:
        teacher: callable (TeacherRequest) -> (B, T) log-probabilities; NaN where it has no value. If it has a method
            `rows_with_teacher(request)` -> (B,) bool, the other rows get no distillation term.
    """

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self._finish: Callable[[], torch.Tensor] | None = None
        self._rows: torch.Tensor | None = None

    def on_completions(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        completions: dict[str, torch.Tensor],
        inputs: Sequence[dict[str, Any]],
        teacher_needed: bool = True,
        **kwargs: Any,
    ) -> None:
        """Called by the trainer after generation; not asked while the answer cannot matter."""
        self._finish = self._rows = None
        if not teacher_needed:
            return
        request = TeacherRequest(**completions, temperature=args.temperature, inputs=inputs)
        try:
            self._finish = start(self.teacher, request)
            rows_with_teacher = getattr(self.teacher, "rows_with_teacher", None)
            self._rows = None if rows_with_teacher is None else rows_with_teacher(request)
        except Exception as error:
            if getattr(self.teacher, "collective", False):
                raise  # the other processes wait in the teacher's forward
            # the other processes are on their way into the rewards' collective calls: fail where all of them can
            failure = error

            def fail() -> torch.Tensor:
                raise failure

            self._finish = fail

    def on_rollout(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        rollout: dict[str, Any],
        teacher_needed: bool = True,
        **kwargs: Any,
    ) -> None:
        """Called by the trainer after rewards; takes the answer."""
        if not teacher_needed:
            return
        if "teacher_per_token_logps" in rollout:
            raise ValueError(
                "Two callbacks give `teacher_per_token_logps`: a TeacherLogprobsCallback (SAFDistillTrainer adds one "
                "for its teacher), and one before it. Keep one."
            )
        assert self._finish is not None, "on_completions comes before on_rollout"
        finish, self._finish = self._finish, None
        rollout["teacher_per_token_logps"] = finish()
        if self._rows is not None:
            rollout["teacher_rows"] = self._rows
