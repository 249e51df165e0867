"""Packing: every row exactly once, within the budget, without padding, and right numbers for whatever lengths."""

from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from teachers.scoring import reference, request

from trl_softgate.teachers import TeacherRequest
from trl_softgate.teachers.packing import pack_rows, score_packed

VOCAB = 300
CPU = torch.device("cpu")
# small, and in float64 both ways: what differs is not rounding
MODEL = tiny.model(3, layers=1).double().eval()
# (tokens of the prompt, tokens of the completion)
LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=7)


def ragged(lengths: list[tuple[int, int]], seed: int = 0) -> TeacherRequest:
    """Padding holds ids of real tokens: only the masks say what counts."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(p for p, _ in lengths), max(c for _, c in lengths)
    ids = torch.randint(4, 260, (len(lengths), sum(longest)), generator=generator)
    prompt_mask = torch.tensor([[int(longest[0] - p <= i) for i in range(longest[0])] for p, _ in lengths])
    completion_mask = torch.tensor([[int(i < c) for i in range(longest[1])] for _, c in lengths])
    return TeacherRequest(
        ids[:, : longest[0]],
        prompt_mask.reshape(len(lengths), longest[0]).long(),
        ids[:, longest[0] :],
        completion_mask.reshape(len(lengths), longest[1]).long(),
        1.0,
    )


class Scorer:
    """Full logits in float64; remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.rows: list[list[int]] = []
        self.scored = 0

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.sizes.append((input_ids.shape[0], input_ids.shape[1]))
        valid = attention_mask.bool()
        assert (valid[:, :-1] | ~valid[:, 1:]).all()  # right-padded
        assert valid[:, 0].all()
        scored = labels != -100
        self.scored += int(scored.sum())
        assert not (scored & ~valid).any()
        assert torch.equal(labels[scored], input_ids[scored])
        self.rows += [row[mask].tolist() for row, mask in zip(input_ids, valid, strict=True)]
        logps = MODEL(input_ids=input_ids, attention_mask=attention_mask).logits.log_softmax(-1)
        asked = labels[:, 1:]
        values = logps[:, :-1].gather(2, asked.clamp(min=0)[:, :, None])[:, :, 0]
        return values.masked_fill(asked == -100, 123.0)  # nobody may look at these


@given(lengths=st.lists(st.integers(0, 40), max_size=30), max_tokens=st.integers(1, 120))
def test_every_row_is_in_one_batch_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    batches = pack_rows(lengths, max_tokens)
    assert sorted(i for batch in batches for i in batch) == [i for i, n in enumerate(lengths) if n > 0]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens
        assert min(lengths[i] for i in batch) >= 0.8 * max(lengths[i] for i in batch)
    # no two neighbors would have fitted together
    for one, other in zip(batches, batches[1:], strict=False):
        assert (len(one) + 1) * lengths[one[0]] > max_tokens or lengths[other[0]] < 0.8 * lengths[one[0]]
        assert lengths[one[-1]] >= lengths[other[0]]


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, max_tokens=st.integers(1, 60), seed=st.integers(0, 3))
def test_any_lengths_give_the_numbers_of_a_plain_forward(
    lengths: list[tuple[int, int]], max_tokens: int, seed: int
) -> None:
    asked = ragged(lengths, seed)
    scorer = Scorer()
    scores = score_packed(scorer, asked, max_tokens, CPU)
    assert scores.dtype == torch.float32 and scores.shape == asked.completion_ids.shape
    torch.testing.assert_close(scores.double(), reference(MODEL, asked, VOCAB), atol=1e-6, rtol=1e-6, equal_nan=True)
    for i, (prompt, completion) in enumerate(lengths):
        nothing_precedes = prompt == 0 and completion > 0
        assert int(torch.isnan(scores[i]).sum()) == int(nothing_precedes)
    # each row with a completion is pushed through once, whole, and no other
    expected = [
        asked.prompt_ids[i][asked.prompt_mask[i] == 1].tolist()
        + asked.completion_ids[i][asked.completion_mask[i] == 1].tolist()
        for i, (_, completion) in enumerate(lengths)
        if completion > 0
    ]
    assert sorted(scorer.rows) == sorted(expected)
    assert scorer.scored == asked.completion_mask.sum()  # no token of a prompt goes through the LM head
    assert all(rows == 1 or rows * length <= max_tokens for rows, length in scorer.sizes)


@pytest.mark.parametrize("max_tokens", [1, 9, 64, 10_000])
def test_rows_of_one_length_are_pushed_through_without_padding(max_tokens: int) -> None:
    # prompt and completion differ, so that both are padded in the request
    asked = ragged([(1, 8), (8, 1), (4, 5), (2, 7), (5, 4), (3, 6)])
    scorer = Scorer()
    score_packed(scorer, asked, max_tokens, CPU)
    assert sum(rows * length for rows, length in scorer.sizes) == 6 * 9


def test_a_long_row_does_not_stretch_the_others() -> None:
    asked = ragged([(5, 95), *[(2, 3)] * 20])
    scorer = Scorer()
    score_packed(scorer, asked, 100, CPU)
    assert scorer.sizes == [(1, 100), (20, 5)]


def test_no_row_with_a_completion_asks_nobody() -> None:
    def nobody(*tensors: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    asked = ragged([(3, 4), (2, 2)])
    empty = TeacherRequest(
        asked.prompt_ids, asked.prompt_mask, asked.completion_ids, torch.zeros_like(asked.completion_mask), 1.0
    )
    assert torch.equal(score_packed(nobody, empty, 100, CPU), torch.zeros(2, 4))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_the_scorer_says_of_other_tokens_does_not_matter(poison: float) -> None:
    class Poisoned(Scorer):
        def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
            values = super().__call__(input_ids, attention_mask, labels)
            return values.masked_fill(labels[:, 1:] == -100, poison)

    torch.testing.assert_close(
        score_packed(Poisoned(), request(), 30, CPU), score_packed(Scorer(), request(), 1000, CPU)
    )


def test_masks_of_other_types_count_alike() -> None:
    asked = request()
    expected = score_packed(Scorer(), asked, 30, CPU)
    for dtype in (torch.bool, torch.int32, torch.uint8):
        other = TeacherRequest(
            asked.prompt_ids,
            asked.prompt_mask.to(dtype),
            asked.completion_ids,
            asked.completion_mask.to(dtype),
            1.0,
        )
        assert torch.equal(score_packed(Scorer(), other, 30, CPU), expected)
