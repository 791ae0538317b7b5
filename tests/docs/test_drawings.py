"""Drawings are well formed, agree with their sources, and nothing runs out of its box."""

import re
import xml.etree.ElementTree as ET

import draw_building
import pytest
from page_blocks import DOCS

SVG = "{http://www.w3.org/2000/svg}"
#: Width of a character of a sans-serif font, in font sizes; measured in Chromium for these texts, rounded up.
CHARACTER = 0.56


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_is_well_formed_and_asks_for_no_network(path):
    text = path.read_text("utf-8")
    assert ET.fromstring(text).find(f"{SVG}title").text
    assert re.findall(r'(?:href|src|url)\W+(?!#)[^"\')]*//', text) == []


def test_texts_of_the_flow_fit_into_their_boxes():
    drawing = ET.parse(DOCS / "flow.svg").getroot()
    boxes = list(drawing.iter(f"{SVG}rect"))
    texts = [text for text in drawing.iter(f"{SVG}text") if text.get("class") == "text"]
    assert len(boxes) == 5
    assert len(texts) == 15
    for text in texts:
        middle, half = float(text.get("x")), len(text.text) * 12 * CHARACTER / 2
        assert any(
            float(box.get("x")) + 4 < middle - half
            and middle + half < float(box.get("x")) + float(box.get("width")) - 4
            for box in boxes
        ), text.text


def test_the_chart_of_builds_has_the_figures_of_the_page():
    rows = draw_building.rates()
    assert len(rows) == 5
    assert (DOCS / "building.svg").read_text("utf-8") == draw_building.drawing(rows)


def test_the_recording_names_the_edited_image_and_encodes_it_alone():
    lines = [text.text for text in ET.parse(DOCS / "session.svg").getroot().iter(f"{SVG}text")]
    commands = [line for line in lines if line.startswith("$ ")]
    assert [line.split()[2] for line in commands] == ["build", "verify", "build", "verify"]
    assert any(line.startswith("stale image_0003.jpg [source-changed]") for line in lines)
    assert any(line.startswith("1 encoded, ") for line in lines)
    assert re.fullmatch(r"\d+ ok \(.*\)", lines[-1])
