"""Post-training under a bound on the divergence, with gates that start open."""

import copy
import dataclasses

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.report import page
from lm_jax.run import user_cache
from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json
from lm_jax.run.results import load_result
from lm_jax.study import frame
from lm_jax.train.metrics import EVALUATIONS, METRICS
from lm_jax.train.state import StateLayout, run_keys
from lm_jax.weights.peft import load_peft
import sparse_jax
from sparse_jax.gates.objective import WEIGHTS
from sparse_jax.studies.posttrain import STUDY, beginning, export, report, training
from sparse_jax.studies.posttrain.beginning import START
from sparse_jax.studies.posttrain.report_training import Run
from sparse_jax.studies.posttrain.results import RunResult, StartResult
from sparse_jax.studies.posttrain.settings import PosttrainConfig
from sparse_jax.studies.posttrain.task import open_task
from tests.sparse_jax.small_runs import command, run_folder, settings

# Run by `make test-all`.
pytestmark = pytest.mark.long

CHANGES = {
    "constraint": "divergence",
    "slacks": (0.04,),
    "open_at_start": 0.99,
    "learn_bias": True,
    "bias_rate": 3.0,
    "schedule": "linear",
}


@pytest.fixture(scope="module")
def config(base, text):
    changed = settings(base, text, **CHANGES)
    changed.strength.proportional = 0.5
    return changed


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("divergence") / "run"
    command(config, folder)
    return folder


def result_of(folder):
    return load_result(run_folder(folder) / export.RESULT, RunResult)


def test_it_begins_at_the_dense_model_and_closes_edges(whole):
    result = result_of(whole)
    assert result.start == load_result(run_folder(whole) / START, StartResult)
    assert abs(result.start.difference) < 0.01 and 0 <= result.start.divergence < 0.01
    assert result.start.edges == pytest.approx(0.99, abs=0.01)
    table = pq.read_table(run_folder(whole) / METRICS).to_pydict()
    # The first update is computed where training starts.
    assert table["edges"][0] == pytest.approx(result.start.edges, abs=0.01)
    assert 0 <= table["divergence"][0] < 0.01 < max(table["divergence"])
    assert table["edges"][-1] < 0.8
    # The bound is of the divergence, and the loss is near 4 nats: under a bound on it the strength
    # would fall by `longest` at each update.
    strength = np.array(table["strength"])
    assert np.abs(np.diff(np.log(strength))).max() < 0.05
    assert (result.target, run_folder(whole).name) == (0.04, "target_0.0400")


def test_the_divergence_is_that_of_both_models_on_the_held_out_windows(whole, base):
    """Recomputed in float64 from the logits of the exported model."""
    result = result_of(whole)
    windows = pq.read_table(run_folder(whole) / export.WINDOWS).to_pydict()
    tokens = sum(windows["tokens"])
    assert result.divergence.estimate == pytest.approx(sum(windows["divergence"]) / tokens)
    assert min(windows["divergence"]) > 0
    rows = pq.read_table(run_folder(whole) / EVALUATIONS).to_pylist()
    trained = [row["value"] for row in rows if row["name"] == "validation/divergence"]
    # Training evaluates the objective, the last comparison the exported model.
    assert result.divergence.estimate == pytest.approx(trained[-1], rel=1e-4)
    assert len(trained) == 2
    model = sparse_jax.load(run_folder(whole) / export.EXPORTED)
    start = result.start.bias
    assert model.gates.bias_LN.shape == np.shape(start)
    assert np.all(model.gates.bias_LN != np.float32(start))
    assert lm_jax.load_pretrained(base).cfg == model.cfg


