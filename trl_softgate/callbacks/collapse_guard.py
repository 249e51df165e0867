"""Stops a run that collapses, or takes it back to where it was sound."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..diagnostics.health import HealthLimits, HealthMonitor, Transition
from ..diagnostics.record import read_lines, record_folder, write_lines
from ..validation import require_choice, require_number, require_whole

logger = logging.getLogger(__name__)

_TEMPERATURES = ("sapo_temperature_pos", "sapo_temperature_neg")


class CollapseGuard(TrainerCallback):
    """Watches reward, entropy, ratios, clipping, gates, gradient norm and length, and acts when a run collapses.

    Each change between healthy, warning and collapsed is logged with its evidence, and written to
    `output_dir/record/health.jsonl`. The state is part of checkpoints.

    Args:
        action: what follows on "collapsed": `"log"`; `"stop"`, with a checkpoint; `"rollback"`: go on from the newest
            checkpoint that was written while every signal was good, with the two factors applied; without one, stop.
        limits: when a signal is bad; default: `HealthLimits()`.
        learning_rate_factor: on the learning rate at each rollback, in (0, 1].
        temperature_factor: on SAPO's temperatures at each rollback, >= 1; a higher one damps large ratios more. Not
            with `adaptive_temperature_quantile`.
        max_rollbacks: after that many the run is stopped, >= 1.

    Raises:
        ValueError: an option is out of range.

    Examples:
        >>> SAPOTrainer(..., callbacks=[CollapseGuard(action="stop")])
    """

    def __init__(
        self,
        action: str = "log",
        limits: HealthLimits | None = None,
        learning_rate_factor: float = 0.5,
        temperature_factor: float = 1.0,
        max_rollbacks: int = 2,
    ) -> None:
        require_choice("action", action, ("log", "stop", "rollback"))
        require_number("learning_rate_factor", learning_rate_factor, above=0, maximum=1)
        require_number("temperature_factor", temperature_factor, minimum=1)
        require_whole("max_rollbacks", max_rollbacks, minimum=1)
        self.action = action
        self.limits = limits or HealthLimits()
        self.learning_rate_factor = learning_rate_factor
        self.temperature_factor = temperature_factor
        self.max_rollbacks = max_rollbacks
        self.monitor = HealthMonitor(self.limits)
        self.rollbacks = 0
        # steps of the checkpoints that were written while every signal was good
        self._sound: list[int] = []
        self._step = 0
        self._rollback_to: str | None = None
        self._temperatures: dict[str, float] = {}
        self._goes_back = False

    # Called by the trainer

    def take_rollback(self) -> str | None:
        """The checkpoint to go back to, if the run was stopped for that; asked once."""
        checkpoint, self._rollback_to = self._rollback_to, None
        self._goes_back = checkpoint is not None
        return checkpoint

    def state_dict(self) -> dict[str, Any]:
        """JSON types, for the checkpoint that is being written."""
        if self.monitor.sound and self._step not in self._sound:
            self._sound.append(self._step)
        return {"monitor": self.monitor.state_dict(), "rollbacks": self.rollbacks, "sound": self._sound}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; a rollback does not undo the count of rollbacks."""
        self.monitor.load_state_dict(state["monitor"])
        self.rollbacks = max(self.rollbacks, state["rollbacks"])
        self._sound = list(state["sound"])

    # Events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.monitor, self._sound = HealthMonitor(self.limits), []
        if self.temperature_factor != 1 and getattr(args, "adaptive_temperature_quantile", None) is not None:
            raise ValueError(
                "`temperature_factor` of CollapseGuard scales fixed temperatures, and `adaptive_temperature_quantile` "
                "chooses them anew at each step: set one of them."
            )
        if not self._temperatures:
            self._temperatures = {name: getattr(args, name) for name in _TEMPERATURES}
        for name, value in self._temperatures.items():
            setattr(args, name, value * self.temperature_factor**self.rollbacks)
        goes_back, self._goes_back = self._goes_back, False
        # of a new run, the recorder moves the older record away as a whole
        if state.is_world_process_zero and not goes_back and (state.global_step > 0 or not args.record):
            _rewind(_health_file(args), state.global_step)
        if state.is_world_process_zero and not self.rollbacks:
            print(f"CollapseGuard: {self.action} on collapse; limits: {self.limits.describe()}")

    def on_step_record(self, args: Any, state: Any, control: Any, *, scalars: dict[str, float], **kwargs: Any) -> None:
        self._step = state.global_step
        transition = self.monitor.observe(state.global_step, scalars)
        if transition is None:
            return
        action = None
        if transition.state == "collapsed":
            action = self._act(args, state, control)
        if state.is_world_process_zero:
            self._report(_health_file(args), transition, action)

    def _act(self, args: Any, state: Any, control: Any) -> str:
        if self.action == "log":
            return "log"
        control.should_training_stop = True
        if self.action == "rollback" and self.rollbacks < self.max_rollbacks:
            folders = [Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in reversed(self._sound)]
            target = next((folder for folder in folders if folder.is_dir()), None)
            if target is not None:
                self.rollbacks += 1
                self._rollback_to = str(target)
                control.should_save = False
                return f"rollback to {target.name}"
            logger.warning("No checkpoint was written while the run was sound: it is stopped instead of rolled back.")
        control.should_save = True
        return "stop"

    def _report(self, file: Path, transition: Transition, action: str | None) -> None:
        level = logging.INFO if transition.state == "healthy" else logging.WARNING
        logger.log(
            level, "Run %s: %s.%s", transition.state, transition.evidence, f" Action: {action}." if action else ""
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        line = {
            "step": transition.step,
            "state": transition.state,
            "evidence": transition.evidence,
            "action": action,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        with open(file, "a") as lines:
            lines.write(json.dumps(line) + "\n")


def _health_file(args: Any) -> Path:
    return record_folder(args.output_dir) / "health.jsonl"


def _rewind(file: Path, step: int) -> None:
    """Drop what a run said of later steps before it was resumed; what led to a rollback stays."""
    lines = read_lines(file)
    if not lines:
        return
    taken_back = max((i for i, line in enumerate(lines) if (line["action"] or "").startswith("rollback")), default=-1)
    kept = [line for i, line in enumerate(lines) if step > 0 and (i <= taken_back or line["step"] <= step)]
    write_lines(file, kept)
