"""Callbacks that a user can add to a trainer or take off."""

from .teacher_logprobs import TeacherLogprobsCallback

__all__ = ["TeacherLogprobsCallback"]
