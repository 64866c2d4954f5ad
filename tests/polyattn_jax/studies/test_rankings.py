"""Rank correlations of statistics with what trained sets lose, and the study that measures them."""

import dataclasses
import json
import math
import shutil

import jax
from ml_collections import ConfigDict
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.run.config import from_plain
from lm_jax.run.results import load_result
from lm_jax.study import frame
from polyattn_jax.studies.check.hybrid import groups_of
from polyattn_jax.studies.distill import measure as distill_measure
from polyattn_jax.studies.distill import task as distill
from polyattn_jax.studies.rankings import STUDY, numbers
from polyattn_jax.studies.rankings.results import OUTCOMES, SETS, STAGES, RankingsSummary
from polyattn_jax.studies.rankings.run import chosen_sets
from polyattn_jax.studies.rankings.settings import STATISTICS, RankingsConfig
from tests.polyattn_jax.conftest import write_documents

GROUPS = 10


def row(seed, share, groups, loss, chosen_by="random", right=5):
    return {
        "seed": seed,
        "replaced": share,
        "set": "-".join(map(str, groups)),
        "chosen_by": chosen_by,
        "groups": groups,
        **{f"text_{stage}": loss for stage in STAGES},
        **{f"answer_{stage}": -loss for stage in STAGES},
        **{f"right_{stage}": right for stage in STAGES},
        "right_softmax": 8,
        "prompts": 8,
    }


def planted(seeds=(0, 1), shares=(30.0, 50.0)):
    """Sets that lose the sum of the costs of their groups, and costs of which one is reversed."""
    rng = np.random.default_rng(0)
    cost_G = rng.random(GROUPS)
    rows = []
    for seed in seeds:
        for share in shares:
            size = round(share * GROUPS / 100)
            for draw in range(5):
                groups = sorted(rng.permutation(GROUPS)[:size].tolist())
                name = "random" if draw else "good,random"
                rows.append(row(seed, share, groups, cost_G[groups].sum(), name, right=draw))
            worst = np.argsort(-cost_G)[:size].tolist()
            rows.append(row(seed, share, worst, cost_G[worst].sum(), "bad"))
    table = pa.Table.from_pylist(rows, schema=SETS)
    return table, {"good": cost_G, "bad": -cost_G}


def over_cells(table, costs, outcomes=OUTCOMES, **options):
    return numbers.over_cells(table, costs, numbers.cells(table, costs, outcomes), **options)


def test_a_statistic_that_orders_the_sets_as_they_are_correlates_by_one():
    table, costs = planted()
    results = {(r.statistic, r.outcome): r for r in over_cells(table, costs, deals=500)}
    for stage in STAGES:
        for name, sign in (("good", 1.0), ("bad", -1.0)):
            of_text = results[name, f"text_{stage}"]
            assert of_text.correlation == pytest.approx(sign)
            assert (of_text.low, of_text.high) == pytest.approx((sign, sign))
            assert results[name, f"answer_{stage}"].correlation == pytest.approx(-sign)
            # No deal of the costs does as well, and two statistics are corrected for.
            assert of_text.cells == 4 and of_text.p_value == pytest.approx(2 / 501)
    assert set(results) == {(name, outcome) for name in costs for outcome in OUTCOMES}


def test_costs_that_say_nothing_are_seldom_shown_to_say_something():
    """Of costs drawn apart from the losses, p below 0.05 is as rare as that."""
    table, _ = planted()
    rng = np.random.default_rng(5)
    found = []
    for seed in range(200):
        (result,) = over_cells(
            table, {"noise": rng.random(GROUPS)}, ["text_logits"], deals=99, seed=seed
        )
        found.append(result.p_value)
    # 99.9 % of binomial counts of 200 at 5 % are below 22.
    assert sum(p < 0.05 for p in found) < 22 and 0.4 < np.mean(found) < 0.6


