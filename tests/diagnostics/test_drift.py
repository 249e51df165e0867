"""Weight drift against numpy's singular values, and adapters against PEFT's own merge."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import tiny
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from trl_softgate.diagnostics import drift
from trl_softgate.diagnostics.drift import (
    Drift,
    DriftError,
    by_layer,
    directions,
    frobenius_norm,
    spectral_norm,
    stable_rank,
    subspace_overlap,
    weight_drift,
)

PATTERNS: dict[str, Any] = dict(rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.mlp.up_proj": 40})


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def save(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    save_file(
        {
            name.replace("__", "."): tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        },
        folder / "model.safetensors",
    )
    return folder


def moved(model: Qwen3ForCausalLM, seed: int) -> Qwen3ForCausalLM:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model


def adapter(folder: Path, base: Path, seed: int = 0, **options: Any) -> Any:
    """A saved LoRA of `base` whose update is not zero."""
    model: Any = Qwen3ForCausalLM.from_pretrained(base)
    settings: dict[str, Any] = dict(r=4, lora_alpha=12, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(seed)
    adapted: Any = peft.get_peft_model(model, LoraConfig(**{**settings, **options}))
    adapted.save_pretrained(folder)
    return adapted


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drift") / "base"
    tiny.model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", [(7, 7), (40, 9), (9, 40)])
def test_norms_and_stable_rank_are_numpys(shape: tuple[int, int]) -> None:
    update = random(*shape)
    values = np.linalg.svd(update.double().numpy(), compute_uv=False)
    assert frobenius_norm(update) == pytest.approx(math.sqrt((values**2).sum()), rel=1e-6)
    assert spectral_norm(update) == pytest.approx(values[0], rel=1e-5)
    assert stable_rank(frobenius_norm(update), spectral_norm(update)) == pytest.approx(
        (values**2).sum() / values[0] ** 2, rel=1e-5
    )


def test_stable_rank_of_known_updates() -> None:
    assert spectral_norm(torch.zeros(5, 3)) == 0
    assert stable_rank(0.0, 0.0) == 0
    for update, rank in ((torch.ones(5, 3), 1), (torch.eye(6), 6), (torch.diag(torch.tensor([2.0, 1.0])), 1.25)):
        assert stable_rank(frobenius_norm(update), spectral_norm(update)) == pytest.approx(rank)


@pytest.mark.parametrize("falls_off", [0.5, 1.0])
def test_a_randomized_svd_agrees_with_the_exact_one(falls_off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.linalg.qr(random(300, 260))[0], torch.linalg.qr(random(280, 260, seed=1))[0]
    update = left * torch.arange(1, 261).float() ** -falls_off @ right.T
    exact = directions(update, 16)
    monkeypatch.setattr(drift, "_EXACT_UP_TO", 100)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a GPU was seeded"))
    state = torch.random.get_rng_state()
    found = directions(update, 16)
    torch.testing.assert_close(found.values, exact.values, rtol=1e-5, atol=0)
    assert spectral_norm(update) == pytest.approx(1, rel=1e-5)
    for one, two in ((found.left, exact.left), (found.right, exact.right)):
        assert subspace_overlap(one, two) == pytest.approx(1, abs=1e-3)
    # training's random numbers go on as without it, and each call gives the same
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(directions(update, 16).left, found.left)


def test_a_randomized_svd_of_noise_is_as_exact_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    update = random(300, 400)
    exact = spectral_norm(update)
    monkeypatch.setattr(drift, "_EXACT_UP_TO", 100)
    assert spectral_norm(update) == pytest.approx(exact, rel=1e-3)


def test_the_first_directions_are_numpys() -> None:
    update = random(12, 9)
    found = directions(update, 3)
    left, values, right = np.linalg.svd(update.double().numpy(), full_matrices=False)
    np.testing.assert_allclose(found.values, values[:3], rtol=1e-5)
    # singular vectors have no sign: compare the projections
    np.testing.assert_allclose(found.left @ found.left.T, left[:, :3] @ left[:, :3].T, atol=1e-5)
    np.testing.assert_allclose(found.right @ found.right.T, right[:3].T @ right[:3], atol=1e-5)
    with pytest.raises(ValueError, match="`top_k`"):
        directions(update, 0)


def test_directions_end_at_the_rank() -> None:
    assert directions(random(20, 3) @ random(3, 30, seed=1), 16).left.shape == (20, 3)
    assert directions(torch.zeros(4, 5), 16).left.shape == (4, 0)


def test_overlap_of_known_subspaces() -> None:
    basis = torch.linalg.qr(random(20, 8))[0]
    assert subspace_overlap(basis[:, :4], basis[:, :4]) == pytest.approx(1)
    assert subspace_overlap(basis[:, :4], basis[:, 4:]) == pytest.approx(0, abs=1e-12)
    assert subspace_overlap(basis[:, :4], basis[:, 2:6]) == pytest.approx(0.5)
    # another basis of the same subspace; and the further columns of the larger one are left out
    turned = basis[:, :4] @ torch.linalg.qr(random(4, 4, seed=2))[0]
    assert subspace_overlap(turned, basis) == pytest.approx(1)
    assert subspace_overlap(basis[:, :0], basis) is None


def test_principal_angles() -> None:
    """Two planes at angles of 30 and 60 degrees: (cos^2 30 + cos^2 60) / 2."""
    first = torch.eye(4)[:, :2]
    a, b = math.radians(30), math.radians(60)
    second = torch.tensor([[math.cos(a), 0], [0, math.cos(b)], [math.sin(a), 0], [0, math.sin(b)]])
    assert subspace_overlap(first, second) == pytest.approx((math.cos(a) ** 2 + math.cos(b) ** 2) / 2)


def compare_with_numpy(found: Drift, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert found.matrices
    for row in found.matrices:
        old, update = before[row.name].double().numpy(), (after[row.name] - before[row.name]).double().numpy()
        values = np.linalg.svd(update, compute_uv=False)
        assert row.base == pytest.approx(np.linalg.norm(old), rel=1e-5)
        assert row.absolute == pytest.approx(np.linalg.norm(update), rel=1e-4)
        assert row.relative == pytest.approx(np.linalg.norm(update) / np.linalg.norm(old), rel=1e-4)
        assert row.stable_rank == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-3)


def test_a_whole_checkpoint_in_shards(base: Path, tmp_path: Path) -> None:
    moved(tiny.model(), 1).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    moved(tiny.model(), 1).save_pretrained(tmp_path / "whole")
    found = weight_drift(base, tmp_path / "shards")
    assert found == weight_drift(base, tmp_path / "whole")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "whole"))
    compare_with_numpy(found, before, after)
    assert {row.name for row in found.matrices} == {name for name, value in before.items() if value.ndim == 2}
    assert [row.layer for row in found.matrices] == [0] * 7 + [1] * 7 + [None]
    assert (found.other, found.overlaps, found.left_out) == ([], [], [])


@pytest.mark.parametrize(
    "options",
    [
        {},
        PATTERNS,
        {"use_rslora": True, **PATTERNS},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]},
    ],
    ids=["plain", "patterns", "rslora", "embedding", "modules_to_save"],
)
def test_an_adapter_is_what_peft_merges(options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    adapted = adapter(tmp_path / "adapter", base, **options)
    if "modules_to_save" in options:
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "modules_to_save" in name:
                    parameter += 0.1 * random(*parameter.shape)
        adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    before = load_file(base / "model.safetensors")
    found = weight_drift(base, tmp_path / "adapter")
    compare_with_numpy(found, before, merged)
    changed = {name for name in before if before[name].ndim == 2 and not torch.equal(before[name], merged[name])}
    assert {row.name for row in found.matrices} == changed
    # norms do not tell a matrix from its transpose
    for name, update in drift._updates(drift._Weights(base), tmp_path / "adapter", set()).items():
        torch.testing.assert_close(update(), merged[name] - before[name], atol=1e-6, rtol=1e-4)


def test_layers_sum_up_their_matrices(base: Path, tmp_path: Path) -> None:
    moved(tiny.model(), 1).save_pretrained(tmp_path / "checkpoint")
    found = weight_drift(base, tmp_path / "checkpoint").matrices
    layers = by_layer(found)
    assert [layer.layer for layer in layers] == ["0", "1", "embed_tokens"]
    rows = [row for row in found if row.layer == 1]
    absolute, norm = (math.sqrt(sum(getattr(row, key) ** 2 for row in rows)) for key in ("absolute", "base"))
    assert layers[1].matrices == len(rows) == 7
    assert layers[1].absolute == pytest.approx(absolute)
    assert layers[1].relative == pytest.approx(absolute / norm)
    assert layers[1].stable_rank == pytest.approx(sum(row.stable_rank for row in rows) / 7)


def test_two_runs_in_the_same_and_in_orthogonal_directions(tmp_path: Path) -> None:
    left, right = torch.linalg.qr(random(24, 8))[0], torch.linalg.qr(random(30, 8, seed=1))[0]
    start, first, second = random(24, 30, seed=2), left[:, :4] @ right[:, :4].T, left[:, 4:] @ right[:, :4].T
    base = save(tmp_path / "base", layers__0__w=start, still__w=start)
    one = save(tmp_path / "one", layers__0__w=start + first, still__w=start)
    two = save(tmp_path / "two", layers__0__w=start + second, still__w=start)
    same = weight_drift(base, one, one, top_k=4)
    assert same.matrices == same.other
    assert same.overlaps[0].left == pytest.approx(1, abs=1e-4)
    assert same.overlaps[0].right == pytest.approx(1, abs=1e-4)
    apart = weight_drift(base, one, two, top_k=4)
    assert apart.overlaps[0].left == pytest.approx(0, abs=1e-4)
    assert apart.overlaps[0].right == pytest.approx(1, abs=1e-4)
    # a matrix that has not moved has no directions
    still = apart.matrices[1]
    assert (still.absolute, still.relative, still.stable_rank) == (0, 0, 0)
    assert (apart.overlaps[1].left, apart.overlaps[1].right) == (None, None)


def test_a_matrix_of_zeros_has_no_relative_drift(tmp_path: Path) -> None:
    base = save(tmp_path / "base", w=torch.zeros(3, 4))
    row = weight_drift(base, save(tmp_path / "run", w=torch.ones(3, 4))).matrices[0]
    assert (row.relative, row.layer) == (None, None)
    assert by_layer([row])[0].relative is None


def test_what_is_compared_and_what_is_left_out(tmp_path: Path) -> None:
    stack = random(3, 4, 5)
    base = save(
        tmp_path / "base", experts__w=stack, w=random(4, 4), norm=random(4), conv=random(4, 1, 3), old=random(2, 2)
    )
    run = save(tmp_path / "run", experts__w=2 * stack, w=random(4, 4).bfloat16(), norm=random(4), new=random(2, 2))
    found = weight_drift(base, run)
    assert [row.name for row in found.matrices] == ["experts.w[0]", "experts.w[1]", "experts.w[2]", "w"]
    assert [row.relative for row in found.matrices[:3]] == [pytest.approx(1)] * 3
    assert found.left_out == ["new", "old"]


def test_layers_are_in_their_order(tmp_path: Path) -> None:
    names = [f"layers__{i}__w" for i in (10, 9, 2)] + ["head__w"]
    base = save(tmp_path / "base", **{name: random(2, 2) for name in names})
    found = [row.name for row in weight_drift(base, base).matrices]
    assert found == ["layers.2.w", "layers.9.w", "layers.10.w", "head.w"]


def edit(folder: Path, **changes: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_dora": True}, "a LoRA with `use_dora`"),
        ({"init_lora_weights": "pissa"}, "changes its base model"),
        ({"peft_type": "IA3"}, "of the kind IA3; only LoRA is read"),
        ({"peft_type": "NONSENSE"}, "adapter_config.json cannot be read"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    change: dict[str, Any], sentence: str, base: Path, tmp_path: Path
) -> None:
    adapter(tmp_path / "adapter", base)
    with pytest.raises(DriftError, match=sentence):
        weight_drift(base, edit(tmp_path / "adapter", **change))


def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    adapter(tmp_path / "adapter", base)
    tiny.model(hidden=64).save_pretrained(tmp_path / "wider")
    with pytest.raises(
        DriftError, match="an adapter of another base model .*: it changes .*, which is 64 x 128 in"
    ) as wide:
        weight_drift(tmp_path / "wider", tmp_path / "adapter")
    assert str(base) in str(wide.value)
    tiny.model(layers=1).save_pretrained(tmp_path / "shallow")
    with pytest.raises(DriftError, match="which is missing in"):
        weight_drift(tmp_path / "shallow", tmp_path / "adapter")
    # the same shapes: told by the weights of the folder that it was trained on
    tiny.model(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(DriftError, match="it was trained on .*base, whose"):
        weight_drift(tmp_path / "other", tmp_path / "adapter")
    # a copy in bfloat16 is the same base
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path / "copy")  # type: ignore[call-arg]
    assert weight_drift(tmp_path / "copy", tmp_path / "adapter").matrices
    with pytest.raises(DriftError, match="is an adapter: give its base model's folder"):
        weight_drift(tmp_path / "adapter", base)


def test_folders_that_cannot_be_compared(tmp_path: Path) -> None:
    start = random(4, 4)
    base = save(tmp_path / "base", w=start)
    (tmp_path / "empty").mkdir()
    broken = save(tmp_path / "broken", w=start)
    (broken / "model.safetensors").write_bytes(b"no weights")
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    cases = {
        tmp_path / "nowhere": "nowhere is no folder",
        tmp_path / "empty": "empty holds no weights: neither model.safetensors nor",
        broken: "broken/model.safetensors cannot be read",
        shards: "model-1.safetensors cannot be read",
        save(tmp_path / "vector", v=start[0]): "vector holds no weight matrix",
        save(tmp_path / "shape", w=random(4, 5)): "w is 4 x 5 in .*shape and 4 x 4 in .*base",
        save(tmp_path / "names", v=start): "No matrix of .*names is also in .*base",
        save(tmp_path / "nan", w=start.where(start > 0, math.nan)): "w of .*nan holds values that are NaN or infinite",
        save(tmp_path / "int8", w=start.to(torch.int8)): "w of .*int8 is stored as I8: give unquantized weights",
    }
    for folder, sentence in cases.items():
        with pytest.raises(DriftError, match=sentence) as refused:
            weight_drift(base, folder)
        assert "\n" not in str(refused.value)
        with pytest.raises(DriftError):
            weight_drift(folder, base)
    with pytest.raises(ValueError, match="`top_k`"):
        weight_drift(base, base, base, top_k=0)
    with pytest.raises(DriftError, match="Cannot compute on 'abacus'"):
        weight_drift(base, base, device="abacus")
