"""Cold-start models and their cache."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trl_softgate.tasks import cold_start
from trl_softgate.tasks.cold_start import (
    ColdStartProgress,
    ColdStartRecipe,
    cache_entry,
    default_cache_dir,
    is_intact,
    load_or_build,
    train_cold_start,
)

TINY = ColdStartRecipe(digits=1, hidden_size=16, layers=1, heads=1, steps=3, batch_size=4)


@pytest.fixture
def built(tmp_path: Path) -> Path:
    load_or_build(TINY, 0, cache_dir=tmp_path)
    return cache_entry(TINY, 0, tmp_path)


def weights(recipe: ColdStartRecipe, seed: int, cache_dir: Path) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in load_or_build(recipe, seed, cache_dir=cache_dir).parameters()])


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    first = weights(TINY, 0, tmp_path / "one")
    assert torch.equal(first, weights(TINY, 0, tmp_path / "two"))
    assert not torch.equal(first, weights(TINY, 1, tmp_path / "one"))


def test_building_leaves_the_random_state_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    load_or_build(TINY, 0, cache_dir=tmp_path)
    assert torch.equal(state, torch.random.get_rng_state())


def test_progress_is_reported_and_the_loss_falls() -> None:
    seen: list[ColdStartProgress] = []
    train_cold_start(replace(TINY, steps=40, learning_rate=1e-2), 0, on_progress=seen.append)
    assert [state.step for state in seen] == list(range(1, 41))
    assert seen[-1].loss < 0.8 * seen[0].loss


def test_training_stops_at_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "_LOSS_WORTH_CHECKING", 1e9)
    measured = iter([0.1, 0.2, 0.5])
    monkeypatch.setattr(cold_start, "evaluate_accuracy", lambda *args, **kwargs: next(measured))
    seen: list[ColdStartProgress] = []
    train_cold_start(replace(TINY, steps=20, stop_accuracy=0.4, check_every=2), 0, on_progress=seen.append)
    assert [state.accuracy for state in seen] == [None, 0.1, 0.1, 0.2, 0.2, 0.5]


def test_the_second_use_comes_from_the_cache(built: Path, tmp_path: Path) -> None:
    def forbidden(state: ColdStartProgress) -> None:
        raise AssertionError("trained again")

    model = load_or_build(TINY, 0, cache_dir=tmp_path, on_progress=forbidden)
    assert not model.training
    assert model.dtype == torch.float32
    assert [path.name for path in tmp_path.iterdir()] == [built.name]


def test_recipe_seed_and_version_change_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        cache_entry(TINY, 0, tmp_path),
        cache_entry(TINY, 1, tmp_path),
        cache_entry(replace(TINY, steps=4), 0, tmp_path),
    }
    monkeypatch.setattr("trl_softgate.__version__", "99")
    keys.add(cache_entry(TINY, 0, tmp_path))
    assert len(keys) == 4


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_SOFTGATE_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("TRL_SOFTGATE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "trl_softgate"


def truncate(entry: Path) -> None:
    weights_file = entry / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:100])


def flip_a_bit(entry: Path) -> None:
    weights_file = entry / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)


def drop_the_weights(entry: Path) -> None:
    (entry / "model.safetensors").unlink()


def drop_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def garble_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text("{")


def empty_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text(json.dumps({"files": {}}))


@pytest.mark.parametrize(
    "damage",
    [truncate, flip_a_bit, drop_the_weights, drop_the_manifest, garble_the_manifest, empty_the_manifest],
)
def test_a_damaged_entry_is_built_again(damage, built: Path, tmp_path: Path) -> None:
    before = weights(TINY, 0, tmp_path)
    damage(built)
    assert not is_intact(built)
    assert torch.equal(before, weights(TINY, 0, tmp_path))
    assert is_intact(built)
    assert [path.name for path in tmp_path.iterdir()] == [built.name]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(state: ColdStartProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_build(TINY, 0, cache_dir=tmp_path, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_no_entry_is_visible_before_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = cache_entry(TINY, 0, tmp_path)
    write_manifest = cold_start._write_manifest

    def watched(folder: Path, recipe: ColdStartRecipe, seed: int) -> None:
        assert not entry.exists()
        write_manifest(folder, recipe, seed)
        assert not entry.exists()

    monkeypatch.setattr(cold_start, "_write_manifest", watched)
    load_or_build(TINY, 0, cache_dir=tmp_path)
    assert is_intact(entry)


def test_a_build_that_loses_the_race_uses_the_winner(tmp_path: Path) -> None:
    entry = cache_entry(TINY, 0, tmp_path)
    raced = False

    def other_process_finishes_first(state: ColdStartProgress) -> None:
        nonlocal raced
        if not raced:
            raced = True
            load_or_build(TINY, 0, cache_dir=tmp_path)

    load_or_build(TINY, 0, cache_dir=tmp_path, on_progress=other_process_finishes_first)
    assert is_intact(entry)
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_a_target_out_of_reach_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not reach a sampled accuracy of 0.9 in 3 steps"):
        train_cold_start(replace(TINY, stop_accuracy=0.9), 0)


def test_an_unwritable_cache_names_the_variable(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(OSError, match="TRL_SOFTGATE_CACHE"):
        load_or_build(TINY, 0, cache_dir=blocker / "cache")
