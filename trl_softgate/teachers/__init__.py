"""Who answers "log pi_T of these tokens": one small interface, `(TeacherRequest) -> (B, T)`."""

from .adapter import AdapterTeacher
from .base import Teacher, TeacherError, TeacherRequest
from .local import LocalTeacher
from .options import Student, TeacherOptions, build_teacher
from .prompts import PromptedTeacher
from .routing import RoutedTeacher
from .self_test import SelfTestedTeacher, check_teacher
from .server import ServerTeacher
from .vocabulary import check_end_of_sequence, check_vocabulary

__all__ = [
    "AdapterTeacher",
    "LocalTeacher",
    "PromptedTeacher",
    "RoutedTeacher",
    "SelfTestedTeacher",
    "ServerTeacher",
    "Student",
    "Teacher",
    "TeacherError",
    "TeacherOptions",
    "TeacherRequest",
    "build_teacher",
    "check_end_of_sequence",
    "check_teacher",
    "check_vocabulary",
]
