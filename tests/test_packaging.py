"""What an installed copy promises: a light import, typed public names, ranges that hold the tested set."""

import importlib
import re
import statistics
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import trl_softgate

ROOT = Path(__file__).parents[1]
PACKAGE = Path(trl_softgate.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OBJECTIVES = (
    "ObjectiveOutput",
    "grpo_loss",
    "gspo_loss",
    "sapo_loss",
    "soft_gate",
    "soft_gate_weight",
    "k3_divergence",
    "reduce_loss",
)
FUSION = ("FusionSchedule", "fuse_advantages", "opd_advantage", "tanh_compress", "top_k_percent_filter")


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def seconds(code: str) -> float:
    begin = time.perf_counter()
    run_python(code)
    return time.perf_counter() - begin


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    for requirement in requirements:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{requirement} is not an exact pin"
    return {canonical(r.name): str(r.specifier).removeprefix("==") for r in requirements}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[Requirement]:
    """All direct requirements, those of the extras included, without the package itself."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    parsed = [Requirement(text) for group in groups for text in group]
    return [requirement for requirement in parsed if requirement.name != PROJECT["name"]]


def test_import_is_light() -> None:
    heavy = run_python(
        "import sys, trl_softgate; trl_softgate.__version__; dir(trl_softgate)\n"
        "print([m for m in ('torch', 'trl', 'transformers', 'numpy', 'datasets') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_import_takes_under_200_ms() -> None:
    # Pairs run close together in time and the median of their differences, so that a busy machine does not decide.
    run_python("import trl_softgate")  # writes the bytecode
    differences = [seconds("import trl_softgate") - seconds("pass") for _ in range(9)]
    assert statistics.median(differences) < 0.2


def test_command_line_is_light() -> None:
    heavy = run_python("import sys, trl_softgate.cli; print([m for m in ('torch', 'trl') if m in sys.modules])")
    assert heavy == "[]"


@pytest.mark.parametrize("name", trl_softgate.__all__)
def test_public_name(name: str) -> None:
    assert getattr(trl_softgate, name) is not None
    assert name in dir(trl_softgate)


@pytest.mark.parametrize(
    ("module", "name"),
    [("objectives", name) for name in OBJECTIVES] + [("fusion", name) for name in FUSION],
)
def test_public_name_of_a_room(module: str, name: str) -> None:
    room = importlib.import_module(f"trl_softgate.{module}")
    assert name in room.__all__
    assert getattr(room, name).__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        trl_softgate.no_such_name  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("room", ["objectives", "fusion", "diagnostics.statistics"])
def test_pure_rooms_import_torch_alone(room: str) -> None:
    heavy = run_python(
        f"import sys, trl_softgate.{room}\n"
        "print([m for m in ('trl', 'transformers', 'accelerate', 'datasets', 'peft') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", trl_softgate.__version__)
    assert f"## {trl_softgate.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    try:
        installed = metadata.version("trl-softgate")
    except metadata.PackageNotFoundError:
        pytest.skip("run from a folder that is not installed")
    assert installed == trl_softgate.__version__


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_pinned_version_is_in_the_range(requirement: Requirement) -> None:
    version = pins()[canonical(requirement.name)]
    assert requirement.specifier.contains(version), f"{version} is outside {requirement}"


def test_core_ranges_have_both_ends() -> None:
    for text in PROJECT["dependencies"]:
        assert {spec.operator for spec in Requirement(text).specifier} == {">=", "<"}, text


def test_trl_range_is_stated_alike() -> None:
    hooks = importlib.import_module("trl_softgate.trainers.hooks")
    (trl,) = [requirement for requirement in requirements() if requirement.name == "trl"]
    assert SpecifierSet(hooks.SUPPORTED_TRL) == trl.specifier


@pytest.mark.parametrize(
    "forbidden",
    [
        r"(?<![\w.])/(work|opt|home|root|tmp|mnt)/",
        r"\bpickle\b",
        r"trust_remote_code\s*=\s*True",
        r"weights_only\s*=\s*False",
    ],
)
def test_forbidden_words(forbidden: str) -> None:
    """No paths of one machine; nothing that runs code from a checkpoint or a model folder."""
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(forbidden, line)
    ]
    assert not found


def test_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    build = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    (wheel,) = build.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    assert "trl_softgate/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "trl_softgate",
        f"trl_softgate-{trl_softgate.__version__}.dist-info",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|/(tests|examples|recipes)/", name)]
