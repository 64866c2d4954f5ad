"""The study as a command: the numbers of its smoke mode, and of another seed."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.model import params as params_lib
from lm_jax.run.config import from_plain
from lm_jax.run.results import load_result
from lm_jax.run.tables import read_table_provenance
from lm_jax.study import command as study_command
from lm_jax.study import frame
from sparse_jax.studies.addition import STUDY, models, problems, report
from sparse_jax.studies.addition.numbers import between_seeds
from sparse_jax.studies.addition.results import AdditionSummary
from sparse_jax.studies.addition.run import SUMS
from sparse_jax.studies.addition.settings import AdditionConfig
from sparse_jax.studies.posttrain.results import Spread

CONFIG = "--config=sparse/addition:smoke"


def command(folder) -> int:
    return study_command.run(STUDY, ["addition", CONFIG, f"--workdir={folder}"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "run"
    assert command(folder) == 0
    return folder


def test_the_smoke_study_leaves_its_numbers_and_its_report(finished):
    summary = load_result(finished / frame.SUMMARY, AdditionSummary)
    (seed,) = summary.seeds
    for name, own in seed.models.items():
        assert own.accuracy.all.n == 60
        assert own.steps == 6
        assert len(own.edges.by_layer) == len(own.without) == 4
        assert (finished / "seed_0" / name / "metrics.parquet").is_file()
    table = pq.read_table(finished / "seed_0" / SUMS).to_pydict()
    assert len(table["sum"]) == 120
    recorded = json.loads((finished / "provenance.json").read_text("utf-8"))
    for name in (SUMS, "sparse/metrics.parquet"):
        assert read_table_provenance(finished / "seed_0" / name) == recorded
    edges = np.sum([table[f"edges_{layer}"] for layer in range(4)], axis=0)
    assert edges[:60].tolist() == [264] * 60
    assert edges[60:].mean() == pytest.approx(seed.models.sparse.edges.all.estimate)
    printed = "\n".join(report.build(summary.config, summary, finished).lines)
    assert "Exact sums on 60 problems" in printed and "(seed 0, one run)" in printed


def test_strength_and_gates_stay_as_set(finished):
    steps = pq.read_table(finished / "seed_0" / "sparse" / "metrics.parquet").to_pydict()
    strength = AdditionConfig().strength
    assert steps["strength"] == pytest.approx([strength] * 6, rel=1e-5)
    assert set(steps["divergence"]) == {0.0}
    assert all(0.5 < share < 1 for share in steps["edges"])


def test_the_sparse_model_begins_as_the_dense_one(finished):
    dense, sparse = (
        pq.read_table(finished / "seed_0" / name / "metrics.parquet")["loss"].to_pylist()
        for name in ("dense", "sparse")
    )
    assert dense[0] > sparse[0] + 0.1


def test_seeds_are_compared_and_a_trained_one_is_not_trained_again(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    saved = {file: file.stat().st_mtime_ns for file in folder.rglob("checkpoints/*")}
    flags = [CONFIG, f"--workdir={folder}", "--config.seeds=(0, 5)", "--resume=force"]
    assert study_command.run(STUDY, ["addition", *flags]) == 0
    assert {file: file.stat().st_mtime_ns for file in saved} == saved
    summary = load_result(folder / frame.SUMMARY, AdditionSummary)
    assert [each.seed for each in summary.seeds] == [0, 5]
    losses = [
        pq.read_table(folder / f"seed_{seed}" / "dense" / "metrics.parquet")["loss"].to_pylist()
        for seed in (0, 5)
    ]
    assert losses[0] != losses[1]
    # Six updates close nothing, so that these are the numbers of longer studies.
    changed = tuple(map(with_sparse, summary.seeds, (40.0, 48.0), (0.75, 1.0)))
    result = between_seeds(changed)
    assert result.sparse.edges == Spread(mean=44.0, least=40.0, most=48.0, n=2)
    summary = dataclasses.replace(summary, seeds=changed, between_seeds=result)
    text = " ".join(report.findings(summary))
    assert "87.5 % (75.0 % to 100.0 %) sparse" in text
    assert "open edges of a sum 44.0 (40.0 to 48.0)" in text
    assert "Over 2 seeds, mean and range" in capsys.readouterr().out


def with_sparse(seed, edges, exact):
    """The seed with these open edges and this share of exact sums of its sparse model."""
    sparse = seed.models.sparse
    replace = dataclasses.replace
    edges = replace(sparse.edges, all=replace(sparse.edges.all, estimate=edges))
    accuracy = replace(sparse.accuracy, all=replace(sparse.accuracy.all, estimate=exact))
    sparse = replace(sparse, edges=edges, accuracy=accuracy)
    return replace(seed, models=replace(seed.models, sparse=sparse))


def test_a_trace_has_the_gates_that_the_kernels_count():
    config = from_plain(STUDY.settings("smoke", bias=0.0), AdditionConfig)
    _, sparse = models.tasks(config)
    initial = params_lib.init(jax.random.key(0), sparse.objective.spec)
    # Larger than initialised, so that scores have both signs.
    params = jax.tree.map(lambda x: 20.0 * x, initial)
    tokens = problems.rows(np.arange(0, 10_000, 997))
    trace = sparse.trace(sparse.weights(params), tokens)
    counted = jax.jit(sparse.objective.evaluate)(params, (), tokens)
    assert not (trace.pattern_LPTS[~trace.open_LPTS]).any()
    np.testing.assert_array_equal(trace.edges_LP.sum(1), counted["open_edges"][:, 0])
    assert 0.1 < trace.open_LPTS.sum() / (11 * 264) < 0.9
    closed = sparse.trace(
        sparse.weights(params), tokens, kept_LTS=np.zeros((4, 11, 11), np.float32)
    )
    assert not closed.pattern_LPTS.any()
    np.testing.assert_array_equal(closed.open_LPTS[0], trace.open_LPTS[0])
