"""The documentation builds without a warning, names what exists, and asks nothing of a network."""

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig

import trl_softgate
from trl_softgate import GSPOConfig, SAFDistillConfig, SAPOConfig
from trl_softgate.objectives import soft_gate_weight

ROOT = Path(__file__).parents[1]
ALGORITHMS = (ROOT / "docs/algorithms.md").read_text()


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_pages_ask_nothing_of_a_network(site: Path) -> None:
    """No script, style sheet, font or picture from elsewhere; links that a reader follows may lead there."""
    found = []
    for path in site.glob("*.html"):
        text = path.read_text()
        found += re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>", text)
        found += [
            link
            for link in re.findall(r"<link\b[^>]*>", text)
            if "//" in link and not re.search(r"rel=[\"']?canonical", link)
        ]
    for path in site.rglob("*.css"):
        found += re.findall(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//[^)\"';]*", path.read_text())
    assert not found


@pytest.mark.parametrize("room", ["", "objectives", "fusion", "teachers"])
def test_every_public_name_is_in_the_reference(site: Path, room: str) -> None:
    module = importlib.import_module(f"trl_softgate.{room}" if room else "trl_softgate")
    headings = {
        name.rsplit(".")[-1] for name in re.findall(r'id="trl_softgate([\w.]+)"', (site / "api.html").read_text())
    }
    # a constant of names has no docstring of its own; the functions that take one say what it holds
    names = [name for name in module.__all__ if not re.fullmatch(r"__\w+__|[A-Z_]+", name)]
    assert names
    assert set(names) <= headings


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    settings = (ROOT / "mkdocs.yml").read_text().replace("paths: [.]", f"paths: [{ROOT}]")
    (tmp_path / "mkdocs.yml").write_text(settings)
    with (tmp_path / "docs/faq.md").open("a") as page:
        page.write("\n[more](algorithms.md#no-such-heading)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "no-such-heading" in done.stderr


def rows_of_table(header: str) -> list[list[str]]:
    """Cells of the table of the algorithms page that begins with `header`."""
    table = ALGORITHMS.split(f"\n{header}\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


def test_gate_weights_of_the_page() -> None:
    header = "| r | 0.5 | 0.8 | 1 | 1.2 | 1.5 | 2 | 3 |"
    ratios = torch.tensor([float(cell) for cell in header.strip("| ").split("|")[1:]])
    rows = rows_of_table(header)
    assert len(rows) == 3
    for label, *cells in rows:
        tau = float(label.removeprefix("w, tau = "))
        computed = [round(weight, 3) for weight in soft_gate_weight(ratios, tau).tolist()]
        assert [float(cell) for cell in cells] == computed


def test_names_of_the_map_exist() -> None:
    def fields(*configs: type) -> set[str]:
        return {field.name for config in configs for field in dataclasses.fields(config)}

    ours, trl = fields(GSPOConfig, SAPOConfig, SAFDistillConfig), fields(GRPOConfig)
    rows = rows_of_table("| paper | here | TRL | verl |")
    assert len(rows) > 15
    for _, here, there, _ in rows:
        names = [re.split("[:=]", name)[0] for name in re.findall("`([^`]+)`", here)]
        assert all(name in ours or hasattr(trl_softgate, name) for name in names), here
        if there == "the same":
            assert set(names) <= trl, here
        elif there == "-":
            assert not set(names) & trl, here
        else:
            assert {re.split("[:=]", name)[0] for name in re.findall("`([^`]+)`", there)} <= trl, there
