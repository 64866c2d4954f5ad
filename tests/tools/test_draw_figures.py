"""The figures of `docs/` agree with their data."""

import json
import re

import numpy as np

from lm_jax.report import theme
from tools.pictures import figures as draw_figures

DATA = json.loads(draw_figures.DECAY_ERROR.read_text("utf-8"))


def paths(svg, colour):
    """The points `[n, 2]` of every line of a colour, in the order drawn."""
    lines = re.findall(rf'<path aria-hidden="true" d="M([^"]*)" stroke="{colour}"', svg)
    return [np.array([p.split(",") for p in re.split("[ML]", line)], float) for line in lines]


def test_the_committed_figure_is_drawn_from_its_data():
    committed = draw_figures.DOCS / "figures" / "released_decay_error.svg"
    assert committed.read_text("utf-8") == f"{draw_figures.svg(draw_figures.decay_error(DATA))}\n"


def test_heights_follow_the_data():
    """Three curves a panel; the left axis is logarithmic, the right one linear."""
    svg = draw_figures.svg(draw_figures.decay_error(DATA))
    released, ours = paths(svg, theme.LIGHT["s1"]), paths(svg, theme.LIGHT["s0"])
    assert len(released) == len(ours) == 6
    for lines, name, height in (
        (released[:3], "discount_error", lambda y: np.log10(np.maximum(np.abs(y), 1e-8))),
        (released[3:], "mean_of_ones", np.asarray),
    ):
        for points, curve in zip(lines, DATA["curves"]["released"], strict=True):
            values = height(np.array(curve[name], float))
            values = values[np.isfinite(values)]
            assert abs(np.corrcoef(points[:, 1], -values)[0, 1]) > 0.99999
    # One height for every point of a mean that stays 1.
    assert all(np.ptp(points[:, 1]) < 0.2 for points in ours[3:])
