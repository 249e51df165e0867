"""The interface between a rollout and whoever scores it."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class TeacherRequest:
    """One generation batch of this process, to be scored by a teacher. Nothing in it may be changed in place.

    Attributes:
        prompt_ids, prompt_mask: (B, P), left-padded.
        completion_ids, completion_mask: (B, T), right-padded; the mask is 0 on padding.
        temperature: of the rollout; logits are divided by it before the softmax.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    temperature: float


class Teacher(Protocol):
    """Anything that gives log pi_T of each completion token."""

    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        """(B, T) float log-probabilities; padding may hold anything, a token without a value holds NaN."""
        ...
