"""Results over seeds: mean and range, what the page says of them, and whose a folder is."""

import dataclasses
import json

import pytest

from lm_jax.errors import UsageError
from lm_jax.report import page
from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json
from lm_jax.run.identity import ModelIdentity
from lm_jax.statistics import Interval
from lm_jax.study import frame
from lm_jax.text.preparation import SplitSize
from sparse_jax.studies.posttrain import report, run_identity, task
from sparse_jax.studies.posttrain.numbers import by_bound, spread
from sparse_jax.studies.posttrain.report import Run, conclusion, sections
from sparse_jax.studies.posttrain.report_text import terms
from sparse_jax.studies.posttrain.results import (
    ComparedRun,
    ControlResult,
    CorpusSummary,
    PosttrainSummary,
    Rounding,
    Spread,
)
from sparse_jax.studies.posttrain.settings import OVER_CONTROL, PosttrainConfig
from tests.sparse_jax.small_runs import command, settings


def test_the_spread_is_the_mean_and_the_ends():
    assert spread([3.0, 1.0, 2.0]) == Spread(mean=2.0, least=1.0, most=3.0, n=3)
    assert spread([3.0]) == Spread(mean=3.0, least=3.0, most=3.0, n=1)


def run(seed, bound, target, edges, over):
    """A run with these numbers; the others do not matter."""

    def interval(estimate):
        return Interval(estimate, estimate - 0.5, estimate + 0.5, 9)

    return ComparedRun(
        seed=seed,
        target=target,
        folder=f"seed_{seed}/target_{target:.4f}",
        loss=interval(target),
        dense_loss=interval(3.0),
        difference=interval(target - 3.0),
        edges=interval(edges),
        open_edges_per_head=1.5,
        windows=12,
        validation_tokens=400,
        strength=0.25,
        steps=4,
        tokens_seen=1000,
        bound=bound,
        rounding=Rounding("bfloat16", 0.03, None, target) if over is None else None,
        over_control=None if over is None else interval(over),
    )


# The second seed has its first bound a little higher, as one relative to its control has.
RUNS = (
    run(1, 0, 3.1, 0.2, 0.5),
    run(1, 1, 3.5, 0.1, 0.6),
    run(2, 0, 3.2, 0.4, 0.7),
    run(2, 1, 3.5, 0.3, None),
)


def summary():
    """A post-training of these runs, with one control."""
    control = ControlResult(
        1, "seed_1/control", RUNS[0].loss, RUNS[0].difference, 4, 1000, RUNS[3].rounding
    )
    return PosttrainSummary(
        model="base",
        model_sha256="0" * 64,
        family="llama",
        context=8,
        corpus=CorpusSummary("text", {"train": SplitSize(0.9, 18, 400)}),
        trained_parameters=7,
        dense_loss=3.0,
        validation_tokens=400,
        seeds=(1, 2),
        bounds=by_bound(RUNS, 3.0),
        runs=RUNS,
        controls=(control,),
        device="cpu",
    )


def test_bounds_are_the_targets_or_slacks_over_a_loss():
    slacks = PosttrainConfig(slacks=(0.0, 4.0))
    assert task.bounds(slacks, 3.0) == [3.0, 7.0]
    assert task.bounds(slacks, 3.0, control=2.5) == [2.5, 6.5]
    absolute = PosttrainConfig(targets=(3.5, 2.75))
    assert task.bounds(absolute, 3.0, control=2.5) == [3.5, 2.75]
    with pytest.raises(UsageError, match=r"has 2\.75 nats .* dense model reaches 3\.0000"):
        task.bounds(absolute, 3.0)


def test_runs_are_grouped_by_their_bound():
    tight, loose = by_bound(RUNS, 3.0)
    assert (tight.seeds, loose.target) == ((1, 2), 3.5)
    assert tight.target == pytest.approx(3.15)
    assert tight.slack == pytest.approx(0.15)
    assert tight.edges == Spread(mean=pytest.approx(0.3), least=0.2, most=0.4, n=2)
    assert tight.loss == Spread(mean=pytest.approx(3.15), least=3.1, most=3.2, n=2)
    assert tight.difference.mean == pytest.approx(0.15)
    assert tight.over_control == Spread(mean=pytest.approx(0.6), least=0.5, most=0.7, n=2)
    # Not all of its runs have a control.
    assert loose.over_control is None