def test_correlations_and_gains_are_those_of_the_sets_of_one_budget_and_seed():
    table, costs = planted()
    rows = table.to_pylist()
    noisy = [dict(r, text_logits=r["text_logits"] + (i * 7 % 5) / 5) for i, r in enumerate(rows)]
    table = pa.Table.from_pylist(noisy, schema=SETS)
    found = numbers.cells(table, costs, ["text_logits", "accuracy_logits"])
    assert len(found) == 2 * 2 * 2 * 2
    for cell in found:
        own = [r for r in noisy if (r["seed"], r["replaced"]) == (cell.seed, cell.replaced)]
        drawn = [r for r in own if "random" in r["chosen_by"]]
        expected = [costs[cell.statistic][r["groups"]].sum() for r in drawn]

        def outcome(row, name=cell.outcome):
            return row[name] if name == "text_logits" else 1 - row["right_logits"] / 8

        measured = [outcome(r) for r in drawn]
        assert cell.correlation == pytest.approx(stats.spearmanr(expected, measured).statistic)
        assert cell.sets == 5
        (chosen,) = (outcome(r) for r in own if cell.statistic in r["chosen_by"].split(","))
        assert (cell.chosen, cell.random) == pytest.approx((chosen, np.mean(measured)))
        assert cell.beaten == sum(chosen < m for m in measured)
    for result in numbers.over_cells(table, costs, found, deals=9):
        own = [c for c in found if (c.statistic, c.outcome) == (result.statistic, result.outcome)]
        gains = [c.random - c.chosen for c in own]
        assert result.gain == pytest.approx(np.mean(gains))
        assert (result.gain_low, result.gain_high) == (min(gains), max(gains))
        assert result.beaten == sum(c.beaten for c in own) and result.of == 20


def test_an_infinite_median_counts_as_a_row_without_weight_on_the_key():
    found = numbers.predicted("s", np.array([0.0, 1.0, 3.0, math.inf]))
    np.testing.assert_allclose(found, [0.0, 0.5, 0.75, 1.0])
    # Any other cost that is not finite outweighs all that are.
    finite, most = numbers.predicted("text", np.array([-2.0, math.inf]))
    assert finite == -2.0 and most > 2 * 2.0


def test_sets_that_lose_the_same_have_no_correlation():
    table, costs = planted(seeds=(0,), shares=(30.0,))
    rows = [dict(r, text_logits=1.0) for r in table.to_pylist()]
    table = pa.Table.from_pylist(rows, schema=SETS)
    for result in over_cells(table, costs, ["text_logits"], deals=9):
        assert result.correlation is None and result.p_value is None and result.cells == 0
        assert result.gain == 0.0


def test_a_statistic_that_is_tied_where_the_set_is_cut_chooses_none():
    config = RankingsConfig(statistics=("text", "kl"), replaced=(30.0,), draws=3, seeds=(0,))
    tied_G = np.array([0.0, 0.0, 1.0, 1.0, 1.0, *range(2, 7)])
    costs = {"text": tied_G, "kl": np.arange(GROUPS, dtype=float)}
    names = [name for each in chosen_sets(config, costs, GROUPS) for name in each.chosen_by]
    assert "text" not in names and names.count("kl") == 1 and names.count("random") == 3
    rows = [row(0, 30.0, [0, 1, 2 + i], float(i)) for i in range(4)]
    table = pa.Table.from_pylist(rows, schema=SETS)
    (result,) = over_cells(table, {"text": tied_G}, ["text_logits"], deals=9)
    assert result.gain is None and result.of == 0 and result.correlation is not None


def test_sets_are_those_of_least_cost_and_random_ones_of_the_same_size():
    config = RankingsConfig(statistics=("text", "kl", "s"), replaced=(20.0, 50.0), draws=3)
    text_G = np.arange(GROUPS, dtype=float)
    costs = {"text": text_G, "kl": text_G * 2, "s": -text_G}
    sets = list(chosen_sets(config, costs, GROUPS))
    for seed in (0, 1):
        for share, size in ((20.0, 2), (50.0, 5)):
            own = [each for each in sets if (each.seed, each.replaced) == (seed, share)]
            by = {name: each.groups for each in own for name in each.chosen_by if name != "random"}
            assert by["text"] == by["kl"] == tuple(range(size))
            assert by["s"] == tuple(range(GROUPS - size, GROUPS))
            assert sum("random" in each.chosen_by for each in own) == 3
            assert all(len(each.groups) == size for each in own)
            assert len({each.groups for each in own}) == len(own)
    drawn = [
        {e.groups for e in sets if e.seed == seed and "random" in e.chosen_by} for seed in (0, 1)
    ]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"statistics": ("text", "kll")}, "config.statistics names 'kll'; it is one of text"),
        ({"statistics": ("s",), "recipe": "poly:p=3"}, "S is not defined for poly:p=3"),
        ({"replaced": (50.0, 30.0)}, "ascending"),
        ({"seeds": (1, 1)}, "each once"),
        ({"task": "choices:arc_easy"}, "has no prompts with answers"),
        ({"task": "nedle"}, "did you mean 'needle'"),
    ],
)
def test_settings_that_cannot_be_used_are_named(changed, words):
    with pytest.raises(UsageError, match=words):
        dataclasses.replace(RankingsConfig(), **changed)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("text") / "documents")


