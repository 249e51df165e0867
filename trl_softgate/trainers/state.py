"""What a checkpoint must hold beyond TRL's, so that a resumed run equals one that never stopped.

One safetensors file per process: the rollout buffer as tensors, everything else as JSON, so that both are written by
one atomic rename. The JSON is a tensor of bytes: the header of a safetensors file is limited to 100 MB, and logged
completions of a large batch exceed that.
"""

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.trainer_utils import sort_checkpoints

_FORMAT = 1
_COMPLETE = "softgate_complete"
_JSON = "json"


@dataclass
class TrainingState:
    """State of one process at the end of an optimizer step.

    Attributes:
        geometry: settings that must be the same in the resumed run, by name; JSON types.
        micro_step: micro-batches done since the start of training.
        buffer: rollouts still to be used, one dict per slice of the generation batch; None outside a reuse window.
        progress: anything else that is needed, JSON types.
        tensors: single tensors that are needed, by name.
    """

    geometry: dict[str, Any]
    micro_step: int
    buffer: list[dict[str, Any]] | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def state_path(checkpoint: str | os.PathLike[str], process_index: int) -> Path:
    """The state file of one process in a checkpoint folder."""
    return Path(checkpoint) / f"softgate_state_{process_index}.safetensors"


def mark_complete(checkpoint: str | os.PathLike[str]) -> None:
    """Say that every process has written all of its part of a checkpoint folder."""
    (Path(checkpoint) / _COMPLETE).touch()


def unmark(checkpoint: str | os.PathLike[str]) -> None:
    """Take the mark from a folder that is about to be written again."""
    (Path(checkpoint) / _COMPLETE).unlink(missing_ok=True)


def is_complete(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether the writing of a checkpoint folder has come to its end."""
    return (Path(checkpoint) / _COMPLETE).is_file()


def last_complete(run_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint folder of a run whose writing has come to its end."""
    folders = [folder for folder in sort_checkpoints(str(run_dir)) if is_complete(folder)]
    return folders[-1] if folders else None


def save_state(path: Path, state: TrainingState) -> None:
    """Write `state` to `path`: complete, or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {f"tensors/{name}": tensor for name, tensor in state.tensors.items()}
    plain: list[dict[str, Any]] = []
    for i, batch in enumerate(state.buffer or []):
        plain.append({})
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                tensors[f"buffer/{i}/{name}"] = value
            else:
                plain[i][name] = value
    header = {
        "format": _FORMAT,
        "geometry": state.geometry,
        "micro_step": state.micro_step,
        "progress": state.progress,
        "buffer": None if state.buffer is None else plain,
    }
    text = json.dumps(header, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")
    tensors[_JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    # clone: the slices of a batch are views of one storage, which safetensors refuses
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    """numpy and torch numbers as Python's; anything else that JSON does not know as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def load_state(path: Path, device: torch.device) -> TrainingState:
    """Read what `save_state` wrote, tensors on `device`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or was written by another format version.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        # by way of the CPU: safetensors does not know every name that torch has for a device
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        header = json.loads(tensors.pop(_JSON).numpy().tobytes().decode("utf-8", "surrogatepass"))
        if header["format"] != _FORMAT:
            raise ValueError(f"its format is {header['format']}, this version reads {_FORMAT}")
        buffer: list[dict[str, Any]] | None = header["buffer"]
        state = TrainingState(header["geometry"], header["micro_step"], buffer, header["progress"])
    except Exception as error:
        raise ValueError(f"{path} is not a readable training state: {error}") from error
    for name, tensor in tensors.items():
        kind, *rest = name.split("/", 2)
        if kind == "buffer" and buffer is not None:
            buffer[int(rest[0])][rest[1]] = tensor.to(device)
        else:
            state.tensors[rest[0]] = tensor.to(device)
    return state


def random_state() -> tuple[Any, ...]:
    """State of every generator that a checkpoint of transformers holds."""
    device = torch.get_device_module().get_rng_state() if torch.accelerator.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), device


def set_random_state(state: tuple[Any, ...]) -> None:
    """Take back what `random_state` gave."""
    python, numpy, cpu, device = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if device is not None:
        torch.get_device_module().set_rng_state(device)
