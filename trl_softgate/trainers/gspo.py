"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..objectives import ObjectiveOutput, gspo_loss
from .base import AGGREGATION_HINT, SAPO_OPTIONS, VESPO_OPTIONS, BasePolicyConfig, BasePolicyTrainer


@dataclass
class GSPOConfig(BasePolicyConfig):
    """Configuration of `GSPOTrainer`: `trl.GRPOConfig` with the paper's clip range and aggregation.

    Args:
        epsilon: lower clip range of the sequence ratio, 1 - epsilon; in [0, 1). Paper: 3e-4.
        epsilon_high: upper clip range, 1 + epsilon_high; >= 0. Paper: 4e-4.

    With several updates per rollout, `old_logps_source="rollout"` saves a forward (section 5.4): use it where the
    sampler computes in the trainer's precision.

    `aggregation`, `old_logps_source`, `record` and more: see `BasePolicyConfig`. All other options of `trl.GRPOConfig`
    are honored; `loss_type` and `importance_sampling_level` are what makes the method and cannot be changed.

    Raises:
        ValueError: an option is out of range, or has no effect in GSPO.
    """

    _METHOD: ClassVar[str] = "GSPO"
    _UNUSED: ClassVar[tuple[str, ...]] = (*SAPO_OPTIONS, *VESPO_OPTIONS)

    epsilon: float = field(
        default=3e-4, metadata={"help": "Lower clip range of the sequence ratio (GSPO paper: 3e-4)."}
    )
    epsilon_high: float | None = field(
        default=4e-4, metadata={"help": "Upper clip range of the sequence ratio (GSPO paper: 4e-4)."}
    )
    loss_type: str = field(default="grpo", metadata={"help": "Fixed by GSPO; use `aggregation`."})
    importance_sampling_level: str = field(default="sequence", metadata={"help": "Fixed by GSPO."})

    def __post_init__(self) -> None:
        self._check_clip_range()
        self._fix("loss_type", "grpo", AGGREGATION_HINT)
        self._fix("importance_sampling_level", "sequence", "Use SAPOTrainer or trl.GRPOTrainer for token ratios.")
        self._check_gspo()
        super().__post_init__()


class GSPOTrainer(BasePolicyTrainer):
    """Trains with one importance ratio and one clip decision per sequence (GSPO, arXiv 2507.18071).

    A drop-in for `trl.GRPOTrainer`: the same constructor arguments, datasets, reward functions and callbacks. Where a
    subclass or an `on_rollout` callback makes the advantages per token, (B, T), GSPO-token (eqs. 13-14) is used.

    Examples:
        >>> trainer = GSPOTrainer(model, reward_funcs=reward, args=GSPOConfig("out"), train_dataset=dataset)
        >>> trainer.train()
    """

    _CONFIG = GSPOConfig
    _name = "GSPO"
    _tag_names: ClassVar[list[str]] = ["trl", "gspo", "trl-softgate"]
    _paper: ClassVar[dict[str, Any]] = {
        "title": "Group Sequence Policy Optimization",
        "id": "2507.18071",
        "citation": """@article{zheng2025gspo,
  title         = {Group Sequence Policy Optimization},
  author        = {Zheng, Chujie and others},
  year          = {2025},
  eprint        = {2507.18071},
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
        return gspo_loss(
            per_token_logps,
            old_per_token_logps,
            advantages,
            mask,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            level="token" if advantages.dim() == 2 else "sequence",
            delta=self.args.delta,
        )
