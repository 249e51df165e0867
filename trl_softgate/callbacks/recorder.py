"""Writes what a run does, step by step, into its output folder."""

import time
from typing import Any

from transformers import TrainerCallback

from ..diagnostics.observer import WEIGHT_EDGES, Seen
from ..diagnostics.record import RunRecord, record_folder
from ..diagnostics.statistics import percentile
from ..environment import versions

_SECRET = ("token", "api_key")


class RunRecorder(TrainerCallback):
    """Appends to `output_dir/record` at the end of every optimizer step; a killed run keeps all steps that ended.

    Scalars of every step, and every `record_every` steps histograms, one line per row, and the tokens of three rows
    on which teacher and student agree or differ most. A resumed run goes on where its checkpoint was; a new run moves
    an older record out of the way.
    """

    def __init__(self, gate: bool) -> None:
        self._gate = gate
        self._record: RunRecord | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = record_folder(args.output_dir)
        if state.global_step == 0 and folder.exists():
            older = next(
                path for i in range(1, 10**6) if not (path := folder.with_name(f"{folder.name}-{i}")).exists()
            )
            folder.rename(older)
        self._record = RunRecord(args.output_dir, state.global_step)
        self._record.describe(
            {
                "method": type(args).__name__.removesuffix("Config"),
                "config": {name: value for name, value in args.to_dict().items() if not name.endswith(_SECRET)},
                "versions": {name: found for name, found in versions().items() if found is not None},
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
        )

    def on_step_record(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        scalars: dict[str, float],
        seen: Seen | None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        if self._record is None:
            return
        step = state.global_step
        if seen is not None:
            scalars = scalars | self._of_histograms(seen)
            self._write_seen(step, seen, processing_class)
        self._record.append("scalars", [{"step": step, "name": name, "value": v} for name, v in scalars.items()])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """What only the log has: loss (the mean since the last log), learning rate, evaluation."""
        if self._record is None:
            return
        rows = [
            {"step": state.global_step, "name": name, "value": float(value)}
            for name, value in (logs or {}).items()
            if (name in ("loss", "learning_rate") or name.startswith("eval_")) and isinstance(value, int | float)
        ]
        self._record.append("scalars", rows)

    def _of_histograms(self, seen: Seen) -> dict[str, float]:
        found = {}
        for sign in ("pos", "neg"):
            name = f"gate/weight_{sign}"
            if name in seen.histograms and sum(counts := seen.histograms[name][1]):
                found[f"{name}_p05"] = percentile(counts, WEIGHT_EDGES, 0.05)
        if seen.changed_experts:
            found["moe/changed_experts"] = sum(seen.changed_experts) / len(seen.changed_experts)
            found |= {f"moe/changed_experts/layer_{i:02}": share for i, share in enumerate(seen.changed_experts)}
        if seen.rows:
            columns = list(zip(*seen.rows, strict=True))
            found["log_ratio/row_variance"] = sum(columns[3]) / len(seen.rows)
            if self._gate:
                found["gate/gap_mean"] = sum(columns[4]) / len(seen.rows)
                found["gate/gap_bound"] = sum(columns[5]) / len(seen.rows)
        return found

    def _write_seen(self, step: int, seen: Seen, processing_class: Any) -> None:
        assert self._record is not None
        self._record.append(
            "histograms",
            [
                {"step": step, "name": name, "edges": edges, "counts": counts}
                for name, (edges, counts) in seen.histograms.items()
            ],
        )
        names = ("advantage", "length", "log_ratio_mean", "log_ratio_variance", "gate_gap", "gate_bound")
        lines = [{"step": step, "row": i, **dict(zip(names, row, strict=True))} for i, row in enumerate(seen.rows)]
        if not self._gate:
            lines = [{**line, "gate_gap": None, "gate_bound": None} for line in lines]
        self._record.append("rows", lines)
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self._record.append(
            "tokens",
            [
                {
                    "step": step,
                    "kind": kind,
                    "row": row,
                    "position": position,
                    "text": tokenizer.decode([token]),
                    "value": value,
                    "advantage": advantage,
                }
                for kind, row, tokens, advantage in seen.notable_rows()
                for position, token, value in tokens
            ],
        )
