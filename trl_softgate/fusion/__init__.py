"""SAF-OPD (arXiv 2607.29209): the teacher's per-token advantage, kept in bounds and fused with the GRPO advantage."""

from .advantages import (
    FusionOutput,
    fuse_advantages,
    has_teacher_value,
    opd_advantage,
    tanh_compress,
    top_k_percent_filter,
)
from .schedule import FusionSchedule

__all__ = [
    "FusionOutput",
    "FusionSchedule",
    "fuse_advantages",
    "has_teacher_value",
    "opd_advantage",
    "tanh_compress",
    "top_k_percent_filter",
]