@pytest.mark.slow
def test_two_seeds_are_two_runs_with_their_controls(base, text, tmp_path):
    folder = tmp_path / "run"
    config = settings(base, text, seeds=(1, 2), control=True, steps=4, eval_every=4)
    shown = command(config, folder)
    result = read_json(folder / frame.SUMMARY)
    first, second = result["runs"]
    assert [first["folder"][:7], second["folder"][:7]] == ["seed_1/", "seed_2/"]
    assert [control["seed"] for control in result["controls"]] == [1, 2]
    edges = [run["edges"]["estimate"] for run in (first, second)]
    assert edges[0] != edges[1]
    (bound,) = result["bounds"]
    assert (bound["edges"]["least"], bound["edges"]["most"]) == (min(edges), max(edges))
    assert bound["edges"]["mean"] == pytest.approx(sum(edges) / 2, rel=1e-12)
    more = [run["over_control"]["estimate"] for run in (first, second)]
    assert bound["over_control"]["mean"] == pytest.approx(sum(more) / 2, rel=1e-12)
    # Each is compared with the control of its own seed.
    for run, control in zip((first, second), result["controls"], strict=True):
        own = run["loss"]["estimate"] - control["loss"]["estimate"]
        assert run["over_control"]["estimate"] == pytest.approx(own, rel=1e-6)

    lines = "\n".join(report.build(from_plain(config, PosttrainConfig), shown, folder).lines)
    low, high = (f"{100 * share:.2f}" for share in sorted(edges))
    assert f"2 seeds: {100 * bound['edges']['mean']:.2f} % of edges open ({low} to {high}" in lines
    assert "between seeds" in lines and "one run" not in lines


def test_the_terms_of_the_page_are_those_of_the_method_that_ran():
    plain = terms(PosttrainConfig())
    assert "the scaled score plus a bias, is above 0; in training it is sampled." in plain["open"]
    assert plain["bound"] == "The dense model's loss on the held-out text, and a slack."
    late = terms(PosttrainConfig(**OVER_CONTROL, renormalise=True))
    assert "the score without its scale plus a bias" in late["open"]
    assert "sampled, and in the last 40% of the updates open by this rule too." in late["open"]
    assert "divided by the sum of those that are open" in late["open"]
    assert late["bound"].startswith("The control model's loss") and "same update" in late["bound"]
    always = terms(PosttrainConfig(by_rule=1.0, targets=(3.0,)))
    assert "in training too." in always["open"] and "sampled" not in always["open"]
    assert "given in the config" in always["bound"]


def test_a_bound_that_moves_is_drawn_and_the_slack_is_over_what_it_was_set_over():
    shown = dataclasses.replace(
        summary(), runs=RUNS[:1], seeds=(1,), bounds=by_bound(RUNS[:1], 3.0)
    )
    steps = {"step": [1, 2], "edges": [0.5, 0.4], "strength": [1.0, 2.0], "loss": [4.0, 3.5]}
    edges = {"layer": [0], "head": [0], "open": [1], "pairs": [2]}
    fixed = Run(RUNS[0], steps, [], edges, ())
    moving = dataclasses.replace(fixed, moving=(4.321, 3.876))
    over = PosttrainConfig(**OVER_CONTROL, slacks=(0.07,))
    pages = [
        page(
            "Runs",
            sections(config, shown, [result]),
            provenance={},
            lead=[conclusion(config, shown)],
        )
        for config, result in ((PosttrainConfig(), fixed), (over, moving))
    ]
    assert "4.321" not in pages[0] and "bound was +0.1000 against the dense model" in pages[0]
    assert "4.321" in pages[1] and "3.876" in pages[1] and "bound in training" in pages[1]
    assert "bound was +0.0700 against the control" in pages[1]


def claim(folder, base="a" * 64, *, force=False, texts=(), **others):
    """Whether the result of that run is there, and the base that its folder names."""
    trained, shown = {run_identity.BASE: base, **others}, {"texts": texts}
    is_there = run_identity.claim_folder(
        folder, trained=trained, shown=shown, result="result", force=force
    )
    stored = json.loads((folder / run_identity.RUN).read_text())
    return is_there, stored["trained"][run_identity.BASE]


def test_a_run_that_recorded_weights_alone_keeps_to_that(tmp_path):
    """A later start cannot know the configuration and the tokenizer of the training."""
    folder, now = tmp_path / "run", ModelIdentity("a" * 64, "b" * 64, "c" * 64)
    assert claim(folder) == claim(folder, now.text) == (False, "a" * 64)
    # Trained again, it is of the model as it is now.
    assert claim(folder, now.text, force=True, seed=1) == (False, now.text)
    changed = dataclasses.replace(now, config="0" * 64)
    with pytest.raises(UsageError, match="holds a run with"):
        claim(folder, changed.text, seed=1)


def test_a_run_of_other_settings_is_set_aside_by_force_and_other_texts_are_shown_again(
    tmp_path, capsys
):
    folder = tmp_path / "run"
    assert not claim(folder, steps=6)[0]
    (folder / "result").touch()
    assert claim(folder, steps=6)[0]
    with pytest.raises(UsageError, match=r"holds a run with .*steps = 6, not 4.*--resume=force"):
        claim(folder, steps=4)
    for number in (1, 2):
        assert not claim(folder, steps=6 - 2 * number, force=True)[0]
        assert f"set aside as run.replaced_{number}" in capsys.readouterr().err
    assert (tmp_path / "run.replaced_1" / "result").exists()
    (folder / "result").touch()
    assert not claim(folder, steps=2, texts=("three boats",))[0]
