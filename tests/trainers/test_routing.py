"""Share of a mixture's expert choices that changed since the rollout, against the routers' own logits."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from trl_softgate import GSPOConfig, GSPOTrainer
from trl_softgate.trainers.routing import ExpertChoices, changed_choices

NAMES = [f"moe/changed_experts/layer_{layer:02}" for layer in range(2)]


class _Recounts(GSPOTrainer):
    """Counts the changes by itself: the policy of each rollout is kept, and both say their router logits."""

    counted: dict[int, list[list[int]]]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.sampler = tiny.moe_model()
        self.sampler.load_state_dict(self.model.state_dict())
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if len(inputs["completion_ids"]):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            with torch.no_grad():
                logits = [
                    policy(input_ids=ids, attention_mask=mask, output_router_logits=True).router_logits
                    for policy in (self.sampler, self.model)
                ]
            width = inputs["prompt_ids"].shape[1]
            step = self.counted.setdefault(self.state.global_step + 1, [[0, 0], [0, 0]])
            for layer, (old, new) in enumerate(zip(*logits, strict=True)):
                old, new = (x.view(*ids.shape, -1).topk(2).indices.tolist() for x in (old, new))
                for row, valid in enumerate(inputs["completion_mask"].tolist()):
                    for t in range(0, len(valid), self._experts.stride):  # type: ignore[union-attr]
                        if valid[t]:
                            gone = set(old[row][width + t]) - set(new[row][width + t])
                            step[layer][0] += len(gone)
                            step[layer][1] += 2
        return super()._compute_loss(model, inputs)


def run(folder: Path, **options: Any) -> tuple[_Recounts, Any]:
    args = tiny.config(
        GSPOConfig,
        folder,
        **{**dict(max_steps=4, steps_per_generation=4, record_every=1, learning_rate=0.05, epsilon=0.05), **options},
    )
    trainer = _Recounts(
        tiny.moe_model(),
        tiny.reward,
        args,
        tiny.dataset(),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout,
    )
    trainer.counted = {}
    trainer.train()
    record = pd.read_parquet(folder / "record" / "scalars")
    return trainer, record.pivot(index="step", columns="name", values="value")


@pytest.mark.parametrize("length", [8, 200])  # with the second, every third token is looked at
def test_it_is_what_the_logits_say(length: int, tmp_path: Path) -> None:
    trainer, record = run(tmp_path, max_completion_length=length)
    shares = [[changed / total for changed, total in trainer.counted[step]] for step in range(1, 5)]
    assert record[NAMES].to_numpy().tolist() == shares
    assert record["moe/changed_experts"].tolist() == pytest.approx([sum(row) / 2 for row in shares])
    assert shares[0] == [0.0, 0.0]
    assert max(shares[-1]) > 0.02


def test_where_every_update_is_on_policy_nothing_can_have_changed(tmp_path: Path) -> None:
    _, record = run(tmp_path, steps_per_generation=1, max_steps=2)
    assert not [name for name in record if name.startswith("moe/")]


def test_another_architecture_and_none() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    model = MixtralForCausalLM(config)
    experts = ExpertChoices(model, max_completion_length=8)
    with experts.watch() as seen:
        model(input_ids=torch.arange(10).view(2, 5))
    choices = experts.at_positions(seen, rows=2, completion_length=3)
    assert choices is not None and choices.shape == (2, 3, 3, 2)
    dense = ExpertChoices(tiny.model(), max_completion_length=8)
    with dense.watch() as seen:
        tiny.model()(input_ids=torch.arange(10).view(2, 5))
    assert dense.at_positions(seen, rows=2, completion_length=3) is None


def test_order_does_not_matter_and_masked_tokens_do_not_count() -> None:
    old = torch.tensor([[[[0, 1]], [[2, 3]], [[0, 1]]]])
    new = torch.tensor([[[[1, 0]], [[2, 0]], [[2, 3]]]])
    mask = torch.tensor([[True, True, False]])
    assert changed_choices(old, new, mask).tolist() == [[1, 4]]
