"""The study as a command: its smoke mode end to end, and after a stop."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.run import cli
from lm_jax.run import stop as stop_flag
from lm_jax.run.config import from_plain
from lm_jax.train import loop
from sparse_jax.addition import models, problems, report, study
from sparse_jax.addition.__main__ import main
from sparse_jax.addition.config import AdditionConfig, experiment
from sparse_jax.summary import Spread

CONFIG = "configs/sparse/addition.py:smoke"


def command(folder) -> int:
    return cli.run(main, ["addition", f"--workdir={folder}"], config=CONFIG)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "run"
    assert command(folder) == 0
    return folder


def test_the_smoke_study_leaves_its_numbers_and_its_report(finished, capsys):
    (summary,) = json.loads((finished / study.SUMMARY).read_text("utf-8"))["seeds"]
    for name, own in summary["models"].items():
        assert own["accuracy"]["all"]["n"] == 60
        assert own["steps"] == 6
        assert len(own["edges"]["by_layer"]) == len(own["without"]) == 4
        assert (finished / "seed_0" / name / "metrics.parquet").is_file()
    table = pq.read_table(finished / "seed_0" / study.SUMS).to_pydict()
    assert len(table["sum"]) == 120
    totals = np.sum([table[f"edges_{layer}"] for layer in range(4)], axis=0)
    assert totals[:60].tolist() == [264] * 60
    assert totals[60:].mean() == pytest.approx(
        summary["models"]["sparse"]["edges"]["all"]["estimate"]
    )
    page = (finished / study.REPORT).read_text("utf-8")
    # Three sums, two models each, and two curves.
    assert page.count("<svg xmlns") == 6 and page.count('<figure class="plot chart"') == 2
    assert command(finished) == 0
    printed = capsys.readouterr().out
    assert "finished 20" in printed and "Exact sums on 60 problems" in printed
    assert "(seed 0, one run)" in printed


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


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"batch_size": 0, "seeds": (-1,)}, r"batch_size = 0 .*; config\.seeds = \(-1,\)"),
        ({"drawn": ("3+4",)}, "'3\\+4' is no problem"),
    ],
)
def test_settings_that_cannot_be_are_refused_together(field, said):
    with pytest.raises(UsageError, match=said):
        AdditionConfig(**field)


def test_a_stopped_study_goes_on_to_the_same_numbers(finished, tmp_path, monkeypatch):
    train = loop.train

    def stopped(folder, *given, **named):
        def stop(step):
            if folder.name == "sparse" and step == 4:
                stop_flag.request()

        return train(folder, *given, **named, on_step=stop)

    folder = tmp_path / "run"
    monkeypatch.setattr(models, "train", stopped)
    assert command(folder) == 75
    monkeypatch.setattr(models, "train", train)
    assert command(folder) == 0
    result, whole = (
        json.loads((place / study.SUMMARY).read_text("utf-8")) for place in (folder, finished)
    )
    for summary in (result, whole):
        for own in summary["seeds"][0]["models"].values():
            del own["training_seconds"]
    assert result == whole


def test_seeds_stand_beside_each_other_and_one_that_is_there_is_not_trained_again(
    finished, tmp_path, capsys
):
    folder = shutil.copytree(finished, tmp_path / "run")
    saved = {file: file.stat().st_mtime_ns for file in folder.rglob("checkpoints/*")}
    argv = ["addition", f"--workdir={folder}", "--config.seeds=(0, 5)", "--resume=force"]
    assert cli.run(main, argv, config=CONFIG) == 0
    assert {file: file.stat().st_mtime_ns for file in saved} == saved
    summary = json.loads((folder / study.SUMMARY).read_text("utf-8"))
    first, second = summary["seeds"]
    assert (first["seed"], second["seed"]) == (0, 5)
    losses = [
        pq.read_table(folder / f"seed_{seed}" / "dense" / "metrics.parquet")["loss"].to_pylist()
        for seed in (0, 5)
    ]
    assert losses[0] != losses[1]
    # Six updates close nothing: the numbers of longer studies, put in their place.
    for each, edges, exact in ((first, 40.0, 0.75), (second, 48.0, 1.0)):
        each["models"]["sparse"]["edges"]["all"]["estimate"] = edges
        each["models"]["sparse"]["accuracy"]["all"]["estimate"] = exact
    result = report.between_seeds([first, second])
    assert result["sparse"]["edges"] == Spread(mean=44.0, least=40.0, most=48.0, n=2)
    summary["between_seeds"] = json.loads(json.dumps(result, default=dataclasses.asdict))
    text = " ".join(report.findings(summary))
    assert "87.5 % (75.0 % to 100.0 %) sparse" in text
    assert "open edges of a sum 44.0 (40.0 to 48.0)" in text
    printed = capsys.readouterr().out
    assert "Over 2 seeds, mean and range" in printed
    assert "Over 2 seeds, mean and range" in (folder / study.REPORT).read_text("utf-8")


def test_a_look_sees_the_gates_that_the_kernels_count():
    config = from_plain(experiment("smoke", bias=0.0), AdditionConfig)
    _, sparse = models.tasks(config)
    drawn = params_lib.init(jax.random.key(0), sparse.objective.spec)
    # Larger than drawn, so that scores spread over both signs.
    params = jax.tree.map(lambda x: 20.0 * x, drawn)
    tokens = problems.rows(np.arange(0, 10_000, 997))
    seen = sparse.look(sparse.weights(params), tokens)
    counted = jax.jit(sparse.objective.evaluate)(params, (), tokens)
    assert not (seen.pattern_LPTS[~seen.open_LPTS]).any()
    np.testing.assert_array_equal(seen.edges_LP.sum(1), counted["open_edges"][:, 0])
    assert 0.1 < seen.open_LPTS.sum() / (11 * 264) < 0.9
    closed = sparse.look(sparse.weights(params), tokens, kept_LTS=np.zeros((4, 11, 11), np.float32))
    assert not closed.pattern_LPTS.any()
    np.testing.assert_array_equal(closed.open_LPTS[0], seen.open_LPTS[0])
