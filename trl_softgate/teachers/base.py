"""The interface between a rollout and whoever scores it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch


class TeacherError(RuntimeError):
    """A teacher gave no answer, or one that cannot be right."""


@dataclass(frozen=True)
class TeacherRequest:
    """One generation batch of this process, to be scored by a teacher. Nothing in it may be changed in place.

    Attributes:
        prompt_ids, prompt_mask: (B, P), left-padded.
        completion_ids, completion_mask: (B, T), right-padded; the mask is 0 on padding, and on whole rows that are
            left out of the loss.
        temperature: of the rollout; logits are divided by it before the softmax.
        inputs: the B rows of the dataset, all columns.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    temperature: float
    inputs: Sequence[Mapping[str, Any]] = ()

    def rows(self, indices: Sequence[int]) -> "TeacherRequest":
        """The request for some of the rows, in the given order."""
        index = torch.tensor(indices, dtype=torch.long, device=self.prompt_ids.device)
        return replace(
            self,
            prompt_ids=self.prompt_ids[index],
            prompt_mask=self.prompt_mask[index],
            completion_ids=self.completion_ids[index],
            completion_mask=self.completion_mask[index],
            inputs=[self.inputs[i] for i in indices] if self.inputs else (),
        )


class Teacher(Protocol):
    """Anything that gives log pi_T of each completion token.

    A teacher that scores elsewhere may also define `start(request)`, which returns at once with a function that waits
    for the answer: reward functions then run in the meantime.
    """

    def __call__(self, request: TeacherRequest, /) -> torch.Tensor:
        """(B, T) float log-probabilities; padding may hold anything, a token without a value holds NaN."""
        ...


def forward_traits(teacher: Teacher, wrapper: Any) -> None:
    """Let `wrapper` say what `teacher` says of itself: which rows have a teacher (see `TeacherLogprobsCallback`), and
    whether every process must ask it equally often (`collective`)."""
    wrapper.collective = getattr(teacher, "collective", False)
    rows_with_teacher = getattr(teacher, "rows_with_teacher", None)
    if rows_with_teacher is not None:
        wrapper.rows_with_teacher = rows_with_teacher


def start(teacher: Teacher, request: TeacherRequest) -> Callable[[], torch.Tensor]:
    """Begin scoring where the teacher can do so in the background; the returned function gives (B, T)."""
    begin = getattr(teacher, "start", None)
    return functools.partial(teacher, request) if begin is None else begin(request)
