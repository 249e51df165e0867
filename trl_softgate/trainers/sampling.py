"""Log-probabilities with which transformers' `generate` sampled its tokens, and what must hold to use them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LogitsProcessor

# Options of sampling, with the value at which the sampler draws from the policy's own distribution
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0, None),
}
# Further ones, known to `generate` alone
_GENERATE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "do_sample": (True,),
    "num_beams": (1, None),
    "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "no_repeat_ngram_size": (0, None),
}


def check_sampling(args: Any) -> None:
    """Refuse a `GRPOConfig` whose sampler draws from another distribution than the policy's.

    Raises:
        ValueError: naming the option.
    """
    if args.use_transformers_continuous_batching:
        raise ValueError(
            "`old_logps_source='rollout'` does not fit `use_transformers_continuous_batching`, which gives no "
            "log-probabilities: use vLLM or plain generation, or `old_logps_source='recompute'`."
        )
    given = {name: getattr(args, name) for name in _NEUTRAL}
    further: dict[str, Any] = args.generation_kwargs if isinstance(args.generation_kwargs, dict) else {}
    changed = [name for name, value in given.items() if value not in _NEUTRAL[name]]
    changed += [name for name, value in further.items() if value not in _GENERATE_NEUTRAL.get(name, (value,))]
    if further.get("temperature", args.temperature) != args.temperature:
        changed.append("temperature")
    if changed:
        raise ValueError(
            f"`old_logps_source='rollout'` needs tokens sampled from the policy itself, and `{changed[0]}` changes "
            "the distribution: leave it out, or set `old_logps_source='recompute'`."
        )


class _Recorder(LogitsProcessor):
    """Sees the logits of every step, and the token drawn from them one step later."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._log_probs: torch.Tensor | None = None
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.drawn(input_ids[:, -1])
        self._log_probs = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        return scores

    def drawn(self, tokens: torch.Tensor) -> None:
        if self._log_probs is not None:
            self._columns.append(self._log_probs.gather(1, tokens.unsqueeze(1)))
            self._log_probs = None

    def rows(self) -> list[list[float]]:
        """(B, T), with one transfer from the device."""
        return torch.cat(self._columns, dim=1).tolist()


@contextmanager
def sampled_logps(model: Any, temperature: float) -> Iterator[_Recorder]:
    """Record log pi of each token that `model.generate` draws, over the whole vocabulary at `temperature`.

    A (B, V) tensor is held from one step to the next, never (B, T, V).
    """
    recorder = _Recorder(temperature)
    original = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, logits_processor=[recorder], **kwargs)
        recorder.drawn(output[:, -1])
        return output

    model.generate = generate
    try:
        yield recorder
    finally:
        del model.generate
