"""log pi_old: recomputed without padding, or taken from the sampler."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig

from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer

METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gspo": (GSPOTrainer, GSPOConfig, {}),
    "sapo": (SAPOTrainer, SAPOConfig, {}),
    "saf": (SAFDistillTrainer, SAFDistillConfig, dict(opd_warmup_steps=0)),
}
REUSE: dict[str, Any] = dict(steps_per_generation=2, gradient_accumulation_steps=1, num_iterations=2)
MISMATCH = "sampling/sampling_logp_difference"


def make(folder: Path, method: str = "gspo", rollout_func: Any = None, peft_config: Any = None, **options: Any) -> Any:
    trainer_class, config_class, own = METHODS[method]
    teacher = tiny.teacher() if method == "saf" else {}
    return trainer_class(
        tiny.model(),
        tiny.reward,
        tiny.config(config_class, folder, **{"max_steps": 4, **own, **options}),
        tiny.dataset(),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout_func,
        peft_config=peft_config,
        **teacher,
    )


def logs(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


class Forwards:
    """Rows of each forward of the model, in the rollout and in the loss; sampling is not counted."""

    def __init__(self, trainer: Any) -> None:
        self.rollout: list[int] = []
        self.loss: list[int] = []

        def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if kwargs.get("fused_lm_head"):
                (self.loss if torch.is_grad_enabled() else self.rollout).append(len(kwargs["input_ids"]))

        trainer.model.register_forward_pre_hook(count, with_kwargs=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("method", METHODS)
def test_the_samplers_log_probs_are_the_policys(method: str, temperature: float, tmp_path: Path) -> None:
    trainer = make(tmp_path, method, old_logps_source="rollout", temperature=temperature, **REUSE)
    forwards = Forwards(trainer)
    trainer.train()
    assert forwards.loss
    assert not forwards.rollout  # nothing was recomputed
    first, second, *_ = logs(trainer)
    assert 0 < first[f"{MISMATCH}/max"] < 1e-4
    assert f"{MISMATCH}/max" not in second  # the policy has moved: that is no mismatch
    assert first["sampling/missing_share"] == second["sampling/missing_share"] == 0
    assert first["ratio/min"] == pytest.approx(1, abs=1e-4)
    assert second["ratio/min"] != pytest.approx(1, abs=1e-4)


def test_an_adapter_samples_as_itself(tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = make(tmp_path, old_logps_source="rollout", peft_config=lora, **REUSE)
    trainer.train()
    assert 0 < logs(trainer)[0][f"{MISMATCH}/max"] < 1e-4
    assert "generate" not in vars(trainer.model)


def known(shift: float) -> Any:
    """A rollout whose sampler says log pi + shift."""

    def rollout(prompts: list[str], inner: Any) -> dict[str, Any]:
        output = tiny.fixed_rollout(prompts, inner)
        output["logprobs"] = []
        for prompt, ids in zip(output["prompt_ids"], output["completion_ids"], strict=True):
            with torch.no_grad():
                logits = inner.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            logps = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0] + shift
            output["logprobs"].append(logps.tolist())
        return output

    return rollout


def test_training_is_that_with_recomputed_ones(tmp_path: Path) -> None:
    """Ratios, clips and gradients of three optimizer steps on one rollout."""
    runs = {}
    for source in ("recompute", "rollout"):
        rollout = known(0.0) if source == "rollout" else tiny.fixed_rollout
        trainer = make(tmp_path, rollout_func=rollout, old_logps_source=source, **REUSE, epsilon=3e-3)
        trainer.train()
        runs[source] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    torch.testing.assert_close(runs["rollout"], runs["recompute"], atol=2e-5, rtol=0)


def test_on_policy_the_ratio_is_to_the_sampler(tmp_path: Path) -> None:
    """GSPO paper, section 5.4: also where the policy has not moved since it sampled."""
    trainer = make(tmp_path, rollout_func=known(0.02), old_logps_source="rollout", max_steps=1)
    trainer.train()
    (entry,) = logs(trainer)
    assert entry["ratio/mean"] == pytest.approx(torch.tensor(-0.02).exp().item(), rel=1e-4)
    assert entry[f"{MISMATCH}/mean"] == pytest.approx(0.02, rel=1e-3)


def test_another_sampler_is_warned_of(tmp_path: Path) -> None:
    trainer = make(tmp_path, rollout_func=known(0.2), old_logps_source="rollout", max_steps=1)
    with pytest.warns(UserWarning, match="differ from the trainer's by 0.2 per token in the mean near step 1, above"):
        trainer.train()


def test_a_token_that_the_sampler_did_not_score(tmp_path: Path) -> None:
    """It counts as sampled by the current policy; vLLM gives None for such a token."""
    inner = known(0.0)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = inner(prompts, trainer)
        output["logprobs"][0][0] = None
        return output

    trainer = make(tmp_path, "sapo", rollout_func=rollout, old_logps_source="rollout", max_steps=2, **REUSE)
    trainer.train()
    for entry in logs(trainer):
        assert entry["ratio/mean"] == pytest.approx(1, abs=0.1)  # and not NaN, which transformers hides in the loss
    assert 0 < max(entry["sampling/missing_share"] for entry in logs(trainer)) < 0.2


@pytest.mark.parametrize("logprobs", ["none", "short"])
def test_a_rollout_without_log_probs_is_refused(logprobs: str, tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = known(0.0)(prompts, trainer)
        if logprobs == "short":
            output["logprobs"][1] = output["logprobs"][1] + [-1.0]
        else:
            output["logprobs"] = None
        return output

    with pytest.raises(ValueError, match="needs one log-probability per sampled token: let `rollout_func` return"):
        make(tmp_path, rollout_func=rollout, old_logps_source="rollout").train()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(top_p=0.9), "`top_p` changes"),
        (dict(top_k=50), "`top_k` changes"),
        (dict(min_p=0.1), "`min_p` changes"),
        (dict(repetition_penalty=1.1), "`repetition_penalty` changes"),
        (dict(generation_kwargs={"typical_p": 0.9}), "`typical_p` changes"),
        (dict(generation_kwargs={"temperature": 0.5}), "`temperature` changes"),
        (dict(generation_kwargs={"do_sample": False}), "`do_sample` changes"),
        (dict(use_transformers_continuous_batching=True), "gives no log-probabilities"),
    ],
)
def test_samplers_of_another_distribution_are_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        tiny.config(GSPOConfig, tmp_path, old_logps_source="rollout", **options)
    with pytest.raises(ValueError, match="`old_logps_source` must be one of"):
        tiny.config(GSPOConfig, tmp_path, old_logps_source="sampler")


def test_recomputed_without_padding(tmp_path: Path) -> None:
    """log pi_old and log pi_ref are those of the padded batch, with fewer tokens pushed through the model."""
    trainer = make(tmp_path, **REUSE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 256, (10, 21), generator=generator)
    prompts, completions = torch.randint(1, 10, (10, 1), generator=generator), torch.randint(0, 12, (10, 1))
    place = torch.arange(21)
    mask = ((place >= 9 - prompts) & (place < 9 + completions)).long()
    tokens: list[int] = []
    trainer.model.register_forward_pre_hook(lambda m, a, k: tokens.append(k["input_ids"].numel()), with_kwargs=True)
    arguments = (trainer.model, ids * mask, mask, 12)
    with torch.no_grad():
        whole, _, _ = trainer._get_per_token_logps_and_entropies(*arguments)
        scored, entropies, aux = trainer._get_per_token_logps_and_entropies(*arguments, batch_size=4)
    assert (entropies, aux) == (None, None)
    assert len(tokens) == 4
    assert sum(tokens[1:]) < 0.9 * tokens[0]
    torch.testing.assert_close(scored * mask[:, 9:], whole * mask[:, 9:], atol=2e-6, rtol=0)


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    options: Any = dict(old_logps_source="rollout", save_strategy="steps", save_steps=1, **REUSE)
    whole = make(tmp_path / "run", "sapo", **options)
    whole.train()
    resumed = make(tmp_path / "run", "sapo", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))  # within a reuse window
    for ours, expected in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, expected)
    keys = ("loss", "ratio/max", "sampling/missing_share", f"{MISMATCH}/max")
    assert [[e.get(k) for k in keys] for e in logs(resumed)] == [[e.get(k) for k in keys] for e in logs(whole)]