def test_the_page_and_the_terminal_say_what_was_bounded(whole, config):
    summary = frame.load_summary(STUDY, whole)
    frozen, result = from_plain(config, PosttrainConfig), result_of(whole)
    built = report.build(frozen, summary, whole)
    lines = "\n".join(built.lines)
    assert f"divergence {result.divergence.estimate:.4f}" in lines
    assert "before the first update, with 99." in lines or "with 98." in lines
    text = page("Runs", built.sections(), provenance={}, lead=built.lead)
    assert "The bound was 0.0400 nats of divergence" in text
    assert "Divergence from the dense model, with its bound." in text
    assert f"divergence {result.start.divergence:.4f}." in text
    assert "a divergence from the dense model in nats per token, given in" in text.lower()
    (bound,) = summary.bounds
    assert bound.slack == bound.target == 0.04
    assert bound.divergence.mean == result.divergence.estimate
    kept = dataclasses.replace(bound, divergence=dataclasses.replace(bound.divergence, mean=0.039))
    missed = dataclasses.replace(
        bound, divergence=dataclasses.replace(bound.divergence, mean=0.041)
    )
    assert report.is_kept(kept, frozen) and not report.is_kept(missed, frozen)
    card = (run_folder(whole) / export.EXPORTED / "README.md").read_text("utf-8")
    assert "| bound of the divergence | 0.04 |" in card and "target loss" not in card


def test_the_page_draws_a_relaxed_bound(whole, config):
    summary, frozen = frame.load_summary(STUDY, whole), from_plain(config, PosttrainConfig)
    (shown,) = report.read_runs(frozen, summary, whole)

    def drawn(settings):
        part = report.training(settings, shown, summary)
        return page("Run", [part], provenance={}, lead=[])

    assert "bound in training" not in drawn(frozen)
    assert "bound in training" in drawn(dataclasses.replace(frozen, relaxed=0.05))


def test_the_page_counts_updates_on_the_floor(whole, config):
    summary, frozen = frame.load_summary(STUDY, whole), from_plain(config, PosttrainConfig)
    result = dataclasses.replace(result_of(whole), at_floor=70, steps=80)
    steps = pq.read_table(run_folder(whole) / METRICS).to_pydict()
    shown = Run(result, steps, [], {}, ())
    text = page("Run", [report.training(frozen, shown, summary)], provenance={}, lead=[])
    assert "was at config.strength.least = 0.0001 for 70 of 80 updates: the bound is not" in text
    few = dataclasses.replace(shown, result=dataclasses.replace(result, at_floor=49))
    text = page("Run", [report.training(frozen, few, summary)], provenance={}, lead=[])
    assert "config.strength.least" not in text


def test_it_is_resumed_with_the_biases_that_it_began_with(whole, config, tmp_path, monkeypatch):
    """`start.json` holds them: a second calibration may differ in its last bits."""
    folder = tmp_path / "run"
    run_folder_again = folder / "seed_234" / "target_0.0400"
    command(config, folder)
    first, again = (read_json(place / START) for place in (run_folder(whole), run_folder_again))
    assert first == again
    (run_folder_again / export.RESULT).unlink()
    (folder / "finished.json").unlink()
    monkeypatch.setattr("sparse_jax.studies.posttrain.beginning.open_biases", None)
    command(config, folder)
    assert read_json(run_folder_again / export.RESULT) == read_json(
        run_folder(whole) / export.RESULT
    )


