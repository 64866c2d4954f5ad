"""Results over seeds: mean and range, intervals of one run, and strict reading of their files."""

import dataclasses
import json
import shutil

import jsonschema
import numpy as np
import pytest

from lm_jax import report
from lm_jax.errors import CorruptError, UsageError
from lm_jax.run.files import read_json, write_json
from lm_jax.run.identity import ModelIdentity
from lm_jax.run.results import json_schema, load_result
from lm_jax.run.workdir import FINISHED_FILE
from lm_jax.statistics import Interval
from lm_jax.study import frame
from lm_jax.text.preparation import SplitSize
from sparse_jax.studies.posttrain import export, run_identity, task
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
    TextPatterns,
)
from sparse_jax.studies.posttrain.settings import OVER_CONTROL, PosttrainConfig
from tests.sparse_jax.small_runs import command, run_folder, settings


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


def test_a_summary_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / frame.SUMMARY
    whole = summary()
    write_json(path, whole)
    assert load_result(path, PosttrainSummary) == whole
    tree = read_json(path)
    jsonschema.validate(tree, json_schema(PosttrainSummary))
    tree["runs"][1]["edges"]["low"] = "0.1"
    tree["corpus"]["splits"]["train"]["documents"] = -1
    del tree["bounds"][0]["slack"]
    path.write_text(json.dumps(tree))
    with pytest.raises(CorruptError) as caught:
        load_result(path, PosttrainSummary)
    places = (
        "runs[1].edges.low =",
        "corpus.splits.train.documents =",
        "bounds[0].slack is missing",
    )
    assert all(place in str(caught.value) for place in places)
    wrong = jsonschema.Draft202012Validator(json_schema(PosttrainSummary)).iter_errors(tree)
    assert {".".join(map(str, one.path)) for one in wrong} == {
        "runs.1.edges.low",
        "corpus.splits.train.documents",
        "bounds.0",
    }


@pytest.fixture(scope="module")
def stopped(base, text, tmp_path_factory):
    """The config and the folder of a run that was stopped before its summary was written."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    config = settings(base, text, steps=2, eval_every=2)
    command(config, folder)
    (folder / frame.SUMMARY).unlink()
    (folder / FINISHED_FILE).unlink()
    return config, folder


@pytest.mark.slow
def test_two_seeds_are_two_runs_with_their_controls(base, text, tmp_path, capsys):
    folder = tmp_path / "run"
    config = settings(base, text, seeds=(1, 2), control=True, steps=4, eval_every=4)
    command(config, folder)
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

    printed = capsys.readouterr().out
    low, high = (f"{100 * share:.2f}" for share in sorted(edges))
    assert (
        f"2 seeds: {100 * bound['edges']['mean']:.2f} % of edges open ({low} to {high}" in printed
    )
    assert "between seeds" in printed and "over documents, of one trained model" in printed
    assert "one run" not in printed
    page = (folder / frame.REPORT).read_text("utf-8")
    assert "means of 2 seeds" in page and f"({low} to {high})" in page


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
        report.page(
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


def test_one_seed_is_reported_as_one_run(base, text, tmp_path, capsys):
    folder = tmp_path / "run"
    command(settings(base, text, steps=4, eval_every=4), folder)
    printed = capsys.readouterr().out
    assert ", one run: " in printed and "between seeds" not in printed
    page = (folder / frame.REPORT).read_text("utf-8")
    assert "(one run)." in page and "This is one run of each bound." in page


@pytest.mark.parametrize("name", [run_identity.RUN, task.DENSE, export.PATTERNS, export.RESULT])
def test_a_broken_file_of_a_run_is_refused_and_named(name, stopped, tmp_path):
    """A resumed command reads each of them."""
    config, source = stopped
    folder = shutil.copytree(source, tmp_path / "run")
    path = folder / name if name == task.DENSE else run_folder(folder) / name
    tree = read_json(path)
    (tree[0] if name == export.PATTERNS else tree)["colour"] = "red"
    write_json(path, tree)
    with pytest.raises(CorruptError) as caught:
        command(config, folder)
    assert str(path) in str(caught.value)
    assert "colour is not a field of" in str(caught.value)
    assert "restore it, or start again in another --workdir" in str(caught.value)


def test_patterns_are_read_as_they_were_written(stopped, tmp_path):
    path = run_folder(stopped[1]) / export.PATTERNS
    texts = load_result(path, tuple[TextPatterns, ...])
    (text,) = texts
    for head in text.heads:
        weights = np.array([head.dense, head.sparse])
        T = len(text.tokens)
        assert weights.shape == (2, T, T) and not np.triu(weights, 1).any()
        # Each weight is rounded to three digits.
        np.testing.assert_allclose(weights[0].sum(-1), 1.0, atol=T * 5e-4)
        assert np.count_nonzero(weights[1]) <= head.open <= head.pairs == T * (T + 1) / 2
    write_json(tmp_path / "again.json", texts)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_run_that_recorded_weights_alone_keeps_to_that(tmp_path):
    """A later start cannot know the configuration and the tokenizer of the training."""
    folder, file = tmp_path / "run", tmp_path / "run" / run_identity.RUN
    now = ModelIdentity("a" * 64, "b" * 64, "c" * 64)

    def claim(base, *, force=False, **others):
        trained = {run_identity.BASE: base, **others}
        run_identity.claim_folder(folder, trained=trained, shown={}, result="r", force=force)
        return json.loads(file.read_text())["trained"][run_identity.BASE]

    assert claim("a" * 64) == "a" * 64
    assert claim(now.text) == "a" * 64
    # Trained again, it is of the model as it is now.
    assert claim(now.text, force=True, seed=1) == now.text
    changed = dataclasses.replace(now, config="0" * 64)
    with pytest.raises(UsageError, match="holds a run with"):
        claim(changed.text, seed=1)
