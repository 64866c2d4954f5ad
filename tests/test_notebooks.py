"""The notebooks run from their first cell to their last, and what they assert holds."""

from pathlib import Path
import re

import altair as alt
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
MARKS = {
    "first_look": [pytest.mark.real("smollm2")],
    # Without LLVM's optimisation the training takes most of a minute.
    "prototypes": [pytest.mark.optimised],
}


@pytest.fixture
def renderer():
    """The notebooks choose how charts are drawn, for all of the process."""
    with alt.renderers.enable(alt.renderers.active):
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, [])) for name in NOTEBOOKS]
)
def test_a_notebook_runs_top_to_bottom(name, renderer, monkeypatch):
    monkeypatch.chdir(ROOT / "notebooks")
    text = (ROOT / "notebooks" / f"{name}.py").read_text("utf-8")
    exec(compile(text, f"{name}.py", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_cells_that_state_something(name):
    """Percent format: a title first, text in comments, at least two asserts, two screens."""
    text = (ROOT / "notebooks" / f"{name}.py").read_text("utf-8")
    assert text.startswith("# %% [markdown]\n# # ")
    cells = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)[1:]
    kinds, bodies = cells[::2], cells[1::2]
    assert set(kinds) == {"", " [markdown]"}
    for kind, body in zip(kinds, bodies, strict=True):
        lines = body.strip().splitlines()
        assert lines
        assert not kind or all(line.startswith("#") for line in lines)
    assert len(re.findall(r"^ *assert ", text, re.MULTILINE)) >= 2


def test_a_chart_shows_itself():
    """As the notebooks show it, without a network, and as altair does by itself."""
    from lm_jax import report

    chart = report.bars([report.Bar("a bar", 0.5)], caption="A figure.", x_label="share")
    with alt.renderers.enable("svg"):
        drawn = chart._repr_mimebundle_()
    assert "a bar" in drawn["image/svg+xml"]
    assert "vega" in chart._repr_mimebundle_()["text/html"]
