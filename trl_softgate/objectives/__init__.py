"""Pure tensor functions: importance ratios, policy losses, divergences, reductions.

Letters: `B` rows (completions), `T` completion positions. Nothing here knows a trainer, a config or a process group.
"""

from .divergence import k3_divergence
from .gates import GATE_KERNELS, Gate, soft_gate, soft_gate_weight
from .policy import ObjectiveOutput, grpo_loss, gspo_loss, sapo_loss
from .ratios import LOG_RATIO_BOUND, bounded_exp, log_ratio, sequence_log_ratio
from .reduction import AGGREGATIONS, reduce_loss
from .temperature import AdaptiveTemperature

__all__ = [
    "AGGREGATIONS",
    "GATE_KERNELS",
    "LOG_RATIO_BOUND",
    "AdaptiveTemperature",
    "Gate",
    "ObjectiveOutput",
    "bounded_exp",
    "grpo_loss",
    "gspo_loss",
    "k3_divergence",
    "log_ratio",
    "reduce_loss",
    "sapo_loss",
    "sequence_log_ratio",
    "soft_gate",
    "soft_gate_weight",
]