def settings(model, text, **changes):
    config = ConfigDict(dataclasses.asdict(RankingsConfig()))
    config.corpus.update({"source": str(text), "splits": (0.7, 0.3, 0.0), "max_tokens": 0})
    config.adapters.update({"rank": 4, "alpha": 8.0})
    config.update(
        {
            "model": str(model),
            "context": 32,
            "batch_size": 8,
            "steps": 20,
            "logit_steps": 20,
            "recipe": "relu:p=8,b=0",
            "learning_rate": 1e-2,
            "logit_learning_rate": 3e-3,
            "replaced": (34.0, 67.0),
            "draws": 3,
            "seeds": (0,),
            "task_n": 9,
            "task_length": 64,
            "ranking_texts": 6,
            **changes,
        }
    )
    return config


@pytest.fixture(scope="module")
def measured(tiny, text, tmp_path_factory):
    """The folder of a run on the tiny model, by key head."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    frame.execute(STUDY, settings(tiny, text, by="kv_head"), folder)
    return folder


@pytest.mark.long
def test_sets_are_trained_and_measured(measured):
    summary = load_result(measured / "summary.json", RankingsSummary)
    rows = pq.read_table(measured / "sets.parquet").to_pylist()
    assert summary.sets == len(rows) >= 4 and summary.groups == 6
    # Of one seed and size, each statistic has chosen one set.
    for share in (34.0, 67.0):
        own = [row for row in rows if row["replaced"] == pytest.approx(share)]
        names = [name for row in own for name in row["chosen_by"].split(",")]
        assert sorted(names) == sorted([*STATISTICS, "random", "random", "random"])
    # Training lowers what all but lucky sets lose.
    before, after = (np.mean([row[f"text_{s}"] for row in rows]) for s in ("untrained", "logits"))
    assert after < before
    costs = pq.read_table(measured / "costs.parquet").to_pylist()
    assert {row["statistic"] for row in costs} == set(STATISTICS)
    by_name = {
        name: np.array([row["cost"] for row in costs if row["statistic"] == name])
        for name in STATISTICS
    }
    table = pq.read_table(measured / "sets.parquet")
    assert numbers.over_cells(table, by_name, summary.cells) == summary.results


@pytest.mark.long
def test_the_losses_of_a_set_are_those_of_the_folder_that_distill_leaves(
    measured, tiny, text, tmp_path
):
    """Set by set training equals a training of the same heads alone, where groups are apart."""
    row = pq.read_table(measured / "sets.parquet").to_pylist()[0]
    model = lm_jax.load_pretrained(tiny)
    groups = groups_of(model.cfg, "kv_head")
    heads = sorted(h for g in row["groups"] for h in groups[g].tolist())
    held = {
        "version": 1,
        "model": "tiny",
        "model_sha256": model.identity.text,
        "recipe": "relu:p=8,b=0",
        "bias": 0.0,
        "layers": 3,
        "heads": 4,
        "replaced": [[h // 4, h % 4] for h in heads],
    }
    (tmp_path / "heads.json").write_text(json.dumps(held))
    config = from_plain(settings(tiny, text, by="kv_head"), RankingsConfig)
    alone = dataclasses.replace(config.distill(0), hybrid=str(tmp_path / "heads.json"))
    untrained = distill.open_task(alone, tmp_path / "run")
    objective = distill.objective_of(untrained, tmp_path / "run")
    found = distill_measure.measure(
        untrained, objective, params_lib.init(jax.random.key(0), objective.spec)
    )
    long = found["tokens"] >= 16
    rise = (found["hybrid"] - found["softmax"])[long].sum() / found["tokens"][long].sum()
    assert row["text_untrained"] == pytest.approx(rise, abs=1e-5)


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_with_the_sets_that_are_left(measured, tiny, text, tmp_path):
    folder = shutil.copytree(measured, tmp_path / "run")
    (folder / "finished.json").unlink()
    before = (folder / "summary.json").read_bytes()
    (folder / "summary.json").unlink()
    shards = sorted((folder / "shards").glob("*.parquet"))
    shards[-1].unlink()
    frame.execute(STUDY, settings(tiny, text, by="kv_head"), folder)
    first, second = (load_result(f / "summary.json", RankingsSummary) for f in (measured, folder))
    assert before and first.cells == second.cells
