"""The reasoning-gym task of the recipes: dataset, scorer, and what its errors say."""

import sys

import pytest

from trl_softgate.rewards.reasoning_gym import ReasoningGymArguments, load_task


def test_dataset_and_reward_agree():
    task = load_task(ReasoningGymArguments("chain_sum", {"max_terms": 2}, train_size=6, eval_size=3, task_seed=5))
    assert task.eval_dataset is not None
    assert (len(task.train_dataset), len(task.eval_dataset)) == (6, 3)
    for dataset in (task.train_dataset, task.eval_dataset):
        for row in dataset.to_list():
            assert [message["role"] for message in row["prompt"]] == ["user"]
            right = [{"role": "assistant", "content": f" {row['answer']}\n"}]
            wrong = [{"role": "assistant", "content": "none"}]
            index = row["task_index"]
            assert task.reward_func(completions=[right, wrong, row["answer"]], task_index=[index] * 3) == [1, 0, 1]
    assert set(task.train_dataset["task_index"]).isdisjoint(task.eval_dataset["task_index"])
    assert getattr(task.reward_func, "__name__", None) == "chain_sum"


def test_reward_uses_the_task_s_own_scorer():
    # chain_sum gives part of the reward for an answer inside other words: the share of its length.
    task = load_task(ReasoningGymArguments("chain_sum", train_size=1))
    answer = task.train_dataset[0]["answer"]
    assert task.reward_func(completions=[f"so {answer}"], task_index=[0]) == [len(answer) / (len(answer) + 3)]


def test_system_prompt_comes_first_and_seed_decides():
    def prompts(seed):
        args = ReasoningGymArguments("chain_sum", train_size=4, task_seed=seed, system_prompt="Be brief.")
        return load_task(args).train_dataset["prompt"]

    assert prompts(0)[0][0] == {"role": "system", "content": "Be brief."}
    assert list(prompts(0)) == list(prompts(0))
    assert list(prompts(0)) != list(prompts(100))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"task_name": "chainsum"}, "Did you mean chain_sum"),
        ({"task_name": "???"}, "Available tasks: .*chain_sum"),
        ({"task_name": "chain_sum", "task_config": {"max_trms": 2}}, "no option 'max_trms'. Its options: .*max_terms"),
        ({"task_name": "chain_sum", "task_config": {"max_terms": 0}}, "refuses task_config"),
        ({"task_name": "chain_sum", "task_config": {"seed": 1}}, "use task_seed"),
        ({"task_name": "chain_sum", "task_config": {"size": 1}}, "use train_size and eval_size"),
        ({"task_name": "chain_sum", "task_config": "{max_terms}"}, "must be a JSON object"),
        ({"task_name": "chain_sum", "task_config": "[1]"}, "must be a mapping"),
        ({"task_name": "chain_sum", "train_size": 0}, "train_size must be at least 1"),
        ({"task_name": "chain_sum", "eval_size": -1}, "eval_size at least 0"),
    ],
)
def test_errors_say_what_to_write(kwargs, message):
    with pytest.raises(ValueError, match=message):
        load_task(ReasoningGymArguments(**kwargs))


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"pip install -c constraints.txt -e '\.\[tasks\]'"):
        load_task(ReasoningGymArguments("chain_sum"))
