"""A teacher's number for a token means something only if both models call the same token by the same id."""

from collections.abc import Collection, Mapping


def check_vocabulary(
    student: Mapping[str, int],
    teacher: Mapping[str, int],
    student_size: int,
    teacher_size: int,
) -> None:
    """Refuse a teacher whose vocabulary cannot score the student's tokens.

    Args:
        student, teacher: token -> id, as `tokenizer.get_vocab()` gives it.
        student_size, teacher_size: rows of the two LM heads; padding rows included.

    Raises:
        ValueError: the maps differ (the first differing token, by the student's ids, is named), or the teacher has
            fewer rows than the student. Tokens beyond the student's rows are not compared: it cannot write them.
    """
    if dict(student) != dict(teacher):
        by_id = {i: token for token, i in teacher.items()}
        for token, i in sorted(student.items(), key=lambda item: item[1]):
            if teacher.get(token) != i and i < student_size:
                raise ValueError(
                    f"The teacher's vocabulary differs from the student's: id {i} is {token!r} for the student and "
                    f"{by_id.get(i)!r} for the teacher. Use a teacher of the same tokenizer family."
                )
        # every student token agrees: what the teacher adds only matters where the student could sample its id
        taken = set(student.values())
        for token, i in sorted(teacher.items(), key=lambda item: item[1]):
            if token not in student and i < student_size and i not in taken:
                raise ValueError(
                    f"The teacher's vocabulary differs from the student's: id {i} is {token!r} for the teacher and no "
                    "token for the student. Use a teacher of the same tokenizer family."
                )
    if teacher_size < student_size:
        raise ValueError(
            f"The teacher's LM head has {teacher_size} rows, the student's has {student_size}: the teacher cannot "
            "score every token that the student may write. Use a teacher with at least as many rows."
        )


def check_end_of_sequence(student_eos: int, teacher_eos: Collection[int], names: Mapping[int, str]) -> None:
    """Refuse a teacher that ends a sequence with another token than the student.

    Such a teacher takes every end of the student's completions for a mistake.

    Args:
        student_eos: id of the student tokenizer's eos token.
        teacher_eos: ids that end a sequence for the teacher: its tokenizer's and its generation config's.
        names: id -> token.

    Raises:
        ValueError: `student_eos` is not in `teacher_eos`, which is not empty.
    """
    if teacher_eos and student_eos not in teacher_eos:
        others = " or ".join(repr(names.get(i, i)) for i in sorted(teacher_eos))
        raise ValueError(
            f"The student ends a completion with {names.get(student_eos, student_eos)!r} (its `eos_token`), the "
            f"teacher with {others}: the teacher would take every end for a mistake. Set the `eos_token` of the "
            "student's tokenizer to the teacher's, or use a teacher of the same chat format."
        )
