"""Circuits of edge pruning by command: rows, summary, page, refusals."""

import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.study import frame
from sparse_jax.circuits import discover
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.curves import explained
from sparse_jax.circuits.runs import Batch, CircuitModel
from sparse_jax.circuits.tasks import load_task
from sparse_jax.studies.circuits import STUDY, report
from sparse_jax.studies.circuits.settings import CircuitConfig
from tests.sparse_jax.circuits.small_study import SMALL, save_models

# Run by `make test-all`.
pytestmark = pytest.mark.long
# Few enough that the circuit is another than that of the attribution.
FEW = 6


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study of a model in which the input, head 1.2 and the MLPs write; the circuits' sizes."""
    models = save_models(tmp_path_factory.mktemp("models"))
    base = lm_jax.load_pretrained(models / "planted")
    graph = ComponentGraph.of(base.cfg)
    config = STUDY.settings(
        **SMALL,
        dense=str(models / "planted"),
        rephrased="",
        tasks=(str(models / "mine.jsonl"),),
        components=("component_edges",),
        pruned=(FEW, graph.num_edges),
        pruning_steps=80,
    )
    folder = tmp_path_factory.mktemp("study")
    frame.execute(STUDY, config, folder)
    return base, models / "mine.jsonl", folder, frame.load_summary(STUDY, folder)


def rows_of(folder, **labels):
    rows = pq.read_table(folder / "rows.parquet").to_pylist()
    return [row for row in rows if all(row[key] == value for key, value in labels.items())]


def test_the_circuit_has_as_many_edges_as_asked_for_and_is_the_one_that_was_evaluated(done):
    base, file, folder, summary = done
    graph, model = ComponentGraph.of(base.cfg), CircuitModel.of(base)
    batch = Batch.of(load_task(file, base.tokenizer))
    kept = [(row["writer"], row["reader"]) for row in rows_of(folder, quantity="kept", size=FEW)]
    assert len(set(kept)) == FEW and all(graph.mask_UR[place] for place in kept)
    importance_UR = np.where(graph.mask_UR, 0.0, -np.inf)
    importance_UR[*np.transpose(kept)] = 1.0
    exists = discover.component_edges(model, batch)
    ranks = discover.ranks(np.broadcast_to(importance_UR[:, None], exists.shape))
    curve = discover.component_curve(model, batch, ranks, "counterfactual", sizes=[FEW])
    stored = rows_of(folder, quantity="curve", ranking="pruned", size=FEW)
    by_prompt = sorted((row["prompt"], row["value"]) for row in stored)
    np.testing.assert_array_equal([value for _, value in by_prompt], curve.metric_KB[0])
    own = summary.results[0].pruned[0]
    assert own.size == FEW
    assert own.pruned.estimate == explained(curve.metric_KB, curve.empty_B, curve.whole_B)[0]


def test_it_explains_more_than_random_order_and_all_edges_are_the_whole_model(done):
    *_, summary = done
    (result,) = summary.results
    few, whole = result.pruned
    assert few.pruned.estimate > few.drawn.estimate
    # The same circuit as the last one of every curve.
    ends = {curve.points[-1].explained for curve in result.curves}
    assert {each.estimate for each in (whole.pruned, whole.attributed, whole.drawn)} == ends
    assert len(ends) == 1
    # They have no curve.
    assert {each.ranking for each in summary.results[0].curves} == {"signed", "absolute", "random"}


def test_page_and_terminal_have_what_they_explain(done):
    *_, folder, summary = done
    built = report.build(summary.config, summary, folder)
    text = " ".join(" ".join(built.lines).split())
    assert f"{FEW} of {summary.results[0].components['component_edges']:,} component edges" in text
    assert "Does edge pruning find better circuits?" in [each.title for each in built.sections()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"components": ("heads",)}, "add component_edges to config.components"),
        ({"ablations": ("resample",)}, "put another one first"),
        ({"pruned": (0,)}, "none or one or more different values, each at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    given = {"components": ("component_edges",), "pruned": (3,)} | settings
    with pytest.raises(UsageError, match=message):
        CircuitConfig(**given)
