"""Small models for a built-in task: trained on generated solutions once, then taken from a cache.

The cache is `$TRL_SOFTGATE_CACHE`, or `~/.cache/trl_softgate`. One folder holds one model; its name is a digest of the
recipe, the seed and the package version, so a changed recipe never meets an old model. A folder appears in one rename,
complete or not at all, and one whose content does not match its manifest is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .addition import (
    EOS_TOKEN,
    PAD_TOKEN,
    VOCABULARY,
    build_tokenizer,
    completion_length,
    evaluate_accuracy,
    iterate_problems,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MANIFEST = "manifest.json"
# Accuracy is not worth measuring above this running loss: it is 0.
_LOSS_WORTH_CHECKING = 0.25
_VALIDATION_PROBLEMS = 100


@dataclass(frozen=True)
class ColdStartRecipe:
    """How a model is trained on solutions of the addition task.

    Args:
        digits: Digits of each number.
        hidden_size: Width of the Qwen3 model, a multiple of `heads`.
        layers: Number of layers.
        heads: Number of attention heads.
        steps: Optimizer steps; at most so many where `stop_accuracy` is set.
        batch_size: Solutions per step.
        learning_rate: AdamW's, after 20 steps of linear warm-up.
        decay: Lower the learning rate linearly over the second half of the steps.
        stop_accuracy: Stop as soon as sampled accuracy on 100 validation problems, measured every `check_every` steps,
            reaches this value. None: run all steps.
        check_every: Steps between two measurements.
    """

    digits: int = 4
    hidden_size: int = 96
    layers: int = 3
    heads: int = 3
    steps: int = 600
    batch_size: int = 16
    learning_rate: float = 3e-3
    decay: bool = False
    stop_accuracy: float | None = None
    check_every: int = 10


# From a sampled accuracy near 0.1, more than half of all groups of eight hold a right answer: enough to start from.
STUDENT = ColdStartRecipe(learning_rate=2e-3, stop_accuracy=0.1)
TEACHER = ColdStartRecipe(steps=450, decay=True)


@dataclass(frozen=True)
class ColdStartProgress:
    """State of a cold start after `step` of at most `steps` steps; `accuracy` is the latest measured one, if any."""

    step: int
    steps: int
    loss: float
    accuracy: float | None


def build_model(recipe: ColdStartRecipe, seed: int) -> PreTrainedModel:
    """An untrained Qwen3 model over the task's 15 tokens, float32 on CPU. The caller's random state is kept."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD_TOKEN),
        eos_token_id=VOCABULARY.index(EOS_TOKEN),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def train_cold_start(
    recipe: ColdStartRecipe, seed: int, *, on_progress: Callable[[ColdStartProgress], None] | None = None
) -> PreTrainedModel:
    """Train a new model on solutions of the train split, by cross-entropy over the completion tokens.

    The result depends on the arguments, the number of torch threads and the versions of torch and transformers alone.

    Raises:
        RuntimeError: If `stop_accuracy` is set and was not reached in `steps` steps.
    """
    import torch

    tokenizer = build_tokenizer()
    model = build_model(recipe, seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98))
    batches = _batches(recipe, seed)
    prompt_length = 2 * recipe.digits + 2
    validation = []
    if recipe.stop_accuracy is not None:
        validation = [*islice(iterate_problems(0, "validation", digits=recipe.digits), _VALIDATION_PROBLEMS)]
    accuracy = None
    running_loss = None
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _learning_rate_factor(step, recipe)
        tokens = next(batches)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, prompt_length - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, prompt_length:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running_loss = loss.item() if running_loss is None else 0.9 * running_loss + 0.1 * loss.item()
        if validation and running_loss < _LOSS_WORTH_CHECKING and step % recipe.check_every == 0:
            accuracy = evaluate_accuracy(model, tokenizer, validation)
        if on_progress is not None:
            on_progress(ColdStartProgress(step, recipe.steps, running_loss, accuracy))
        if recipe.stop_accuracy is not None and accuracy is not None and accuracy >= recipe.stop_accuracy:
            break
    else:
        if recipe.stop_accuracy is not None:
            raise RuntimeError(
                f"The cold start did not reach a sampled accuracy of {recipe.stop_accuracy} in {recipe.steps} steps "
                f"(seed {seed}, running loss {running_loss:.3f}). Try another seed."
            )
    return model.eval()


