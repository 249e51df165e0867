"""avg@k, pass@k and their intervals against enumeration, and the evaluation script on a tiny model."""

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from peft import LoraConfig, get_peft_model
from rich.console import Console

from trl_softgate import evaluation
from trl_softgate.evaluation import Metric, bootstrap_interval, metrics, metrics_table, pass_at_k
from trl_softgate.export import merge_adapter
from trl_softgate.tasks.loading import TaskArguments

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.parametrize("samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples):
    for k in range(1, samples + 1):
        expected = []
        for right in range(samples + 1):
            answers = [True] * right + [False] * (samples - right)
            subsets = list(itertools.combinations(answers, k))
            expected.append(sum(any(subset) for subset in subsets) / len(subsets))
        np.testing.assert_allclose(pass_at_k(np.arange(samples + 1), samples, k), expected, rtol=1e-15)


def test_pass_at_k_of_many_completions_is_finite():
    values = pass_at_k(np.array([0, 1, 500, 2_000]), 2_000, 1_000)
    np.testing.assert_allclose(values, [0, 0.5, 1, 1], atol=1e-12)


@pytest.mark.parametrize(
    ("correct", "samples", "k", "message"),
    [
        ([1], 2, 3, "`k` must be at most the 2 completions"),
        ([1], 2, 0, "`k` must be a finite number at least 1"),
        ([3], 2, 1, "whole numbers from 0 to 2"),
        ([-1], 2, 1, "whole numbers from 0 to 2"),
        ([0.5], 2, 1, "whole numbers from 0 to 2"),
    ],
)
def test_pass_at_k_refuses(correct, samples, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(np.array(correct), samples, k)


def test_bootstrap_is_the_distribution_over_all_resamples():
    values = np.array([0.0, 0.1, 0.5, 0.7, 1.0])
    means = [np.mean(draw) for draw in itertools.product(values, repeat=values.size)]
    for level in (0.5, 0.8, 0.95):
        expected = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
        found = bootstrap_interval(values, level=level, resamples=200_000)
        np.testing.assert_allclose(found, expected, atol=0.011)  # the means are 0.02 apart or more


def test_bootstrap_of_many_problems_is_normal():
    values = (np.random.default_rng(1).random(2000) < 0.3).astype(float)
    low, high = bootstrap_interval(values, resamples=4000)
    half = 1.96 * values.std() / np.sqrt(values.size)
    np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=0.1 * half)


def test_bootstrap_is_repeatable_and_drawn_in_pieces(monkeypatch):
    values = np.random.default_rng(0).random(7)
    whole = bootstrap_interval(values, resamples=1000, seed=3)
    assert whole == bootstrap_interval(values, resamples=1000, seed=3)
    assert whole != bootstrap_interval(values, resamples=1000, seed=4)
    monkeypatch.setattr(evaluation, "_CHUNK", 700)
    assert whole == bootstrap_interval(values, resamples=1000, seed=3)
    assert bootstrap_interval(np.array([0.25]), resamples=10) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [([], {}, "at least one problem"), ([[1.0]], {}, "shape"), ([1.0], {"level": 1}, "`level`")],
)
def test_bootstrap_refuses(values, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(np.array(values), **options)


def test_metrics_count_full_scores_as_right():
    scores = np.array([[1.0, 0.5, 0.0, 1.0], [0.9, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    by_name = {metric.name: metric for metric in metrics(scores, (1, 2, 4), resamples=200)}
    assert list(by_name) == ["avg@4", "pass@1", "pass@2", "pass@4"]
    assert by_name["avg@4"].value == pytest.approx((2.5 + 0.9 + 4) / 12)
    assert by_name["pass@1"].value == pytest.approx((0.5 + 0 + 1) / 3)
    assert by_name["pass@2"].value == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert by_name["pass@4"].value == pytest.approx(2 / 3)
    assert all(metric.low <= metric.value <= metric.high for metric in by_name.values())
    with pytest.raises(ValueError, match="finite numbers"):
        metrics(np.array([[np.nan]]))


def test_table_is_in_per_cent():
    console = Console(record=True, width=80)
    console.print(metrics_table([Metric("avg@32", 0.1234, 0.1, 0.15)], "model on [task]"))
    text = console.export_text()
    assert "avg@32" in text and "12.3" in text and "10.0 to 15.0" in text and "[task]" in text


# The script


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("evaluate")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model whose own defaults of generation would make all samples alike."""
    folder = tmp_path_factory.mktemp("evaluation") / "model"
    built = tiny.model(initializer_range=0.3)  # so that the next token depends on what is before
    with torch.no_grad():
        built.model.embed_tokens.weight[0] = 3.0  # and would on padding, if it were looked at
    built.generation_config = transformers.GenerationConfig(
        do_sample=True, top_k=1, temperature=0.01, eos_token_id=1, pad_token_id=0
    )
    built.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


TASK = TaskArguments(task_name="chain_sum", train_size=3, task_config={"max_terms": 3})


def run(script, model: Path, output: Path, task: TaskArguments = TASK, **options: Any) -> tuple[dict, list[dict]]:
    args = script.EvaluationArguments(
        model_name_or_path=str(model),
        output_dir=str(output),
        **{"max_new_tokens": 6, "bootstrap_resamples": 100, **options},
    )
    results = script.evaluate(task, args, Console(quiet=True))
    assert json.loads(json.dumps(results)) == json.loads((output / "results.json").read_text())
    return results, [json.loads(line) for line in (output / "completions.jsonl").read_text().splitlines()]


def test_samples_are_drawn_as_asked_and_scored(script, model, tmp_path):
    results, lines = run(script, model, tmp_path / "a", samples=4, batch_size=5, pass_k=[2])
    assert results["decoding"]["temperature"] == 1
    assert [line["problem"] for line in lines] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({line["completion"] for line in lines}) > 6  # not the model's top-k of 1
    scores = np.array([line["score"] for line in lines]).reshape(3, 4)
    found = {name: values[0] for name, values in results["metrics"].items()}
    assert found == {metric.name: metric.value for metric in metrics(scores, (2,), resamples=1)}
    assert results["mean_tokens"] == np.mean([line["tokens"] for line in lines])
    assert results["truncated_share"] == np.mean([line["truncated"] for line in lines])
    assert run(script, model, tmp_path / "b", samples=4, batch_size=5, pass_k=[2])[1] == lines
    assert run(script, model, tmp_path / "c", samples=4, batch_size=5, pass_k=[2], seed=1)[1] != lines


def test_all_tokens_are_sampled_from(script, model, tmp_path):
    """Neither the model's top-k of 1 nor transformers' own default of 50."""
    flat = tiny.model()
    flat.save_pretrained(str(tmp_path / "flat"))
    tiny.tokenizer().save_pretrained(str(tmp_path / "flat"))
    task = TaskArguments(task_name="chain_sum", train_size=1)
    _, lines = run(script, tmp_path / "flat", tmp_path / "a", task, samples=400, batch_size=400, max_new_tokens=1)
    assert len({line["completion"] for line in lines}) > 60


def test_greedy_is_argmax_whatever_the_batch(script, model, tmp_path):
    results, lines = run(script, model, tmp_path / "a", batch_size=3)
    assert len({len(line["prompt"][0]["content"]) for line in lines}) > 1  # so there is padding
    assert (results["decoding"]["temperature"], list(results["metrics"])) == (0, ["avg@1", "pass@1"])
    assert run(script, model, tmp_path / "b", batch_size=1)[1] == lines
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for line in lines:
        ids = tokenizer.apply_chat_template(
            line["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        written = []
        while len(written) < 6 and 1 not in written:
            with torch.no_grad():
                written.append(int(net(ids).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([[written[-1]]])], dim=1)
        kept = [token for token in written if token != 1]
        assert line["completion"] == tokenizer.decode(kept, skip_special_tokens=True)
        assert (line["tokens"], line["truncated"]) == (len(kept), 1 not in written)


def test_a_right_answer_scores_one(script):
    task = script.load_task(TASK)
    right = [[script.Completion(answer, 1, False)] for answer in task.train_dataset["answer"]]
    wrong = [[script.Completion("none", 1, False)] for _ in right]
    assert script.score(task, [a + b for a, b in zip(right, wrong, strict=True)]) == [[1.0, 0.0]] * 3


def test_an_adapter_is_evaluated_as_its_merged_model(script, model, tmp_path):
    adapted: Any = get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    _, lines = run(script, tmp_path / "adapter", tmp_path / "a")
    assert lines == run(script, tmp_path / "merged", tmp_path / "b")[1]
    assert lines != run(script, model, tmp_path / "c")[1]


@pytest.mark.parametrize(
    ("name", "samples", "temperature", "passes"),
    [
        *((name, 32, 1.0, (1, 32)) for name in ("aime24", "aime25", "hmmt25_feb", "hmmt25_nov")),
        ("humaneval_plus", 1, 0.0, (1,)),
        ("mbpp_plus", 1, 0.0, (1,)),
        ("livecodebench_v6", 4, 1.0, (1, 4)),
    ],
)
def test_decoding_is_the_papers(script, name, samples, temperature, passes):
    found = script.decoding_of(script.EvaluationArguments(), TaskArguments(dataset_name=name))
    assert (found.samples, found.temperature, found.top_p, found.passes) == (samples, temperature, 1.0, passes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 4, "temperature": 0}, "4 greedy completions are the same"),
        ({"samples": 4, "pass_k": [5]}, "pass_k 5 must be between 1 and the 4 samples"),
        ({"model_name_or_path": None}, "Name the model"),
        ({"model_name_or_path": "runs/no/model"}, "neither a folder here nor the name of a model"),
        ({"output_dir": __file__}, "must be a folder"),
    ],
)
def test_mistakes_are_one_sentence(script, model, tmp_path, options, message):
    values = {"model_name_or_path": str(model), "output_dir": str(tmp_path), **options}
    with pytest.raises(script.Mistake, match=message):
        script.evaluate(TASK, script.EvaluationArguments(**values), Console(quiet=True))


def test_missing_vllm_is_said(script, model, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(script.Mistake, match="vLLM is not installed"):
        run(script, model, tmp_path, backend="vllm")
