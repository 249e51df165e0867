"""How far, and in which directions, training has moved the weights (arXiv 2607.29209, figures 5 to 7, appendix B).

Letters: W0 (m, n) is a weight matrix before training, dW = W - W0 its update, s_1 >= s_2 >= ... the singular values of
dW, U (m, k) and V (n, k) its first k left and right singular vectors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..validation import require_whole

# Up to this many rows or columns (the fewer of both) the singular values are exact.
_EXACT_UP_TO = 1024
# Beyond, `torch.svd_lowrank` with these. Measured on 1200 x 1500: where the singular values fall like i**-0.5 or
# faster, s_1 has a relative error of 1e-6 and the first 16 directions overlap with the exact ones to 1 - 1e-4; for
# pure noise, whose singular values hardly fall, the error is 6e-4 and the overlap 0.9.
_OVERSAMPLING = 16
_POWER_ITERATIONS = 16

_FLOATS = ("F64", "F32", "F16", "BF16")
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_PREFIX = "base_model.model."
# Ways to begin a LoRA that leave the base model as it is; the others (PiSSA, OLoRA, ...) subtract from it first.
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")


class DriftError(ValueError):
    """Two folders of weights cannot be compared; the message says why, in one sentence."""


@dataclass(frozen=True)
class MatrixDrift:
    """How far one weight matrix has moved.

    Attributes:
        name: of the tensor in the file; a matrix of a stack of experts has its index behind it.
        layer: number of the layer, None outside of the layers.
        base: ||W0||_F.
        absolute: ||dW||_F.
        relative: ||dW||_F / ||W0||_F; None where W0 is zero.
        stable_rank: see `stable_rank`.
    """

    name: str
    layer: int | None
    base: float
    absolute: float
    relative: float | None
    stable_rank: float


@dataclass(frozen=True)
class MatrixOverlap:
    """`subspace_overlap` of two runs' updates of one matrix, in the left and the right singular subspace; None where
    an update is zero and has no directions."""

    name: str
    layer: int | None
    left: float | None
    right: float | None


@dataclass(frozen=True)
class Drift:
    """What `weight_drift` has found.

    Attributes:
        matrices: one for each matrix that both folders hold (of an adapter: that it changes), in the order of layers.
        other: the same matrices of the other run; empty without one.
        overlaps: of the two runs; empty without another.
        left_out: names of matrices that only one of the folders holds.
    """

    matrices: list[MatrixDrift]
    other: list[MatrixDrift]
    overlaps: list[MatrixOverlap]
    left_out: list[str]


@dataclass(frozen=True)
class LayerDrift:
    """The matrices of one layer together: norms over all their elements, and their mean stable rank."""

    layer: str
    matrices: int
    absolute: float
    relative: float | None
    stable_rank: float


@dataclass(frozen=True)
class Directions:
    """The first k singular triplets: `left` (m, k), `values` (k,), `right` (n, k)."""

    left: torch.Tensor
    values: torch.Tensor
    right: torch.Tensor


def frobenius_norm(matrix: torch.Tensor) -> float:
    """||matrix||_F, summed in float64."""
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64))


def directions(update: torch.Tensor, top_k: int) -> Directions:
    """The first singular triplets of `update`, at most `top_k`: none for a singular value that is zero up to rounding,
    for its vectors would be arbitrary.

    Args:
        update: (m, n), float32 or float64. Exact where min(m, n) <= 1024, else a randomized SVD, whose seed is fixed
            and leaves the caller's random numbers alone.
        top_k: >= 1.
    """
    require_whole("top_k", top_k, minimum=1)
    if min(update.shape) <= _EXACT_UP_TO:
        left, values, right_transposed = torch.linalg.svd(update, full_matrices=False)
        right = right_transposed.mT
    else:
        cuda = update.device.type == "cuda"
        # not torch.manual_seed, which would also seed the GPUs that a training samples on
        generator = torch.cuda.default_generators[update.device.index] if cuda else torch.default_generator
        with torch.random.fork_rng(devices=[update.device] if cuda else []):
            generator.manual_seed(0)
            q = min(top_k + _OVERSAMPLING, *update.shape)
            left, values, right = torch.svd_lowrank(update, q=q, niter=_POWER_ITERATIONS)
    tolerance = values[0] * max(update.shape) * torch.finfo(update.dtype).eps
    k = min(top_k, int((values > tolerance).sum()))
    return Directions(left[:, :k], values[:k], right[:, :k])


def spectral_norm(update: torch.Tensor) -> float:
    """s_1 of `update` (m, n), exact where `directions` is."""
    if min(update.shape) <= _EXACT_UP_TO:
        return float(torch.linalg.matrix_norm(update, 2))  # without vectors, in a third of the time
    return float(next(iter(directions(update, _OVERSAMPLING).values), 0.0))


def stable_rank(frobenius: float, spectral: float) -> float:
    """||dW||_F^2 / s_1^2, between 1 and the rank of dW; 0 for dW = 0."""
    return 0.0 if spectral == 0 else (frobenius / spectral) ** 2


def subspace_overlap(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """Mean squared cosine of the principal angles, ||U1^T U2||_F^2 / k.

    1 for the same subspace, 0 for orthogonal ones, about k/m for two random ones.

    Args:
        first: (m, k1), orthonormal columns in falling order of their singular values.
        second: (m, k2), likewise. k is the smaller of k1 and k2; the further columns of the other are left out.

    Returns:
        In [0, 1] up to rounding; None for k = 0.
    """
    k = min(first.shape[1], second.shape[1])
    return None if k == 0 else frobenius_norm(first[:, :k].mT @ second[:, :k]) ** 2 / k


def weight_drift(
    base: str | Path,
    checkpoint: str | Path,
    other: str | Path | None = None,
    *,
    top_k: int = 16,
    device: str | torch.device = "cpu",
    console: Console | None = None,
) -> Drift:
    """Compare the weights of `checkpoint`, and of a second run's `other`, with those of `base`, matrix by matrix.

    One matrix of each folder is in memory at a time, as float32. Vectors (norms, biases) are left out.

    Args:
        base: folder of a whole model in safetensors files, from which both runs started.
        checkpoint: folder of a whole model, or of a LoRA adapter of `base`, whose update is scale * B @ A.
        other: likewise, of the run to compare with.
        top_k: directions to compare `checkpoint` and `other` by, >= 1.
        device: where to compute, e.g. "cuda".
        console: shows the progress.

    Raises:
        DriftError: a folder is missing, has no weights, has no matrix or other shapes than `base`, holds quantized
            weights or values that are not finite, or is an adapter of another base or of another kind than LoRA; or
            there is no `device`.
    """
    require_whole("top_k", top_k, minimum=1)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DriftError(f"Cannot compute on {str(device)!r}: {str(error).splitlines()[0]}") from error
    weights = _Weights(Path(base))
    if _is_adapter(weights.folder):
        raise DriftError(f"{base} is an adapter: give its base model's folder, and the adapter's to compare with it.")
    left_out: set[str] = set()
    first = _updates(weights, Path(checkpoint), left_out)
    second = None if other is None else _updates(weights, Path(other), left_out)
    names = sorted((name for name in first if second is None or name in second), key=_natural)
    left_out |= {*first, *(second or {})}.difference(names)
    if not names:
        raise DriftError(f"No matrix of {checkpoint} is also in {base if other is None else other}.")

    found = Drift([], [], [], sorted(left_out, key=_natural))
    for name in track(names, "Comparing weights", console=console, disable=console is None):
        norm = frobenius_norm(weights.matrix(name).to(device))
        update = first[name]().to(device)
        if second is None:
            found.matrices.append(_matrix_drift(name, norm, update, spectral_norm(update)))
            continue
        update2 = second[name]().to(device)
        pair = directions(update, top_k), directions(update2, top_k)
        for rows, moved, ways in zip((found.matrices, found.other), (update, update2), pair, strict=True):
            rows.append(_matrix_drift(name, norm, moved, float(next(iter(ways.values), 0.0))))
        left = subspace_overlap(pair[0].left, pair[1].left)
        found.overlaps.append(MatrixOverlap(name, _layer(name), left, subspace_overlap(pair[0].right, pair[1].right)))
    return found


def by_layer(matrices: Iterable[MatrixDrift]) -> list[LayerDrift]:
    """Summed up by layer; a matrix outside of the layers is a line of its own."""
    groups: dict[str, list[MatrixDrift]] = {}
    for matrix in matrices:
        groups.setdefault(layer_label(matrix), []).append(matrix)
    layers = []
    for label, group in groups.items():
        absolute, base = (math.hypot(*norms) for norms in zip(*((m.absolute, m.base) for m in group), strict=True))
        rank = mean([m.stable_rank for m in group])
        assert rank is not None, "a group has a matrix"
        layers.append(LayerDrift(label, len(group), absolute, absolute / base if base > 0 else None, rank))
    return layers


def drift_table(drift: Drift) -> Table:
    """A line for each layer: of the run, of the other run if there is one, and their mean overlap."""
    columns = ["absolute", "relative", "stable\nrank"]
    if drift.other:
        # not its absolute drift: in 80 columns, rich would cut names
        columns += ["other:\nrelative", "stable\nrank", "overlap:\nleft", "\nright"]
    table = Table("layer", title="Weight drift", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.columns[0].overflow = "fold"
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    second = {layer.layer: layer for layer in by_layer(drift.other)}
    for layer in by_layer(drift.matrices):
        cells = [escape(layer.layer), *_cells(layer)]
        if drift.other:
            overlaps = [overlap for overlap in drift.overlaps if layer_label(overlap) == layer.layer]
            cells += _cells(second[layer.layer])[1:]
            cells += [_text(mean([getattr(overlap, side) for overlap in overlaps])) for side in ("left", "right")]
        table.add_row(*cells)
    return table


def _cells(layer: LayerDrift) -> list[str]:
    return [_text(layer.absolute), _text(layer.relative), _text(layer.stable_rank)]


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def write_drift(drift: Drift, file: Path) -> None:
    """As JSON: the fields of `Drift`, and `layers`, the summary of `matrices`."""
    content = asdict(drift) | {"layers": [asdict(layer) for layer in by_layer(drift.matrices)]}
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def layer_label(row: MatrixDrift | MatrixOverlap) -> str:
    """Number of the layer; outside of the layers the module's name."""
    return row.name.removeprefix("model.").removesuffix(".weight") if row.layer is None else str(row.layer)


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of those that are defined; None if none is."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def _matrix_drift(name: str, base: float, update: torch.Tensor, spectral: float) -> MatrixDrift:
    absolute = frobenius_norm(update)
    relative = absolute / base if base > 0 else None
    return MatrixDrift(name, _layer(name), base, absolute, relative, stable_rank(absolute, spectral))


