"""What the files in `recipes/configs` say: model, method, hardware and memory, read from their keys and headers.

A recipe begins with comments: its launch line, then what it is, with lines such as `# Hardware: ...`, `# Memory: ...`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environment import recipes_for

if TYPE_CHECKING:
    from rich.table import Table

FOLDER = Path("recipes/configs")

# Key of a stage of SAF -> its name, and the values that switch it off.
_STAGES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "opd_top_k_percent": ("top-k", (None, 100)),
    "opd_tanh_coef": ("tanh", (None, 0)),
    "opd_warmup_steps": ("warm-up", (0,)),
    "opd_anneal": ("anneal", (False,)),
}
_TEACHERS = {
    "teacher_server_url": "server",
    "teacher_adapter": "adapter",
    "teacher_model_name_or_path": "local",
    "teacher_callable": "callable",
    "teachers": "several",
}


class RecipeProblem(ValueError):
    """A folder or file that holds no recipe; the message says what to do, in one sentence."""


@dataclass(frozen=True)
class Recipe:
    """One YAML file.

    Attributes:
        path: of the file.
        launch: words of its first launch line.
        notes: what its header says of "Hardware", "Memory", "Batch", ...
        values: its keys.
    """

    path: Path
    launch: tuple[str, ...]
    notes: dict[str, str]
    values: dict[str, Any]

    @property
    def script(self) -> str:
        """The script that it is for, e.g. `recipes/gspo.py`."""
        return next(word for word in self.launch if word.endswith(".py"))

    @property
    def accelerate(self) -> str | None:
        """The file for accelerate that the launch line names."""
        return self.launch[self.launch.index("--config_file") + 1] if "--config_file" in self.launch else None

    @property
    def model(self) -> str:
        return str(self.values["model_name_or_path"])

    @property
    def teacher(self) -> str:
        """Where the teacher is: server, adapter, local, callable, several; or none."""
        return next((name for key, name in _TEACHERS.items() if self.values.get(key) is not None), "none")

    @property
    def training(self) -> str:
        """full, LoRA or QLoRA."""
        if not self.values.get("use_peft"):
            return "full"
        return "QLoRA" if self.values.get("load_in_4bit") else "LoRA"

    @property
    def method(self) -> str:
        """GSPO, SAPO, GRPO, OPD only, fixed fusion, SAF, or SAF without some of its stages."""
        if Path(self.script).stem != "saf_distill":
            return Path(self.script).stem.upper()
        if self.values.get("opd_coef", 1) == 0:
            return str(self.values.get("policy_objective", "grpo")).upper()
        if self.values.get("grpo_coef", 1) == 0:
            return "OPD only"
        off = [name for key, (name, values) in _STAGES.items() if self.values.get(key, values) in values]
        if len(off) == len(_STAGES):
            return "fixed fusion"
        return f"SAF without {', '.join(off)}" if off else "SAF"


def read_recipe(path: Path) -> Recipe:
    """Read one file.

    Raises:
        RecipeProblem: it is not a YAML mapping with `model_name_or_path`, or does not begin with its launch line.
    """
    import yaml

    text = path.read_text()
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeProblem(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    header = [line.removeprefix("#").strip() for line in text.partition("\n\n")[0].splitlines() if line[:1] == "#"]
    words: list[str] = []
    for line in header:
        words += line.removesuffix("\\").split()
        if not line.endswith("\\"):
            break
    if not isinstance(values, dict) or "model_name_or_path" not in values:
        raise RecipeProblem(f"{path} is no recipe: it has no key model_name_or_path.")
    if words[:2] != ["accelerate", "launch"] or not any(word.endswith(".py") for word in words):
        raise RecipeProblem(
            f"{path} must begin with its launch line: # accelerate launch recipes/SCRIPT.py --config ..."
        )
    notes = dict(line.split(": ", 1) for line in header if ": " in line and " " not in line.split(": ", 1)[0])
    return Recipe(path, tuple(words), notes, values)


def read_recipes(folder: Path = FOLDER, model: str | None = None) -> list[Recipe]:
    """All recipes of a folder by name, or those that train `model`.

    Raises:
        RecipeProblem: the folder is not there, holds no YAML file, or one that is no recipe.
    """
    if not folder.is_dir():
        raise RecipeProblem(
            f"There is no folder {folder} here: run this in a clone of the repository, or name the folder with --dir."
        )
    recipes = [read_recipe(path) for path in sorted(folder.glob("*.yaml"))]
    if not recipes:
        raise RecipeProblem(f"The folder {folder} holds no .yaml file: name the folder of the recipes with --dir.")
    if model is None:
        return recipes
    wanted = set(recipes_for(model, folder))
    if not wanted:
        models = ", ".join(sorted({recipe.model for recipe in recipes}))
        raise RecipeProblem(f"No recipe in {folder} trains {model}; there are recipes for {models}.")
    return [recipe for recipe in recipes if recipe.path in wanted]


def recipe_table(recipes: Sequence[Recipe]) -> Table:
    """A line for each recipe, under its model."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Recipes", caption="How to launch one: the first line of its file in recipes/configs.")
    table.add_column("model, file", no_wrap=True)
    for name in ("method", "hardware", "memory"):
        table.add_column(name)
    model = None
    for recipe in sorted(recipes, key=lambda recipe: (recipe.model, recipe.path.name)):
        if recipe.model != model:
            table.add_section()
            table.add_row(f"[bold]{escape(recipe.model)}[/bold]")
            model = recipe.model
        parts = [recipe.method, recipe.training]
        if recipe.teacher != "none":
            parts.append(f"{recipe.teacher} teacher")
        notes = (recipe.notes.get("Hardware", "-"), recipe.notes.get("Memory", "-"))
        table.add_row(*(escape(cell) for cell in (f"  {recipe.path.stem}", ", ".join(parts), *notes)))
    return table
