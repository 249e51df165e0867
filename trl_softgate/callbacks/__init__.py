"""Callbacks that a user can add to a trainer or take off."""

from .collapse_guard import CollapseGuard
from .recorder import RunRecorder
from .teacher_logprobs import TeacherLogprobsCallback
from .weight_drift import WeightDriftCallback

__all__ = ["CollapseGuard", "RunRecorder", "TeacherLogprobsCallback", "WeightDriftCallback"]