def _layer(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts layer 10 behind layer 9, and what is outside of the layers behind them."""
    parts = [(False, int(part), "") if part.isdigit() else (True, 0, part) for part in name.split(".")]
    return [(_layer(name) is None, 0, ""), *parts]


def _is_adapter(folder: Path) -> bool:
    return (folder / _ADAPTER_CONFIG).is_file()


class _Weights:
    """The matrices of a folder of safetensors files, mapped to memory: none is read before it is asked for.

    `shapes` has each matrix by name; a stack (experts, 3-D) gives as many matrices, `name[i]`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[Path, str, int | None]] = {}
        if not folder.is_dir():
            raise DriftError(f"{folder} is no folder.")
        for file in self._files():
            try:
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():
                        self._note(file, name, tuple(opened.get_slice(name).get_shape()))
            except (OSError, SafetensorError) as error:
                raise DriftError(f"{file} cannot be read: {error}.") from error
        if not self.shapes:
            raise DriftError(f"{folder} holds no weight matrix.")

    def _files(self) -> list[Path]:
        name = SAFETENSORS_WEIGHTS_NAME if _is_adapter(self.folder) else SAFE_WEIGHTS_NAME
        if (self.folder / name).is_file():
            return [self.folder / name]
        index = self.folder / SAFE_WEIGHTS_INDEX_NAME
        if not index.is_file():
            raise DriftError(
                f"{self.folder} holds no weights: neither {name} nor {SAFE_WEIGHTS_INDEX_NAME} (other formats are "
                "not read)."
            )
        return [self.folder / shard for shard in sorted(set(json.loads(index.read_text())["weight_map"].values()))]

    def _note(self, file: Path, name: str, shape: tuple[int, ...]) -> None:
        if 0 in shape:
            return
        if len(shape) == 2:
            self.shapes[name] = shape
            self._places[name] = (file, name, None)
        elif len(shape) == 3 and "expert" in name:  # not a convolution
            for i in range(shape[0]):
                self.shapes[f"{name}[{i}]"] = shape[1:]
                self._places[f"{name}[{i}]"] = (file, name, i)

    def matrix(self, name: str) -> torch.Tensor:
        """(m, n), float32."""
        file, tensor, index = self._places[name]
        with safe_open(file, "pt") as opened:
            stored = opened.get_slice(tensor)
            if stored.get_dtype() not in _FLOATS:
                raise DriftError(
                    f"{name} of {self.folder} is stored as {stored.get_dtype()}: give unquantized weights."
                )
            matrix = (stored[:] if index is None else stored[index]).float()
        if not bool(matrix.isfinite().all()):
            raise DriftError(f"{name} of {self.folder} holds values that are NaN or infinite.")
        return matrix


