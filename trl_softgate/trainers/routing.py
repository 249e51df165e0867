"""Which experts the routers of a mixture-of-experts model choose, and how many choices an update has changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Completion tokens of a row that are looked at, at most as long as a completion keeps to its limit.
_POSITIONS = 64


class ExpertChoices:
    """Watches the routers of a model, at every `stride`-th completion token.

    Routers are the modules that transformers takes `router_logits` from; only those that also return the indices of
    the experts are understood, as in Qwen3-MoE, Mixtral and gpt-oss.

    Args:
        model: a transformers model, or one wrapped by PEFT.
        max_completion_length: of the run, in tokens.
    """

    def __init__(self, model: nn.Module, max_completion_length: int) -> None:
        self.stride = max(1, max_completion_length // _POSITIONS)
        self._routers = _routers(model)
        self._seen: list[torch.Tensor] | None = None
        for router in self._routers:
            router.register_forward_hook(self._note)

    @contextmanager
    def watch(self) -> Iterator[list[torch.Tensor]]:
        """What the routers choose in a forward, one tensor (tokens, k) per layer, in order."""
        self._seen = seen = []
        try:
            yield seen
        finally:
            self._seen = None

    def at_positions(self, seen: list[torch.Tensor], rows: int, completion_length: int) -> torch.Tensor | None:
        """(rows, P, layers, k) int16, the choices at P completion tokens; None without a router that tells them."""
        if not seen or len(seen) != len(self._routers):
            return None
        layers = [choices.view(rows, -1, choices.shape[-1]) for choices in seen]
        picked = [layer[:, layer.shape[1] - completion_length :: self.stride] for layer in layers]
        return torch.stack(picked, dim=2).to(torch.int16)

    def _note(self, router: nn.Module, args: Any, output: Any) -> None:
        if self._seen is None:
            return
        parts = output if isinstance(output, tuple) else (output,)
        whole = [part for part in parts if isinstance(part, torch.Tensor) and not part.is_floating_point()]
        if whole:
            self._seen.append(whole[0].detach())


def changed_choices(old: torch.Tensor, new: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Number of choices in each layer that `new` does not share with `old`, and of all choices: (layers, 2).

    Args:
        old, new: (B, P, layers, k) expert indices.
        mask: (B, P) bool.
    """
    gone = (old.unsqueeze(-1) != new.unsqueeze(-2)).all(-1).sum(-1)
    changed = torch.where(mask.unsqueeze(-1), gone, 0).sum((0, 1))
    total = (mask.sum() * old.shape[-1]).expand_as(changed)
    return torch.stack([changed, total], dim=1)


def _routers(model: nn.Module) -> list[nn.Module]:
    kinds: set[type] = set()
    for module in model.modules():
        recorders = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, list | tuple) else (recorders,):
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type):
                kinds.add(kind)
    return [module for module in model.modules() if isinstance(module, tuple(kinds))]
