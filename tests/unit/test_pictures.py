"""The README's pictures and figures are what bench/results says."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools.pictures import __main__ as pictures
from tools.pictures.charts import BarChart, Color, Series
from tools.pictures.drawing import draw
from tools.pictures.figures import RESULTS, figures

SVG = "{http://www.w3.org/2000/svg}"
CHART = BarChart(
    title="a < b",
    note="",
    series=(Series("<b>", Color.KVPOOL), Series("&", Color.BASELINE)),
    rows=(("r&d", (1.0, 0.0)),),
)


def test_pictures_and_figures_are_current() -> None:
    assert pictures.stale() == [], "run make plots"


def test_a_changed_result_makes_them_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text().replace("0.6799", "0.3799"))  # the mean of plain vLLM
    monkeypatch.setattr("tools.pictures.figures.RESULTS", tmp_path)
    assert pictures.stale() == ["vllm-serve-dark.svg", "vllm-serve-light.svg", "README.md"]


def test_each_picture_of_the_readme_has_both_of_its_files() -> None:
    made = pictures.pictures()
    assert len(made) == 2 * len(figures())
    for name in made:
        assert f"docs/images/{name}" in pictures.README.read_text()


def test_a_picture_names_its_result_file() -> None:
    for figure in figures():
        assert (RESULTS / f"{figure.result}.json").is_file()
        assert figure.result in pictures.described(pictures.IMAGES / f"{figure.name}-light.svg")


def test_the_same_chart_is_drawn_alike_and_names_are_escaped() -> None:
    drawn = draw(CHART, "light", "from a < b")
    assert drawn == draw(CHART, "light", "from a < b")
    root = ElementTree.fromstring(drawn)
    assert {"a < b", "r&d", "<b>", "&", "1.00"} <= {part.text for part in root.iter(f"{SVG}text")}


def test_the_check_needs_no_matplotlib() -> None:
    program = "import sys; sys.modules['matplotlib'] = None; from tools.pictures.__main__ import stale; print(stale())"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ran.stdout == "[]\n"


def test_a_readme_without_a_place_is_refused() -> None:
    with pytest.raises(SystemExit, match="no place"):
        pictures.readme_text("# kvpool\n")