def _updates(base: _Weights, folder: Path, left_out: set[str]) -> dict[str, Callable[[], torch.Tensor]]:
    """Matrix of `base` -> what gives its update. What only one of two whole models has goes to `left_out`."""
    weights = _Weights(folder)
    if _is_adapter(folder):
        return _adapter_updates(base, weights)
    left_out |= weights.shapes.keys() ^ base.shapes.keys()
    for name in sorted(weights.shapes.keys() & base.shapes.keys(), key=_natural):
        if weights.shapes[name] != base.shapes[name]:
            raise DriftError(
                f"{name} is {_size(weights.shapes[name])} in {folder} and {_size(base.shapes[name])} in {base.folder}."
            )
    return {name: partial(_difference, base, weights, name, name) for name in weights.shapes if name in base.shapes}


def _difference(base: _Weights, weights: _Weights, name: str, key: str) -> torch.Tensor:
    return weights.matrix(key) - base.matrix(name)


def _adapter_updates(base: _Weights, adapter: _Weights) -> dict[str, Callable[[], torch.Tensor]]:
    config = _lora_config(adapter.folder)
    updates: dict[str, Callable[[], torch.Tensor]] = {}
    for key, shape in adapter.shapes.items():
        inner = key.removeprefix(_ADAPTER_PREFIX)
        module, _, kind = inner.removesuffix(".weight").rpartition(".")
        if kind in ("lora_B", "lora_embedding_B"):
            continue  # comes with its A
        embedding = kind == "lora_embedding_A"
        if kind == "lora_A" or embedding:
            name, key_b = f"{module}.weight", key.replace(kind, f"{kind[:-1]}B")
            if key_b not in adapter.shapes:
                raise DriftError(f"{adapter.folder} holds {key} without {key_b}.")
            rank = shape[0]
            alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), module), config.lora_alpha)
            scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
            changed = (adapter.shapes[key_b][0], shape[1])
            transposed = embedding or config.fan_in_fan_out
            if transposed:
                changed = changed[::-1]
            updates[name] = partial(_product, adapter, key_b, key, scale, transposed)
        elif "lora_" in key:
            raise DriftError(f"{adapter.folder} holds {key}, which is no part of a plain LoRA.")
        else:  # a whole matrix: `modules_to_save`, or a resized embedding
            name, changed = inner.replace(".base_layer.", "."), shape
            # an embedding is saved beside a LoRA of it, which alone was trained
            updates.setdefault(name, partial(_difference, base, adapter, name, key))
        if base.shapes.get(name) != changed:
            there = _size(base.shapes[name]) if name in base.shapes else "missing"
            raise DriftError(
                f"{adapter.folder} is an adapter of another base model ({config.base_model_name_or_path}): it changes "
                f"{name}, {_size(changed)}, which is {there} in {base.folder}."
            )
    _check_recorded_base(base, adapter.folder, config.base_model_name_or_path, next(iter(updates), ""))
    return updates


