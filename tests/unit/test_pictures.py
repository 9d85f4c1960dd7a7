"""The README's pictures and figures are what bench/results says, and can be read on both of GitHub's pages."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools.pictures import __main__ as pictures
from tools.pictures.canvas import DARK, LIGHT, THEMES, Canvas
from tools.pictures.charts import BarChart, Series
from tools.pictures.figures import RESULTS, figures

SVG = "{http://www.w3.org/2000/svg}"


def test_pictures_and_figures_are_current() -> None:
    assert pictures.stale() == [], "run make plots"


def test_a_changed_result_makes_them_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text().replace("0.6799", "0.3799"))  # the mean of plain vLLM
    monkeypatch.setattr("tools.pictures.figures.RESULTS", tmp_path)
    assert pictures.stale() == ["vllm-serve-dark.svg", "vllm-serve-light.svg", "README.md"]


def test_texts_stay_inside_of_their_picture() -> None:
    """By the width of a wide font: nobody knows which one a reader has."""
    for name, text in pictures.images().items():
        root = ElementTree.fromstring(text)
        width = float(root.attrib["width"])
        for part in root.iter(f"{SVG}text"):
            x, length = float(part.attrib["x"]), len(part.text or "") * float(part.attrib["font-size"]) * 0.58
            left = {"start": x, "middle": x - length / 2, "end": x - length}[part.attrib["text-anchor"]]
            assert left > -4 and left + length < width + 4, f"{name}: {part.text}"


def test_each_picture_of_the_readme_has_both_of_its_files() -> None:
    made = pictures.images()
    assert len(made) == len(THEMES) * len(figures())
    for name in made:
        assert f"docs/images/{name}" in pictures.README.read_text()


def test_names_and_titles_are_escaped() -> None:
    series = (Series("<b>", lambda theme: theme.strong), Series("&", lambda theme: theme.other))
    chart = BarChart(title="a < b", note="", series=series, rows=(("r&d", (1.0, 0.0)),))
    texts = [part.text for part in ElementTree.fromstring(chart.draw(LIGHT)).iter(f"{SVG}text")]
    assert {"a < b", "r&d", "<b>", "&", "1.00"} <= set(texts)


def test_heads_stand_at_both_ends_of_a_line() -> None:
    canvas = Canvas(20, 20, DARK, "")
    canvas.path(((0, 10), (10, 10), (10, 20)), color="red", arrows=True)
    heads = [part.attrib["points"] for part in ElementTree.fromstring(canvas.svg()).iter(f"{SVG}polygon")]
    assert [head.split()[0] for head in heads] == ["0,10", "10,20"]


def test_a_readme_without_a_place_is_refused() -> None:
    with pytest.raises(SystemExit, match="no place"):
        pictures.readme_text("# kvpool\n")