def _learning_rate_factor(step: int, recipe: ColdStartRecipe) -> float:
    factor = min(1.0, step / 20)
    if recipe.decay:
        factor = min(factor, max(0.02, 2 * (1 - step / recipe.steps)))
    return factor


def _batches(recipe: ColdStartRecipe, seed: int) -> Iterator[torch.Tensor]:
    """Endless (batch_size, prompt + completion) token ids; all problems of one width have solutions of one length."""
    import torch

    tokenizer = build_tokenizer()
    problems = iterate_problems(seed, "train", digits=recipe.digits)
    length = 2 * recipe.digits + 2 + completion_length(recipe.digits)
    while True:
        texts = [p.prompt + p.solution + EOS_TOKEN for p in islice(problems, recipe.batch_size)]
        tokens = torch.tensor(tokenizer(texts)["input_ids"])
        assert tokens.shape == (recipe.batch_size, length)
        yield tokens


def default_cache_dir() -> Path:
    """`$TRL_SOFTGATE_CACHE`, or `~/.cache/trl_softgate`."""
    configured = os.environ.get("TRL_SOFTGATE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "trl_softgate"


def cache_entry(recipe: ColdStartRecipe, seed: int, cache_dir: Path | None = None) -> Path:
    """The folder in which `load_or_build` keeps the model of these arguments, whether it exists or not."""
    from .. import __version__

    key = json.dumps({"recipe": asdict(recipe), "seed": seed, "version": __version__}, sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return (cache_dir or default_cache_dir()) / f"addition-{recipe.digits}-{digest}"


def load_or_build(
    recipe: ColdStartRecipe,
    seed: int,
    *,
    cache_dir: Path | None = None,
    on_progress: Callable[[ColdStartProgress], None] | None = None,
) -> PreTrainedModel:
    """The trained model of `recipe` and `seed`, from the cache where it holds an intact copy, else built and stored.

    Args:
        recipe: E.g. `STUDENT` or `TEACHER`.
        seed: Seed of the initial weights and of the training data.
        cache_dir: Default: `default_cache_dir()`.
        on_progress: Called after each training step; never called where the cache answers.

    Returns:
        A new model in eval mode, float32 on CPU. Its tokenizer is `addition.build_tokenizer()`.

    Raises:
        OSError: If the cache directory cannot be written; the message names the variable that moves it.
        RuntimeError: As `train_cold_start`.
    """
    entry = cache_entry(recipe, seed, cache_dir)
    if is_intact(entry):
        return _load(entry)
    # Asked for before a minute of training, not after it.
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".building-", dir=entry.parent))
    except OSError as error:
        raise OSError(
            f"Cannot write the model cache in {entry.parent}: {error.strerror}. Set TRL_SOFTGATE_CACHE to a writable "
            "directory."
        ) from error
    try:
        model = train_cold_start(recipe, seed, on_progress=on_progress)
        model.save_pretrained(staging)
        build_tokenizer().save_pretrained(staging)
        _write_manifest(staging, recipe, seed)
        _publish(staging, entry)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    # The stored copy and not the one just trained, so the first use and the second see the same model.
    return _load(entry)


def is_intact(entry: Path) -> bool:
    """Whether `entry` is a complete cached model: a manifest, and every file it lists with the digest it lists."""
    try:
        files = json.loads((entry / _MANIFEST).read_text())["files"]
        return bool(files) and all(_digest(entry / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_manifest(folder: Path, recipe: ColdStartRecipe, seed: int) -> None:
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    manifest: dict[str, Any] = {"recipe": asdict(recipe), "seed": seed, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _publish(staging: Path, entry: Path) -> None:
    """Rename `staging` to `entry`, replacing a damaged one; an intact one, built meanwhile elsewhere, wins."""
    if entry.exists() and not is_intact(entry):
        # Moved aside in one step: no reader ever sees a half-deleted entry.
        aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=entry.parent))
        os.replace(entry, aside / entry.name)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(staging, entry)
    except OSError:
        if not is_intact(entry):
            raise


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _load(entry: Path) -> PreTrainedModel:
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(entry, dtype=torch.float32, local_files_only=True)
    return model.eval()