def _lora_config(folder: Path) -> Any:
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DriftError(f"{folder / _ADAPTER_CONFIG} cannot be read: {error}.") from error
    if config.peft_type != "LORA":
        raise DriftError(f"{folder} is an adapter of the kind {config.peft_type.value}; only LoRA is read.")
    for option in ("use_dora", "target_parameters", "trainable_token_indices", "layer_replication"):
        if getattr(config, option):
            raise DriftError(f"{folder} is a LoRA with `{option}`, whose update is not scale * B @ A of a matrix.")
    if config.init_lora_weights not in _KEEPS_BASE:
        raise DriftError(
            f"{folder} is a LoRA with `init_lora_weights={config.init_lora_weights!r}`, which changes its base model: "
            "merge it, and give the merged folder."
        )
    return config


def _check_recorded_base(base: _Weights, folder: Path, recorded: str | None, name: str) -> None:
    """Where the folder that the adapter was trained on still lies there, it must hold the weights of `base`."""
    if recorded is None or not (Path(recorded) / SAFE_WEIGHTS_NAME).is_file() or base.folder.samefile(recorded):
        return
    trained_on = _Weights(Path(recorded))
    # 1e-2: the same weights may be stored in bfloat16 here and in float32 there
    if name in trained_on.shapes and not torch.allclose(trained_on.matrix(name), base.matrix(name), rtol=1e-2):
        raise DriftError(
            f"{folder} is an adapter of another base model: it was trained on {recorded}, whose {name} is not that of "
            f"{base.folder}."
        )


def _product(adapter: _Weights, key_b: str, key_a: str, scale: float, transposed: bool) -> torch.Tensor:
    update = scale * (adapter.matrix(key_b) @ adapter.matrix(key_a))
    return update.T if transposed else update


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
