"""The addition task against plain arithmetic."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_softgate.tasks.addition import (
    VOCABULARY,
    Problem,
    build_dataset,
    build_tokenizer,
    completion_length,
    evaluate_accuracy,
    extract_answer,
    iterate_problems,
    reward_exact,
    sample_problems,
    split_of,
)
from trl_softgate.tasks.cold_start import ColdStartRecipe, build_model

# How busy the machine is says nothing about this code.
without_deadline = settings(deadline=None)
SPLITS = ("train", "validation", "test")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    digits = draw(st.integers(1, 7))
    number = st.integers(0, 10**digits - 1)
    return Problem(draw(number), draw(number), digits)


@without_deadline
@given(problems())
def test_the_solution_is_right_and_earns_the_reward(problem: Problem) -> None:
    *columns, answer = problem.solution.split(";")
    assert int(answer) == problem.a + problem.b
    assert len(columns) == problem.digits
    carry = 0
    for place, column in enumerate(columns):
        left, right, carry_in = (int(c) for c in column[:3])
        assert left == problem.a // 10**place % 10
        assert right == problem.b // 10**place % 10
        assert carry_in == carry
        assert column[3] == "="
        assert int(column[4:]) == left + right + carry_in
        carry = int(column[4])
    assert reward_exact([problem.solution], [problem.answer]) == [1.0]


@without_deadline
@given(problems(), st.integers(0, 10**8))
def test_only_the_sum_earns_the_reward(problem: Problem, claimed: int) -> None:
    total = problem.a + problem.b
    for completion in (str(claimed), f"170=08;{claimed:09d}"):
        assert reward_exact([completion], [problem.answer]) == [float(claimed == total)]


@without_deadline
@given(st.text("0123456789+=;", max_size=30))
def test_the_answer_is_the_number_after_the_last_separator(text: str) -> None:
    tail = text.rpartition(";")[2]
    assert extract_answer(text) == (str(int(tail)) if tail.isdigit() else None)


@pytest.mark.parametrize("text", ["", ";", "12;", "1=2", "12 ", "12\n", "+12", "١٢", "²"])
def test_what_is_no_plain_number_is_no_answer(text: str) -> None:
    assert extract_answer(text) is None
    assert reward_exact([text], ["12"]) == [0.0]


@without_deadline
@given(problems())
def test_text_survives_the_tokenizer_one_token_per_character(problem: Problem) -> None:
    tokenizer = build_tokenizer()
    text = problem.prompt + problem.solution
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert len(problem.prompt) == 2 * problem.digits + 2
    assert len(problem.solution) + 1 == completion_length(problem.digits)


def test_the_tokenizer_has_fifteen_tokens_and_pads_on_the_left() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer) == len(VOCABULARY) == 15
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    batch = tokenizer(["1+2=", "12+34="], padding=True)
    assert batch["input_ids"][0][:2] == [tokenizer.pad_token_id] * 2
    assert batch["attention_mask"][0] == [0, 0, 1, 1, 1, 1]
    ids = [*tokenizer("12")["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12"


def test_splits_are_disjoint_also_with_the_numbers_swapped() -> None:
    drawn = {split: set(islice(iterate_problems(0, split, digits=2), 20_000)) for split in SPLITS}
    pairs = {split: {frozenset((p.a, p.b)) for p in found} for split, found in drawn.items()}
    assert not pairs["train"] & pairs["test"]
    assert not pairs["train"] & pairs["validation"]
    assert not pairs["validation"] & pairs["test"]


@without_deadline
@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_the_split_is_a_function_of_the_unordered_pair(a: int, b: int) -> None:
    assert split_of(a, b) == split_of(b, a)


def test_split_shares_are_as_documented() -> None:
    drawn = [split_of(a, b) for a in range(0, 10_000, 37) for b in range(0, 10_000, 41)]
    shares = {split: drawn.count(split) / len(drawn) for split in SPLITS}
    assert shares == pytest.approx({"train": 0.8, "validation": 0.1, "test": 0.1}, abs=0.01)


def test_problems_are_distinct_and_depend_on_the_seed_alone() -> None:
    first = sample_problems(500, 3, "test")
    assert len(set(first)) == 500
    assert first == sample_problems(500, 3, "test")
    assert first != sample_problems(500, 4, "test")
    assert {split_of(p.a, p.b) for p in first} == {"test"}


def test_the_dataset_carries_what_the_reward_needs() -> None:
    dataset = build_dataset(20, 0, "train", digits=3)
    assert dataset.column_names == ["prompt", "answer"]
    for row in dataset.to_list():
        a, b = row["prompt"].removesuffix("=").split("+")
        assert len(a) == len(b) == 3
        assert row["answer"] == str(int(a) + int(b))
        assert split_of(int(a), int(b)) == "train"


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="split must be one of train, validation, test, got 'dev'"):
        iterate_problems(0, "dev")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="digits must be at least 1"):
        iterate_problems(0, "test", digits=0)
    with pytest.raises(ValueError, match="n must be between 1 and 200"):
        sample_problems(201, 0, "test", digits=2)
    with pytest.raises(ValueError):
        reward_exact(["1", "2"], ["1"])


def test_evaluation_is_repeatable_and_leaves_no_trace() -> None:
    model = build_model(ColdStartRecipe(digits=1, hidden_size=16, layers=1, heads=1), seed=0).train()
    tokenizer = build_tokenizer()
    asked = [*islice(iterate_problems(0, "test", digits=1), 30)]
    state = torch.random.get_rng_state()
    done: list[int] = []
    first = evaluate_accuracy(model, tokenizer, asked, batch_size=16, on_progress=done.append)
    assert first == evaluate_accuracy(model, tokenizer, asked, batch_size=16)
    assert 0 <= first <= 1
    assert done == [16, 30]
    assert model.training
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(ValueError, match="problems is empty"):
        evaluate_accuracy(model, tokenizer, [])
    with pytest.raises(ValueError, match="temperature"):
        evaluate_accuracy(model, tokenizer, asked, temperature=-1)
