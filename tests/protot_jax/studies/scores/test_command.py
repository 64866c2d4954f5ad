"""Scores of several reports side by side: constructed scores give the known differences."""

import numpy as np
import pytest
from scipy import stats

from lm_jax.evaluate.judge_prompt import SCORES
from lm_jax.run.files import write_json
from lm_jax.run.results import load_result
from lm_jax.study import command, frame
from protot_jax.studies.scores import STUDY, numbers
from protot_jax.studies.scores.results import ScoreComparison
from tests.protot_jax.studies.concepts import synthetic_report

PERMUTATIONS = STUDY.config().permutations


def launched(*flags):
    return command.run(STUDY, ["iaj protot scores", *flags])


def scored(prototypes, coverage, *, seed=0, judge="cached:answers.jsonl"):
    """A report of two layers whose labelled prototypes have `coverage` in turn, all else equal."""
    content = synthetic_report.build(2, prototypes, seed=seed, judge=judge)
    place = 0
    for one in content["prototypes"]:
        if one["label"]:
            one["label"] |= {"disentanglement": 5 + place % 2, "themes": 2}
            one["label"]["coverage"] = coverage[place % len(coverage)]
            place += 1
    return content


def heads(content, coverage):
    """Units of another model, with labels, in the same report."""
    statistic = {"estimate": 1.0, "low": 0.5, "high": 1.5, "n": 8}
    gate = {"mutual_information": 0.1, "mutual_information_by_chance": 0.0, "dead": 0}
    layer = {"layer": 0, "units": len(coverage)} | gate
    layer |= dict.fromkeys(("l1_ratio", "gini", "entropy"), statistic)
    label = next(one["label"] for one in content["prototypes"] if one["label"])
    unit = {"layer": 0, "mean": 0.5, "max": 1.0, "active": 1.0, "repetition": 0.5}
    unit |= {"mutual_information": 0.1, "mutual_information_by_chance": 0.0}
    unit |= {"top_tokens": [], "top_texts": []}
    return {
        "kind": "heads",
        "run": "llama, seed 1",
        "model": "llama",
        "step": 3,
        "sha256": "0" * 64,
        "perplexity": 20.0,
        "layers": [layer],
        "units": [
            unit | {"unit": i, "label": label | {"coverage": value}}
            for i, value in enumerate(coverage)
        ],
        "autoencoder": None,
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """R = 12 at a coverage of 3 and 4, R = 24 two higher and with heads, and R = 12 again."""
    folder = tmp_path_factory.mktemp("scores")
    wide = scored(24, (5, 6), seed=1)
    wide["comparisons"] = [heads(wide, (3, 4) * 4)]
    reports = {"R=12": scored(12, (3, 4)), "R=24": wide, "again": scored(12, (3, 4), seed=2)}
    flags = []
    for place, (name, content) in enumerate(reports.items()):
        concepts = folder / f"run{place}" / "concepts"
        concepts.mkdir(parents=True)
        # The second report is of an earlier version.
        file = "concepts.json" if place == 1 else frame.SUMMARY
        write_json(concepts / file, content)
        flags.append(f"--report={name}={folder / f'run{place}'}")
    assert launched(*flags, f"--workdir={folder / 'out'}") == 0
    return folder, flags, load_result(folder / "out" / frame.SUMMARY, ScoreComparison)


def test_groups_are_those_of_the_reports(compared):
    folder, _, result = compared
    page = (folder / "out" / frame.REPORT).read_text("utf-8")
    assert [group.name for group in result.groups] == [
        "R=12",
        "R=12: random texts",
        "R=24",
        "R=24: heads of llama, seed 1",
        "R=24: random texts",
        "again",
        "again: random texts",
    ]
    for group in result.groups:
        assert set(group.scores) == set(SCORES) and group.asked >= len(group.scores["coverage"])
        mean = group.means["coverage"]
        values = np.array(group.scores["coverage"])
        assert mean.estimate == pytest.approx(values.mean()) and mean.low <= mean.estimate
        if np.ptp(values):
            assert mean.low < values.mean() < mean.high
        assert page.count(group.name) >= 3 + 1


def test_constructed_differences_are_found_and_equal_scores_are_not(compared):
    _, _, result = compared
    groups = {group.name: group for group in result.groups}
    assert set(groups["R=12"].differences.values()) == {None}
    first = np.array(groups["R=12"].scores["coverage"])
    wide = groups["R=24"].differences["coverage"]
    # Labels alternate, so that half of an odd number is the only departure from 2.
    assert wide.mean.estimate == pytest.approx(
        np.mean(groups["R=24"].scores["coverage"]) - first.mean()
    )
    assert 1.5 < wide.mean.low < wide.mean.estimate < wide.mean.high < 2.5
    # All six groups are tested in a score, and so large a p is the least of the permutations.
    least = 2 / (PERMUTATIONS + 1)
    assert least * (1 - 1e-9) <= wide.p <= 2.01 * least
    assert wide.p_holm == pytest.approx(6 * wide.p)
    for name in ("again", "R=24: heads of llama, seed 1"):
        equal = groups[name].differences["coverage"]
        assert equal.mean.low < 0 < equal.mean.high and equal.p > 0.5
    # Where all scores are one number, no permutation changes the mean.
    themes = groups["R=24"].differences["themes"]
    assert (themes.mean.low, themes.mean.high, themes.p) == (0, 0, 1)


def test_the_test_is_that_of_scipy_and_keeps_its_level():
    rng = np.random.default_rng(0)
    p = []
    for seed in range(60):
        ours, first = rng.integers(1, 11, (2, 20)).astype(float)
        p.append(numbers.difference(ours, first, seed, PERMUTATIONS).p)
    # Under the null p is uniform; 1.63 / sqrt(60) is the 1 % point of Kolmogorov and Smirnov.
    assert stats.kstest(p, "uniform").statistic < 1.63 / 60**0.5
    assert numbers.difference(np.ones(1), np.ones(5), 0, PERMUTATIONS) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "--report is missing"),
        (("x=a.json", "x=b.json"), "is given twice; write NAME=PATH"),
        (("A=a.json", "B=unlabelled.json"), "has no labels"),
        (("A=a.json", "B=b.json"), "are of different judges, cached:answers.jsonl, chat:other"),
        (("a.json", "nowhere"), "nowhere has no concept report"),
        (
            ("a.json", "untold"),
            "untold has no concept report; name a run after iaj protot concepts",
        ),
    ],
)
def test_reports_that_cannot_be_compared_are_refused(names, message, tmp_path, monkeypatch, capsys):
    content = scored(4, (3, 4))
    write_json(tmp_path / "a.json", content)
    settings = content["settings"] | {"judge": "chat:other"}
    write_json(tmp_path / "b.json", content | {"settings": settings})
    unlabelled = [one | {"label": None} for one in content["prototypes"]]
    write_json(tmp_path / "unlabelled.json", content | {"prototypes": unlabelled})
    # A run whose concepts were not described has the summary of its training.
    (tmp_path / "untold").mkdir()
    write_json(tmp_path / "untold" / frame.SUMMARY, {"model": "protot"})
    monkeypatch.chdir(tmp_path)
    flags = [f"--report={name}" for name in names]
    assert launched(*flags, f"--workdir={tmp_path / 'none'}") in (2, 3)
    assert not (tmp_path / "none").exists()
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
