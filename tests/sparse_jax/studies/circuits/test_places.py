"""Places patched by layer and position, by command: rows, summary, page, refusals."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import spearmanr

from lm_jax.errors import UsageError
from lm_jax.study import frame
from sparse_jax.circuits.place_patching import OF_HEADS
from sparse_jax.studies.circuits import STUDY, report
from sparse_jax.studies.circuits.report_text import PLACE
from sparse_jax.studies.circuits.settings import PLACES, CircuitConfig
from tests.sparse_jax.circuits.small_study import HEADS, LAYERS, SMALL, save_models

# Run by `make test-all`.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study of a model in which only head 1.2 writes to the residual stream."""
    models = save_models(tmp_path_factory.mktemp("models"))
    config = STUDY.settings(
        **SMALL,
        dense=str(models / "planted"),
        rephrased="",
        tasks=(str(models / "mine.jsonl"),),
        components=("heads",),
        patch=tuple(PLACES),
    )
    folder = tmp_path_factory.mktemp("study")
    frame.execute(STUDY, config, folder)
    return folder, frame.load_summary(STUDY, folder)


def test_every_place_has_rows_and_a_table_of_means(done):
    folder, summary = done
    (result,) = summary.results
    assert [each.place for each in result.places] == list(PLACES)
    rows = pq.read_table(folder / "rows.parquet").to_pylist()
    for own in result.places:
        mean = np.asarray(own.mean)
        found = {}
        for row in rows:
            asked = row["quantity"], row["component"], row["method"]
            if asked == ("place", own.place, "exact"):
                found.setdefault((row["layer"], row["head"], row["query"]), []).append(row["value"])
        heads = {head for _, head, _ in found}
        # Two heads read each key head.
        count = HEADS // 2 if own.place in ("key", "value") else HEADS
        assert heads == (set(range(count)) if own.place in OF_HEADS else {None})
        assert mean.shape[0] == LAYERS and len(found) == mean.size * len(heads)
        means = {place: np.mean(values) for place, values in found.items()}
        first = own.strongest[0]
        largest = max(means.values(), key=abs)
        assert means[first.layer, first.head, first.position] == largest == first.effect.estimate
        assert mean[first.layer, first.position] == largest


def test_only_the_head_that_writes_carries_anything(done):
    _, summary = done
    by_place = {each.place: each for each in summary.results[0].places}
    heads = by_place["head_out"]
    carrying = [each for each in heads.strongest if abs(each.effect.estimate) > 1e-3]
    assert carrying and {(each.layer, each.head) for each in carrying} == {(1, 2)}
    # It is all that attention writes: the same effects as those of its layer's attention.
    np.testing.assert_allclose(heads.mean[1], by_place["attn_out"].mean[1], atol=1e-4)
    assert np.abs(by_place["attn_out"].mean[0]).max() == 0


def test_estimates_are_compared_with_exact_effects_of_the_places_that_can_have_any(done):
    folder, summary = done
    rows = pq.read_table(folder / "rows.parquet").to_pylist()
    for own in summary.results[0].places:
        sizes = {}
        for row in rows:
            if (row["quantity"], row["component"]) == ("place", own.place):
                place = row["query"], row["layer"], row["head"]
                by_place = sizes.setdefault(row["method"], {})
                by_place.setdefault(place, []).append(abs(row["value"]))
        means = {}
        for method, by_place in sizes.items():
            found = {place: np.mean(values) for place, values in by_place.items()}
            floor = 2.0**-20 * max(found.values())
            means[method] = {place: x if x > floor else 0.0 for place, x in found.items()}
        # The prompts begin alike, so that nothing has an effect before some token.
        first = min(place[0] for place, size in means["exact"].items() if size > 0)
        places = [place for place in means["exact"] if place[0] >= first]
        assert first > 0 and len(places) < len(means["exact"])
        methods = [each.method for each in own.agreements]
        softmax = ["atp_star"] if own.place in ("query", "key") else []
        assert methods == ["atp", *softmax, "graddrop"]
        for each in own.agreements:
            exact, estimate = (
                [means[m][place] for place in places] for m in ("exact", each.method)
            )
            assert each.compared == len(places)
            median = sorted(estimate)[(len(places) - 1) // 2]
            lower = [x for x, guess in zip(exact, estimate, strict=True) if guess <= median]
            assert each.lower == pytest.approx(len(lower) / len(places)) and each.lower >= 0.5
            assert each.missed == pytest.approx(max(lower) / max(exact), abs=1e-6)
            if each.spearman is None:
                assert len(set(exact)) == 1 or len(set(estimate)) == 1
            else:
                want = spearmanr(estimate, exact).statistic
                assert each.spearman.estimate == pytest.approx(want, abs=1e-6)


def test_the_page_and_the_terminal_say_where_each_place_is_strongest(done):
    folder, summary = done
    built = report.build(summary.config, summary, folder)
    # Lines are wrapped.
    text = " ".join(" ".join(built.lines).split())
    for place in summary.results[0].places:
        first = place.strongest[0]
        assert PLACE[place.place] in text and f"position {first.position}" in text
    titles = [each.title for each in built.sections()]
    assert "What is carried where?" in titles
    page = (folder / "report.html").read_text()
    assert "AtP*, softmax" in page and "Largest effect there" in page


def test_a_place_that_is_none_is_refused():
    with pytest.raises(UsageError, match=r"--patch=.*none or more different names.*'resid_pre'"):
        CircuitConfig(patch=("resid",))
    assert CircuitConfig(patch=()).patch == ()
