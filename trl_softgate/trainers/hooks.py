"""The one place that names what the trainers use of TRL beyond its documented API.

Checked at import, so that an unfit TRL is reported as that and not as an `AttributeError` in the middle of a run.
"""

import trl
from trl import GRPOTrainer
from trl.trainer import utils

SUPPORTED_TRL = ">=1.16,<1.17"

# Overridden or called on GRPOTrainer. Of its instances we use `_step`, `_buffered_inputs`, `_metrics`, `_logs`,
# `_entropy_bonus_enabled`, `_last_world_entropy`, `_entropy_window_stats`, `_tokenizer`, `_is_vlm` and of
# transformers.Trainer `_tr_loss`, `_total_loss_scalar`, `_globalstep_last_logged`, `_get_output_dir` and
# `_maybe_log_save_evaluate`.
_TRAINER_HOOKS = (
    "_compute_loss",
    "_generate",
    "_generate_and_score_completions",
    "_generate_single_turn",
    "_get_grad_norm",
    "_get_per_token_logps_and_entropies",
    "_get_train_sampler",
    "_load_optimizer_and_scheduler",
    "_prepare_inputs",
    "_save_checkpoint",
    "get_high_entropy_mask",
    "get_off_policy_mask",
)
_UTILS_HOOKS = ("RepeatSampler", "add_fused_lm_head", "create_model_from_path", "get_config_model_id", "pad")

_missing = [f"GRPOTrainer.{name}" for name in _TRAINER_HOOKS if not hasattr(GRPOTrainer, name)]
_missing += [f"trl.trainer.utils.{name}" for name in _UTILS_HOOKS if not hasattr(utils, name)]
if _missing:
    raise ImportError(
        f"trl_softgate works with trl{SUPPORTED_TRL}; the installed trl {trl.__version__} has no "
        f"{', '.join(_missing)}. "
        f'Install a fitting version: pip install "trl{SUPPORTED_TRL}".'
    )