def test_a_run_goes_on_from_the_model_of_an_earlier_one(whole, config, tmp_path):
    """Before its first update it is that model, and what does not fit it is refused."""
    changed = copy.deepcopy(config)
    changed.start, changed.open_at_start = str(run_folder(whole) / export.PEFT), 0.0
    changed.steps = changed.eval_every = 2
    command(changed, tmp_path / "run")
    before, begun = result_of(whole), result_of(tmp_path / "run").start
    # Once by rule and once sampled; the base has 0.99 of the edges and no divergence.
    assert begun.edges == pytest.approx(before.edges.estimate, abs=0.05)
    assert begun.divergence == pytest.approx(before.divergence.estimate, rel=0.5)
    gates = sparse_jax.load(run_folder(whole) / export.PEFT).gates
    assert begun.bias == tuple(tuple(map(float, row)) for row in gates.bias_LN)
    table = pq.read_table(run_folder(tmp_path / "run") / METRICS).to_pydict()
    assert table["edges"][0] < 0.7
    task = open_task(from_plain(changed, PosttrainConfig), tmp_path / "run")
    given = beginning.start(training.objective_of(task, 0.04), task)[WEIGHTS]
    adapters, _ = load_peft(run_folder(whole) / export.PEFT, task.base)
    jax.tree.map(np.testing.assert_array_equal, given, adapters)
    for where, name, value, error, message in (
        (changed, "raw_gate", not changed.raw_gate, UsageError, "set it as they have it"),
        (changed.adapters, "alpha", 8.0, UsageError, "set config.adapters as they were"),
        (changed, "start", changed.model, BadInputError, "no sparse model; run posttrain"),
    ):
        kept, where[name] = where[name], value
        with pytest.raises(error, match=message):
            command(changed, tmp_path / name)
        where[name] = kept


def test_a_run_and_its_control_begin_with_the_same_adapters(config, tmp_path):
    """That of the control is drawn by the training loop, that of open gates before it."""
    frozen = from_plain(config, PosttrainConfig)
    task = open_task(frozen, tmp_path / "run")
    objective = training.objective_of(task, 0.04)
    drawn = StateLayout.of(objective, task.mesh, frozen.train).init(run_keys(3)[0]).params
    given = beginning.start(objective, task, seed=3)
    jax.tree.map(np.testing.assert_array_equal, drawn[WEIGHTS], given[WEIGHTS])


def test_on_samples_of_the_dense_model_its_excess_loss_is_the_divergence(
    config, base, tmp_path, monkeypatch
):
    """Both are means over the same tokens; the loss has the noise of which token was sampled."""
    monkeypatch.setenv(user_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    changed = copy.deepcopy(config)
    changed.corpus.source, changed.corpus.max_tokens = f"samples:{base}", 300 * config.context
    changed.corpus.splits = (0.5, 0.5, 0.0)
    command(changed, tmp_path / "run")
    windows = pq.read_table(run_folder(tmp_path / "run") / export.WINDOWS).to_pydict()
    rows = {name: np.array(windows[name]) for name in ("sparse_nll", "dense_nll", "divergence")}
    excess = rows["sparse_nll"] - rows["dense_nll"] - rows["divergence"]
    assert len(excess) > 100 and rows["divergence"].sum() > 0
    assert abs(excess.sum()) < 4 * np.sqrt(len(excess)) * excess.std()


def test_all_weights_may_be_trained_from_open_gates(base, text, tmp_path):
    changes = {**CHANGES, "full": True, "learning_rate": 1e-3, "steps": 4, "eval_every": 4}
    command(settings(base, text, **changes), tmp_path / "run")
    folder = run_folder(tmp_path / "run")
    result = load_result(folder / export.RESULT, RunResult)
    assert abs(result.start.difference) < 0.01
    model = sparse_jax.load(folder / export.EXPORTED)
    moved_LN = np.abs(model.gates.bias_LN - np.float32(result.start.bias))
    # Four updates, each of at most three times the rate of weights.
    assert 0 < moved_LN.max() < 4 * 3 * 1.1e-3


def test_the_control_of_a_run_with_open_gates_has_no_biases_to_train(base, text, tmp_path):
    """It was refused, because no parameter was in the group of the biases' rate."""
    changes = {**CHANGES, "constraint": "loss", "control": True, "steps": 2, "eval_every": 2}
    command(settings(base, text, **changes), tmp_path / "run")
    control = run_folder(tmp_path / "run").parent / "control"
    windows = pq.read_table(control / export.WINDOWS).to_pydict()
    assert windows["open_edges"] == windows["pairs"]
    assert not (control / START).exists()
