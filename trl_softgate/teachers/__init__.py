"""Who answers "log pi_T of these tokens": one small interface, `(TeacherRequest) -> (B, T)`."""

from .base import Teacher, TeacherRequest
from .local import LocalTeacher
from .vocabulary import check_vocabulary

__all__ = ["LocalTeacher", "Teacher", "TeacherRequest", "check_vocabulary"]
