"""The numbers over seeds: their mean and range, beside intervals that are said to be of one run."""

import pytest

from lm_jax.run.files import read_json
from sparse_jax import posttrain
from sparse_jax.summary import Spread, by_bound, spread
from tests.sparse_jax.small_runs import command, settings


def test_the_spread_is_the_mean_and_the_ends():
    assert spread([3.0, 1.0, 2.0]) == Spread(mean=2.0, least=1.0, most=3.0, n=3)
    assert spread([3.0]) == Spread(mean=3.0, least=3.0, most=3.0, n=1)


def test_runs_are_gathered_by_their_bound():
    def run(seed, target, edges, over):
        numbers = {"edges": edges, "loss": target, "difference": target - 3.0}
        lines = {name: {"estimate": value} for name, value in numbers.items()}
        control = None if over is None else {"estimate": over}
        return lines | {"seed": seed, "target": target, "over_control": control}

    results = [run(1, 3.1, 0.2, 0.5), run(1, 3.5, 0.1, 0.6), run(2, 3.1, 0.4, 0.7)]
    results.append(run(2, 3.5, 0.3, None))
    tight, loose = by_bound(results, 3.0)
    assert (tight["target"], tight["seeds"], loose["target"]) == (3.1, [1, 2], 3.5)
    assert tight["slack"] == pytest.approx(0.1)
    assert tight["edges"] == Spread(mean=pytest.approx(0.3), least=0.2, most=0.4, n=2)
    assert tight["over_control"] == Spread(mean=pytest.approx(0.6), least=0.5, most=0.7, n=2)
    # A number that not all runs have is none.
    assert loose["over_control"] is None


@pytest.mark.slow
def test_two_seeds_are_two_runs_with_their_controls(base, text, tmp_path, capsys):
    folder = tmp_path / "run"
    config = settings(base, text, seeds=(1, 2), control=True, steps=4, eval_every=4)
    command(config, folder)
    result = read_json(folder / posttrain.SUMMARY)
    first, second = result["runs"]
    assert [first["folder"][:7], second["folder"][:7]] == ["seed_1/", "seed_2/"]
    assert [control["seed"] for control in result["controls"]] == [1, 2]
    shares = [run["edges"]["estimate"] for run in (first, second)]
    assert shares[0] != shares[1]
    (bound,) = result["bounds"]
    assert (bound["edges"]["least"], bound["edges"]["most"]) == (min(shares), max(shares))
    assert bound["edges"]["mean"] == pytest.approx(sum(shares) / 2, rel=1e-12)
    more = [run["over_control"]["estimate"] for run in (first, second)]
    assert bound["over_control"]["mean"] == pytest.approx(sum(more) / 2, rel=1e-12)
    # Each beside the control of its own seed.
    for run, control in zip((first, second), result["controls"], strict=True):
        own = run["loss"]["estimate"] - control["loss"]["estimate"]
        assert run["over_control"]["estimate"] == pytest.approx(own, rel=1e-6)

    said = capsys.readouterr().out
    low, high = (f"{100 * share:.2f}" for share in sorted(shares))
    assert f"2 seeds: {100 * bound['edges']['mean']:.2f} % of edges open ({low} to {high}" in said
    assert "between seeds" in said and "over documents, of one trained model" in said
    assert "one run" not in said
    page = (folder / posttrain.REPORT).read_text("utf-8")
    assert "means of 2 seeds" in page and f"({low} to {high})" in page


def test_one_seed_is_told_as_one_run(base, text, tmp_path, capsys):
    folder = tmp_path / "run"
    command(settings(base, text, steps=4, eval_every=4), folder)
    said = capsys.readouterr().out
    assert ", one run: " in said and "between seeds" not in said
    page = (folder / posttrain.REPORT).read_text("utf-8")
    assert "(one run)." in page and "This is one run of each bound." in page
