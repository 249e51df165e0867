"""SAPO: Soft Adaptive Policy Optimization (arXiv 2511.20347)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..objectives import ObjectiveOutput, sapo_loss
from .base import AGGREGATION_HINT, CLIP_OPTIONS, VESPO_OPTIONS, BasePolicyConfig, BasePolicyTrainer


@dataclass
class SAPOConfig(BasePolicyConfig):
    """Configuration of `SAPOTrainer`: `trl.GRPOConfig` with the soft gate's temperatures.

    Args:
        sapo_temperature_pos: tau of tokens with a positive advantage; > 0. Paper: 1.0.
        sapo_temperature_neg: tau of all other tokens; > 0. Paper: 1.05.

    `gate_kernel`, `gate_hard_stop`, `adaptive_temperature_quantile`, `aggregation`, `record` and more: see
    `BasePolicyConfig`. All other options of `trl.GRPOConfig` are honored; the clip options have no effect and are
    refused, `loss_type` and `importance_sampling_level` are fixed.

    Raises:
        ValueError: an option is out of range, or has no effect in SAPO.
    """

    _METHOD: ClassVar[str] = "SAPO"
    _UNUSED: ClassVar[tuple[str, ...]] = (*CLIP_OPTIONS, *VESPO_OPTIONS)

    loss_type: str = field(default="sapo", metadata={"help": "Fixed by SAPO; use `aggregation`."})

    def __post_init__(self) -> None:
        self._check_gate()
        self._fix("loss_type", "sapo", AGGREGATION_HINT)
        self._fix("importance_sampling_level", "token", "Use GSPOTrainer for sequence ratios.")
        super().__post_init__()

    @property
    def _has_gate(self) -> bool:
        return True


class SAPOTrainer(BasePolicyTrainer):
    """Trains with a sigmoid gate on each token's importance ratio in place of the hard clip (SAPO, arXiv 2511.20347).

    A drop-in for `trl.GRPOTrainer`: the same constructor arguments, datasets, reward functions and callbacks.

    Examples:
        >>> trainer = SAPOTrainer(model, reward_funcs=reward, args=SAPOConfig("out"), train_dataset=dataset)
        >>> trainer.train()
    """

    _CONFIG = SAPOConfig
    _name = "SAPO"
    _tag_names: ClassVar[list[str]] = ["trl", "sapo", "trl-softgate"]
    _paper: ClassVar[dict[str, Any]] = {
        "title": "Soft Adaptive Policy Optimization",
        "id": "2511.20347",
        "citation": """@article{gao2025sapo,
  title         = {Soft Adaptive Policy Optimization},
  author        = {Gao, Chang and Zheng, Chujie and Chen, Xiong-Hui and Dang, Kai and Liu, Shixuan and Yu, Bowen and \
Yang, An and Bai, Shuai and Zhou, Jingren and Lin, Junyang},
  year          = {2025},
  eprint        = {2511.20347},
  archivePrefix = {arXiv}
}""",
    }

    def _objective(
        self,
        per_token_logps: torch.Tensor,
        old_per_token_logps: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
    ) -> ObjectiveOutput:
        gate = self._gate
        assert gate is not None
        return sapo_loss(per_token_logps, old_per_token_logps, advantages, mask, **vars(gate))
