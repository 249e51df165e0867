"""Stable reinforcement learning for language models: GSPO, SAPO and SAF distillation on top of TRL's GRPOTrainer.

Public names are imported on first use, so `import trl_softgate` loads neither torch nor trl.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "CollapseGuard": "callbacks",
    "FusionSchedule": "fusion",
    "GSPOConfig": "trainers.gspo",
    "GSPOTrainer": "trainers.gspo",
    "SAFDistillConfig": "trainers.saf_distill",
    "SAFDistillTrainer": "trainers.saf_distill",
    "SAPOConfig": "trainers.sapo",
    "SAPOTrainer": "trainers.sapo",
    "TeacherLogprobsCallback": "callbacks",
    "WeightDriftCallback": "callbacks",
}

__all__ = [
    "CollapseGuard",
    "FusionSchedule",
    "GSPOConfig",
    "GSPOTrainer",
    "SAFDistillConfig",
    "SAFDistillTrainer",
    "SAPOConfig",
    "SAPOTrainer",
    "TeacherLogprobsCallback",
    "WeightDriftCallback",
    "__version__",
]

if TYPE_CHECKING:
    from .callbacks import CollapseGuard, TeacherLogprobsCallback, WeightDriftCallback
    from .fusion import FusionSchedule
    from .trainers.gspo import GSPOConfig, GSPOTrainer
    from .trainers.saf_distill import SAFDistillConfig, SAFDistillTrainer
    from .trainers.sapo import SAPOConfig, SAPOTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
