"""Records how far the weights have moved, at each checkpoint."""

import json
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..diagnostics.drift import DriftError, weight_drift
from ..diagnostics.record import read_lines, record_folder, write_lines

_KEYS = ("name", "layer", "absolute", "relative", "stable_rank")


class WeightDriftCallback(TrainerCallback):
    """Compares each checkpoint with the weights that training began with, and appends a line for each matrix to
    `<output_dir>/record/drift.jsonl`: {"step", "name", "layer", "absolute", "relative", "stable_rank"}, see
    `trl_softgate.diagnostics.drift.MatrixDrift`.

        >>> trainer = SAFDistillTrainer(..., callbacks=[WeightDriftCallback()])

    The main process reads the files of the checkpoint, whole models and LoRA adapters, while the others wait for it:
    for a large model give it `device="cuda"`, where it needs the memory of a few float32 copies of the largest matrix,
    or raise `ddp_timeout`.
    A checkpoint that cannot be compared (weights in a sharded format, NaN) gives a warning and no lines; training goes
    on. A resumed run drops the lines of steps that it repeats.

    Args:
        base: folder of the whole model that training began with; default: where the model, or an
            adapter's base model, was loaded from.
        device: where to compute.

    Raises:
        ValueError: when training begins, if there is no such folder.
    """

    def __init__(self, base: str | Path | None = None, *, device: str = "cpu") -> None:
        self.base = base
        self.device = device
        self._folder: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        self._folder = self._find_base(model)
        file = _file(args)
        if state.is_world_process_zero and (rows := read_lines(file)):
            write_lines(file, [row for row in rows if row["step"] <= state.global_step])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        assert self._folder is not None, "training began before"
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        try:
            drift = weight_drift(self._folder, checkpoint, device=self.device)
        except DriftError as error:
            warnings.warn(f"No weight drift at step {state.global_step}: {error}", UserWarning, stacklevel=2)
            return
        rows = [{"step": state.global_step} | {key: getattr(row, key) for key in _KEYS} for row in drift.matrices]
        file = _file(args)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write("".join(json.dumps(row) + "\n" for row in rows))

    def _find_base(self, model: Any) -> Path:
        base = self.base
        if base is None:
            adapter = getattr(model, "active_peft_config", None)
            base = model.config.name_or_path if adapter is None else adapter.base_model_name_or_path
        if base and Path(base).is_dir():
            return Path(base)
        try:
            return Path(snapshot_download(str(base), local_files_only=True))  # loaded from the hub, so it is cached
        except (OSError, ValueError) as error:
            raise ValueError(
                f"The weights that training began with are in no folder here ({base!r}): give theirs as "
                "`WeightDriftCallback(base=FOLDER)`."
            ) from error


def _file(args: Any) -> Path:
    return record_folder(args.output_dir) / "drift.jsonl"
