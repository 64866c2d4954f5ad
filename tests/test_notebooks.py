"""The notebooks run from their first cell to their last, and what they assert holds."""

from pathlib import Path
import re

import altair as alt
import numpy as np
import pytest

import lm_jax
from lm_jax import report
import protot_jax
from protot_jax.training.config import PretrainConfig
import sparse_jax
from sparse_jax.gates.model import constant_gates
from tests import tiny

# Run by `make test-all`.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
MARKS = {
    "first_look": [pytest.mark.real("smollm2")],
    # Without LLVM's optimisation the training takes most of a minute.
    "prototypes": [pytest.mark.optimised],
    "torch_gates": [pytest.mark.torch],
}


@pytest.fixture
def renderer():
    """The notebooks choose how charts are drawn, for all of the process."""
    with alt.renderers.enable(alt.renderers.active):
        yield


# A name in a notebook, and what it shows of itself there.
SHOWN = {
    "first_look": {
        "model": "Pretrained(llama: 30 layers, width 576, vocabulary 49,152, context 8,192, "
        "9 heads a layer; 134,515,008 parameters)",
        "out": "Output(logits (1, 5, 49152), hidden (1, 5, 576), "
        "records['attn.pattern'] (30, 1, 9, 5, 5), records['attn.scores'] (30, 1, 9, 5, 5))",
    },
    "sparse_and_circuit": {
        "sparse": "SparseModel of Pretrained(llama: 4 layers, width 64, ",
        "out": "aux['open_edges_BN'] (4, 1, 16)",
    },
    # An error for each of 4 layers and 16 tokens.
    "graph": {"graph": "Graph(32 features, 64 errors, 16 tokens, "},
    "torch_gates": {"gates": "TorchGates(4 layers of 16 heads; open where q.k + bias > 0)"},
    "prototypes": {"out": "records['mixer.write'] (2, 1, 11, 8)"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, [])) for name in NOTEBOOKS]
)
def test_a_notebook_runs_top_to_bottom(name, renderer, monkeypatch):
    monkeypatch.chdir(ROOT / "notebooks")
    text = (ROOT / "notebooks" / f"{name}.py").read_text("utf-8")
    names = {"__name__": "__main__"}
    exec(compile(text, f"{name}.py", "exec"), names)
    for result, shown in SHOWN[name].items():
        assert shown in repr(names[result])


def test_a_sparse_model_shows_the_numbers_of_its_card():
    numbers = {"open edges": "0.49%", "target loss": 3.573819, "seed": "<b>"}
    base = lm_jax.Pretrained(tiny.DECODER, {"embed": np.zeros((40, 16))}, None, ())
    model = sparse_jax.SparseModel(base, constant_gates(tiny.DECODER, 0.0), numbers)
    first, *rest = repr(model).splitlines()
    assert first.endswith("2 heads a layer; 640 parameters)")
    assert rest == ["open edges: 0.49%", "target loss: 3.574", "seed: <b>"]
    cells = re.findall(r"<td.*?>(.*?)</td>", model._repr_html_())
    assert cells == ["open edges", "0.49%", "target loss", "3.574", "seed", "&lt;b&gt;"]


def test_a_trained_model_shows_its_sizes_seed_and_step():
    config = PretrainConfig()
    mixer = protot_jax.PrototypeMixer(num_prototypes=16)
    model = protot_jax.TrainedModel(tiny.DECODER, mixer, {}, None, config, 234, 1300)
    sizes = "2 layers, width 16, vocabulary 40, context 64"
    shown = f"TrainedModel(protot with 16 prototypes a layer: {sizes}; seed 234, step 1,300)"
    assert repr(model) == shown


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
    chart = report.bars([report.Bar("a bar", 0.5)], caption="A figure.", x_label="share", n=7)
    with alt.renderers.enable("svg"):
        drawn = chart._repr_mimebundle_()
    texts = re.findall(r">([^<>]+)</text>", drawn["image/svg+xml"])
    assert {"a bar", "A figure.", "n = 7"} <= set(texts)
    assert "vega" in chart._repr_mimebundle_()["text/html"]
