"""Several teachers, one for each kind of task."""

from collections.abc import Callable, Mapping

import torch

from .base import Teacher, TeacherError, TeacherRequest, start


class RoutedTeacher:
    """Asks, for each row, the teacher that a column of the dataset names.

    Args:
        teachers: name -> teacher.
        column: of the dataset; a row whose value is None or "" has no teacher.
    """

    def __init__(self, teachers: Mapping[str, Teacher], column: str) -> None:
        self.teachers = dict(teachers)
        self.column = column
        self.collective = any(getattr(teacher, "collective", False) for teacher in self.teachers.values())

    def names(self, request: TeacherRequest) -> list[str | None]:
        """The teacher of each row.

        Raises:
            ValueError: there is no such column, or it names an unknown teacher.
        """
        if len(request.inputs) != len(request.completion_ids):
            raise ValueError(
                f"Each row's teacher is named in the dataset; `request.inputs` has {len(request.inputs)} rows for "
                f"{len(request.completion_ids)} completions."
            )
        names: list[str | None] = []
        for row in request.inputs:
            if self.column not in row:
                raise ValueError(
                    f"The dataset has no column {self.column!r} with the name of each row's teacher; it has "
                    f"{sorted(row)}. Name the column with `teacher_column`."
                )
            name = row[self.column] or None
            if name is not None and name not in self.teachers:
                raise ValueError(
                    f"The column {self.column!r} names the teacher {name!r}; there are {sorted(self.teachers)}. Leave "
                    "the value empty for a row without teacher."
                )
            names.append(name)
        return names

    def rows_with_teacher(self, request: TeacherRequest) -> torch.Tensor:
        """(B,) bool: rows that name a teacher, and for which that one has an answer."""
        taught = torch.zeros(len(request.inputs), dtype=torch.bool, device=request.completion_ids.device)
        for name, rows in self._rows(request).items():
            answered = getattr(self.teachers[name], "rows_with_teacher", None)
            taught[rows] = True if answered is None or not rows else answered(request.rows(rows)).to(taught)
        return taught

    def _rows(self, request: TeacherRequest) -> dict[str, list[int]]:
        """The rows of each teacher, also of one that has none."""
        rows: dict[str, list[int]] = {name: [] for name in self.teachers}
        for i, name in enumerate(self.names(request)):
            if name is not None:
                rows[name].append(i)
        return rows

    def start(self, request: TeacherRequest) -> Callable[[], torch.Tensor]:
        parts = []
        for name, rows in self._rows(request).items():
            if rows or getattr(self.teachers[name], "collective", False):
                parts.append((name, rows, start(self.teachers[name], request.rows(rows))))

        def finish() -> torch.Tensor:
            scores = torch.full(
                request.completion_ids.shape, float("nan"), dtype=torch.float32, device=request.completion_ids.device
            )
            for name, rows, answer in parts:
                part = answer()
                if part.shape != scores[rows].shape:
                    raise TeacherError(
                        f"The answer of the teacher {name!r} has shape {tuple(part.shape)}; its completions have "
                        f"{tuple(scores[rows].shape)}: give one log-probability per completion token, padding "
                        "included."
                    )
                scores[rows] = part.to(scores)
            return scores

        return finish

    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        """(B, T) float32; NaN in rows without teacher."""
        return self.start(request)()
