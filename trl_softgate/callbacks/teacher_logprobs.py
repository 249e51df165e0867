"""Attaches the teacher's log-probabilities to each rollout."""

from typing import Any

from transformers import TrainerCallback

from ..teachers.base import Teacher, TeacherRequest


class TeacherLogprobsCallback(TrainerCallback):
    """Asks `teacher` once per generation batch and puts the answer, (B, T), in the rollout as
    `teacher_per_token_logps`, from where `SAFDistillTrainer` takes it in every update that reuses the rollout.

    `SAFDistillTrainer` adds this callback itself when it is given a teacher model. Add it yourself for any other
    source:

        >>> trainer = SAFDistillTrainer(..., callbacks=[TeacherLogprobsCallback(my_scoring_function)])

    Args:
        teacher: callable (TeacherRequest) -> (B, T) log-probabilities; NaN where it has no value.
    """

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

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
        """Called by the trainer after generation and rewards; not asked while the answer cannot matter."""
        if not teacher_needed:
            return
        if "teacher_per_token_logps" in rollout:
            raise ValueError(
                "Two callbacks give `teacher_per_token_logps`: a TeacherLogprobsCallback (SAFDistillTrainer adds one "
                "for a teacher model), and one before it. Keep one."
            )
        rollout["teacher_per_token_logps"] = self.teacher(
            TeacherRequest(
                prompt_ids=rollout["prompt_ids"],
                prompt_mask=rollout["prompt_mask"],
                completion_ids=rollout["completion_ids"],
                completion_mask=rollout["completion_mask"],
                temperature=args.temperature,
            )
        )
