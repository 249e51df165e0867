"""Dealing rows to micro-batches: nothing of a row with signal is lost, and ranks stay in step."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BloomConfig, Gemma3TextConfig, GPT2Config, Qwen3Config

from trl_softgate.trainers.micro_batches import Savings, deal, extents, padding_matters

P, T = 6, 9
TOKEN_NAMES = ("completion_ids", "completion_mask", "old_per_token_logps", "tool_mask")


@st.composite
def buffers(draw: Any) -> tuple[list[dict[str, Any]], int, torch.Tensor]:
    """Micro-batches, how many of them belong together, and whether each row has signal."""
    size, together, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rows = size * together * chunks
    seed = draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, P + 1, (rows, 1), generator=generator)
    completions = torch.randint(0, T + 1, (rows, 1), generator=generator)  # 0: a truncated row that was masked
    whole: dict[str, Any] = {
        "prompt_ids": torch.randint(4, 99, (rows, P), generator=generator),
        "prompt_mask": (torch.arange(P) >= P - prompts).long(),
        "completion_ids": torch.randint(4, 99, (rows, T), generator=generator),
        "completion_mask": (torch.arange(T) < completions).long(),
        "tool_mask": torch.randint(0, 2, (rows, T), generator=generator),
        "old_per_token_logps": torch.randn(rows, T, generator=generator),
        "advantages": torch.randn(rows, generator=generator),
        "row": torch.arange(rows),
        "names": [f"row {i}" for i in range(rows)],
        "num_items_in_batch": torch.tensor(7),
        "nothing": None,
    }
    signal = torch.rand(rows, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    batches = [
        {name: value[i : i + size] if name in PER_ROW else value for name, value in whole.items()}
        for i in range(0, rows, size)
    ]
    return batches, together, signal


PER_ROW = (*TOKEN_NAMES, "prompt_ids", "prompt_mask", "advantages", "row", "names")


def tokens(rows: dict[str, Any]) -> torch.Tensor:
    return (rows["completion_mask"] * rows["tool_mask"]).sum()


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("multiple", [None, 4])
@given(buffers(), st.integers(0, 2))
def test_every_row_arrives_once_and_whole(
    group: bool, multiple: int | None, drawn: tuple[list[dict[str, Any]], int, torch.Tensor], ahead: int
) -> None:
    batches, together, signal = drawn
    together = together if group else 1
    size = len(batches[0]["row"])
    original = {name: [row for batch in batches for row in batch[name]] for name in PER_ROW}

    def most(needed: torch.Tensor) -> torch.Tensor:
        return (needed + ahead).clamp(max=together)  # another process has more rows with signal

    savings = Savings(True, True, group, skip=True, multiple=multiple)
    dealt = deal(batches, together, savings, lambda rows: signal[rows["row"]], tokens, most)

    assert len(dealt) == len(batches)
    for start in range(0, len(dealt), together):
        chunk = dealt[start : start + together]
        before = set(range(start * size, (start + together) * size))
        arrived: list[int] = []
        live = sum(bool(signal[i]) for i in before)
        count = min(max(1, -(-live // size)) + ahead, together)
        # empty ones in front: the last micro-batch of an optimizer step never is
        assert [len(batch["row"]) > 0 for batch in chunk] == [False] * (together - count) + [True] * count
        for batch in chunk:
            assert len(batch["row"]) <= size
            assert batch["num_rows"] == size
            assert batch["num_items_in_batch"] == 7
            assert batch["nothing"] is None
            prompt, completion = batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]
            for j, row in enumerate(batch["row"].tolist()):
                assert batch["names"][j] == f"row {row}"
                assert batch["advantages"][j] == original["advantages"][row]
                if not signal[row]:
                    assert batch["completion_mask"][j].sum() == 0  # a filler has no part in the loss
                    continue
                arrived.append(row)
                for name in TOKEN_NAMES:
                    assert torch.equal(batch[name][j], original[name][row][:completion])
                assert original["completion_mask"][row][completion:].sum() == 0
                for name in ("prompt_ids", "prompt_mask"):
                    assert torch.equal(batch[name][j], original[name][row][P - prompt :])
                assert original["prompt_mask"][row][: P - prompt].sum() == 0
            if len(batch["row"]):
                prompts, completions = extents(batch["prompt_mask"], batch["completion_mask"])
                for columns, needed, available in ((prompt, prompts, P), (completion, completions, T)):
                    least = max(1, int(needed.max()))
                    least = least if multiple is None else -(-least // multiple) * multiple
                    assert columns == min(least, available)
        assert sorted(arrived) == sorted(i for i in before if signal[i])
        lengths = [len(original["row"])] * together
        if group:
            lengths = [
                int(batch["prompt_mask"][j].sum() + batch["completion_mask"][j].sum())
                for batch in chunk
                for j in range(len(batch["row"]))
                if signal[batch["row"][j]]
            ]
        assert lengths == sorted(lengths, reverse=True)
        assert sum(batch["num_tokens"] for batch in chunk) == sum(
            (original["completion_mask"][i] * original["tool_mask"][i]).sum() for i in before
        )


@given(buffers())
def test_all_switched_off_changes_nothing(drawn: tuple[list[dict[str, Any]], int, torch.Tensor]) -> None:
    batches, _, signal = drawn
    off = Savings(False, False, False, False, None)
    dealt = deal(batches, 1, off, lambda rows: signal[rows["row"]], tokens, lambda needed: needed)
    for before, after in zip(batches, dealt, strict=True):
        assert after.keys() == before.keys() | {"num_rows", "num_tokens"}
        assert after["num_tokens"] == tokens(before)
        for name in PER_ROW:
            if isinstance(before[name], torch.Tensor):
                assert torch.equal(after[name], before[name])
            else:
                assert after[name] == before[name]


def test_where_padding_matters() -> None:
    assert padding_matters(Qwen3Config()) == (False, False)
    assert padding_matters(Gemma3TextConfig()) == (False, False)  # a rope for each kind of layer
    assert padding_matters(GPT2Config()) == (True, False)
    assert padding_matters(BloomConfig()) == (True, False)
    for kind in ("dynamic", "longrope"):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}
        config = Qwen3Config()
        config.rope_parameters = rope
        assert padding_matters(config) == (True, True)
        config.rope_parameters = {"full_attention": rope}
        assert padding_matters(config) == (True, True)
