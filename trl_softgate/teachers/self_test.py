"""Asks a teacher what only a working one answers right, before its numbers move the student."""

from collections.abc import Callable
from dataclasses import replace

import torch

from .base import Teacher, TeacherError, TeacherRequest, forward_traits, start

ROWS = 8
QUESTIONS = 4
# Two answers to the same question, mean absolute difference in nats: rounding of an engine that batches differently
# each time stays below this (bfloat16: up to 0.04 between engines, far less within one), dropout does not.
DETERMINISM_TOLERANCE = 0.02
# The same at a single token of each row, where rounding has fewer tokens to cancel out over; another token moves its
# own log-probability by nats.
TOKEN_TOLERANCE = 0.1
_OFF = "`teacher_self_test=False` goes on all the same."


class SelfTestedTeacher:
    """A teacher whose first request is preceded by `check_teacher`; the first that has rows to check."""

    collective: bool

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        forward_traits(teacher, self)
        self._checked = False

    def start(self, request: TeacherRequest) -> Callable[[], torch.Tensor]:
        if not self._checked:
            self._checked = check_teacher(self.teacher, request)
            if self.collective and not self._checked:
                # a process that has no rows for this teacher takes part in the test of the others
                for _ in range(QUESTIONS):
                    self.teacher(request.rows([]))
                self._checked = True
        return start(self.teacher, request)

    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        return self.start(request)()


def check_teacher(teacher: Teacher, request: TeacherRequest) -> bool:
    """Score up to `ROWS` rows of `request` twice, once with another last token, and once with permuted tokens.

    Returns:
        Whether there was a row to ask for: one that has a teacher and two tokens or more.

    Raises:
        TeacherError: an answer of another shape; values that are not finite; two answers that differ by more than
            `DETERMINISM_TOLERANCE`; the same answer whatever the tokens; a last token that moves the
            log-probabilities before it, or not its own; or log-probabilities that do not fall for most rows when the
            tokens are permuted.
    """
    rows_with_teacher = getattr(teacher, "rows_with_teacher", None)
    lengths = request.completion_mask.sum(1)
    if rows_with_teacher is not None:
        lengths = lengths * rows_with_teacher(request).to(lengths.device)
    lengths = lengths.tolist()
    rows = sorted((i for i, n in enumerate(lengths) if n > 1), key=lambda i: -lengths[i])[:ROWS]
    if not rows:
        return False
    some = request.rows(rows)
    mask = some.completion_mask.bool()
    first, second = _score(teacher, some), _score(teacher, some)
    finite = torch.isfinite(first) & torch.isfinite(second) & mask
    # single gaps are the business of whoever uses the values
    if finite.sum() < 0.99 * mask.sum():
        raise TeacherError(
            f"The teacher's self-test: {int(mask.sum() - finite.sum())} of {int(mask.sum())} log-probabilities are "
            f"not finite. Try float32, or a teacher that is not quantized. {_OFF}"
        )
    difference = _mean_difference(first, second, finite)
    if difference > DETERMINISM_TOLERANCE:
        raise TeacherError(
            f"The teacher's self-test: the same rows scored twice differ by {difference:.3g} nats per token (at most "
            f"{DETERMINISM_TOLERANCE}). Is dropout on, or does the teacher sample? {_OFF}"
        )
    ids = some.completion_ids
    order = _permuted(ids, mask)
    permuted = _score(teacher, replace(some, completion_ids=order))
    finite &= torch.isfinite(permuted)
    last = mask.sum(1, keepdim=True) - 1
    # a neighboring id, so that the token is another one
    other = torch.where(_places(mask) == last, torch.where(ids > 0, ids - 1, ids + 1), ids)
    changed = _score(teacher, replace(some, completion_ids=other))
    finite &= torch.isfinite(changed)
    if max(_mean_difference(first, scores, finite) for scores in (permuted, changed)) <= 2 * difference + 1e-6:
        raise TeacherError(
            "The teacher's self-test: other tokens have the same log-probabilities, as if the answer did not depend "
            f"on the completion. Score `request.completion_ids`. {_OFF}"
        )
    _check_places(torch.where(finite, (changed - first).abs(), 0.0), finite, last)
    # a row of one token over and over is no other when permuted
    told = (order != ids).any(1)
    lower = torch.where(finite, permuted, 0.0).sum(1) < torch.where(finite, first, 0.0).sum(1)
    if told.any() and 2 * (lower & told).sum() <= told.sum():
        raise TeacherError(
            f"The teacher's self-test: it finds completions with permuted tokens less likely in only "
            f"{int((lower & told).sum())} of {int(told.sum())} rows, as if it scored other tokens. If the teacher or "
            "the student is untrained, this says nothing: set `teacher_self_test=False`."
        )
    return True


def _check_places(moved: torch.Tensor, finite: torch.Tensor, last: torch.Tensor) -> None:
    """What another last token has moved, (B, T), must be its own log-probability and none before it."""
    places = _places(moved)
    own = finite.gather(1, last)
    stuck = int((own & (moved.gather(1, last) <= DETERMINISM_TOLERANCE)).sum())
    shifted_right = 2 * stuck >= max(int(own.sum()), 1)
    # apart from the place right before, an average over which would hide a shift by one in long rows
    previous = _mean(moved, finite & (places == last - 1))
    earlier = finite & (places < last - 1)
    # the first place alone too: an answer in reverse order moves nowhere else
    before = max(_mean(moved, earlier), _mean(moved, earlier & (places == 0)))
    expected = f"Position t must hold the log-probability of completion token t. {_OFF}"
    if before > TOKEN_TOLERANCE:
        raise TeacherError(
            f"The teacher's self-test: another last token changes log-probabilities well before it, by {before:.3g} "
            "nats on average, as if the answer or the tokens were in reverse order, or the teacher saw what follows. "
            f"{expected}"
        )
    if previous > TOKEN_TOLERANCE:
        raise TeacherError(
            f"The teacher's self-test: another last token changes the log-probability before it, by {previous:.3g} "
            f"nats on average: the answer is shifted to the left. {expected}"
        )
    if shifted_right:
        raise TeacherError(
            f"The teacher's self-test: another last token leaves its own log-probability as it was in {stuck} of "
            f"{len(own)} rows: the answer is shifted to the right. {expected}"
        )


def _places(mask: torch.Tensor) -> torch.Tensor:
    return torch.arange(mask.shape[1], device=mask.device)[None]


def _mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean of `values` where `mask` is set, 0 where it is nowhere."""
    return (torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)).item()


def _mean_difference(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> float:
    return _mean((one - other).abs(), mask)


def _score(teacher: Teacher, request: TeacherRequest) -> torch.Tensor:
    scores = teacher(request)
    if scores.shape != request.completion_ids.shape:
        raise TeacherError(
            f"The teacher's answer has shape {tuple(scores.shape)}; the completions have "
            f"{tuple(request.completion_ids.shape)}: give one log-probability per completion token, padding included."
        )
    return scores.detach().float().to(request.completion_ids.device)


def _permuted(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, T): the valid tokens of each row in a random order that is the same each time."""
    keys = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)).to(ids.device)
    # padding sorts behind every token and so stays where it is
    return ids.gather(1, keys.masked_fill(~mask, 2.0).argsort(dim=1, stable=True))
