"""Sentences on the ratios of circuits."""

import itertools
import math
import types

from lm_jax.statistics import Interval
from sparse_jax.studies.circuits.report_text import (
    format_count,
    format_size,
    left_out,
    prompt_count,
    ratio_sentences,
)
from sparse_jax.studies.circuits.results import Ratio

MODELS = ("dense", "control", "sparse")
RANKINGS = (
    ("signed", "prompt"),
    ("signed", "task"),
    ("absolute", "prompt"),
    ("absolute", "task"),
)


def ratio(reference, model, ranking, scope, value):
    interval = None if value is None else Interval(value, value - 0.5, value + 0.5, 20)
    why = "" if value else "control does not solve copy"
    random = Interval(2.06, 1.5, 2.5, 20)
    return Ratio("copy", "heads", "zero", ranking, scope, model, reference, interval, random, why)


def test_counts_are_whole_from_a_hundred_on_and_means_have_three_digits():
    assert [format_count(count) for count in (2.1, 36.04, 248.4, 32_227.3)] == [
        "2.10",
        "36.0",
        "248",
        "32,227",
    ]


def test_one_sentence_for_each_pair_with_the_sparse_model():
    ratios = [
        ratio(*pair, *ranked, value=None if "control" in pair else 2.0 + k)
        for pair in itertools.combinations(MODELS, 2)
        for k, ranked in enumerate(RANKINGS)
    ]
    assert list(ratio_sentences("copy, heads", ratios)) == [
        "copy, heads, dense : sparse: 2.00 [1.50, 2.50] ranked per prompt; "
        "3.00 [2.50, 3.50] ranked per task; "
        "4.00 [3.50, 4.50] ranked per prompt by absolute effect; "
        "5.00 [4.50, 5.50] ranked per task by absolute effect; 2.06 in random order; "
        "n = 20 prompts of one pair of models.",
        "copy, heads, control : sparse: no ratio, as control does not solve copy.",
    ]


def test_without_a_sparse_model_all_pairs_are_named():
    ratios = [ratio("dense", "control", "signed", "prompt", 1.0)]
    assert list(ratio_sentences("copy, heads", ratios)) == [
        "copy, heads, dense : control: 1.00 [0.50, 1.50] ranked per prompt; 2.06 in random order; "
        "n = 20 prompts of one pair of models."
    ]


def test_what_was_left_out_of_a_task_is_said():
    whole = types.SimpleNamespace(name="ioi", drawn=20, kept=20, dropped={})
    partly = types.SimpleNamespace(
        name="years", drawn=1_141, kept=1_000, dropped={"its year": 122, "seen": 19}
    )
    assert left_out(types.SimpleNamespace(tasks=(whole, partly))) == [
        "years: 1,141 examples drawn and 1,000 kept; left out were 122 x its year, 19 x seen"
    ]


def test_rankings_without_a_ratio_are_named_with_the_reason():
    ratios = [
        ratio("dense", "sparse", "signed", "prompt", None),
        ratio("dense", "sparse", "absolute", "prompt", 3.0),
    ]
    assert list(ratio_sentences("copy, heads", ratios)) == [
        "copy, heads, dense : sparse: 3.00 [2.50, 3.50] ranked per prompt by absolute effect; "
        "2.06 in random order; n = 20 prompts of one pair of models; no ratio ranked per prompt, "
        "as control does not solve copy."
    ]


def test_an_estimate_of_too_few_prompts_has_no_interval():
    few = Interval(2.5, -math.inf, math.inf, 4)
    assert format_size(few) == "2.50 (n = 4: no interval)"


def test_prompts_are_counted_beside_their_pairs_where_some_share_one():
    def counted(pairs):
        results = [types.SimpleNamespace(task="mine", clean=Interval(1.0, 0.5, 1.5, 6))]
        tasks = [types.SimpleNamespace(name="mine", kept=pairs)]
        return prompt_count(types.SimpleNamespace(results=results, tasks=tasks), "mine")

    assert counted(6) == "6 prompts"
    assert counted(9) == "6 prompts (9 pairs)"
