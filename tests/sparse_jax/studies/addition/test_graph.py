"""The attention graph has a line for every open gate and no other."""

from xml.etree import ElementTree

import numpy as np
import pytest

from sparse_jax.studies.addition import graph, problems, run
from tests.sparse_jax.studies.addition.patterns import T, pattern, trace

SVG = "{http://www.w3.org/2000/svg}"
NUMBER = 4359
RIGHT = problems.rows(np.array([NUMBER]))[0, problems.READ :]


def draw(pattern_LTS, answer_A=RIGHT):
    one = graph.SumGraph(NUMBER, pattern_LTS > 0, pattern_LTS, answer_A)
    figure = graph.layer_graph(one, title="Sparse, two carries")
    return ElementTree.fromstring(figure).find(f"{SVG}svg")


def styled(svg, tag, style):
    return [one for one in svg.iter(f"{SVG}{tag}") if style in one.get("class", "").split()]


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_lines_are_as_many_as_open_gates(share):
    rng = np.random.default_rng(0)
    is_open = (rng.uniform(size=(4, T, T)) < share) & np.tri(T, dtype=bool)
    svg = draw(np.where(is_open, rng.uniform(0.01, 1, is_open.shape), 0.0))
    assert len(styled(svg, "line", "edge")) == is_open.sum()
    assert len(styled(svg, "circle", "node")) == 4 * T


def test_a_line_leads_from_what_is_read_to_the_reader_and_is_as_wide_as_its_weight():
    light, heavy = pattern((0, 10, 4), weight=0.1), pattern((0, 10, 4), weight=0.9)
    (thin,), (wide,) = (styled(draw(one), "line", "edge") for one in (light, heavy))
    assert float(thin.get("stroke-width")) < float(wide.get("stroke-width"))
    assert float(thin.get("stroke-opacity")) < float(wide.get("stroke-opacity"))
    tokens = styled(draw(light), "text", "token")
    places = [float(one.get("x")) for one in tokens[:T]]
    assert float(thin.get("x1")) == pytest.approx(places[4], abs=0.01)
    assert float(thin.get("x2")) == pytest.approx(places[10], abs=0.01)
    assert float(thin.get("y1")) > float(thin.get("y2"))
    assert "ones of the second number, weight 0.100" in thin.find(f"{SVG}title").text


def test_it_names_its_edges_its_answer_and_its_carries():
    svg = draw(pattern((0, 10, 4), (0, 10, 10), (1, 9, 4)))
    assert svg.get("role") == "img"
    assert "43+59=00102 (right), 3 open edges" in svg.find(f"{SVG}title").text
    assert svg.find(f"{SVG}desc").text == (
        "Layer 0: the ones of the answer reads the ones of the second number (0.25), itself (0.25)."
        " Layer 1: the tens of the answer reads the ones of the second number (0.25)."
    )
    assert len(styled(svg, "path", "carry")) == 2
    assert not styled(svg, "text", "wrong")
    assert draw(pattern()).find(f"{SVG}desc").text == "No edge is open."


def test_a_wrong_digit_is_marked():
    answer_A = RIGHT.copy()
    answer_A[-1] += 1
    svg = draw(pattern(), answer_A)
    (wrong,) = styled(svg, "text", "wrong")
    assert wrong.text == "3"
    assert "43+59=00103 (wrong, it is 00102)" in svg.find(f"{SVG}title").text


def test_a_weight_that_was_rounded_to_above_1_is_kept_as_1():
    above = np.nextafter(np.float32(1), np.float32(2))
    drawn = run._drawn(
        trace(pattern((0, 10, 4), weight=above)), "dense", np.array([NUMBER]), NUMBER
    )
    assert drawn.weights[0][10][4] == 1.0 and drawn.open[0][10][4]
