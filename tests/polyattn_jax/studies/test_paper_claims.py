"""What an audit says of each claim of the paper."""

import dataclasses

import numpy as np
import pytest

from lm_jax.statistics import Interval, wilson
from polyattn_jax.audit import decision, head_types
from polyattn_jax.audit.results import HeadTypes
from polyattn_jax.report import paper
from polyattn_jax.studies.paper import claims
from tests.polyattn_jax.paper_audits import audit_of
from tests.polyattn_jax.synthetic_report import condition


def test_over_models_the_worst_verdict_counts():
    assert claims.overall(["holds", "fails", "undecided"]) == "fails"
    assert claims.overall(["holds", "not measured", "undecided"]) == "undecided"
    assert claims.overall(["holds", "not measured"]) == "holds"
    assert claims.overall(["not measured"]) == claims.overall([]) == "not measured"


def sweep_of(finding, p_holm=0.001, **verdicts):
    """The audit with these verdicts, of this p after correction, and no recipe but softmax."""
    entries = [condition("softmax", 1.0, 200, verdict="preserve")]
    entries += [condition(name, 0.5, 200, verdict=verdict) for name, verdict in verdicts.items()]
    decided = [
        dataclasses.replace(
            finding[0].verdicts[0], recipe=name, verdict=verdict, loss_p_holm=p_holm
        )
        for name, verdict in verdicts.items()
    ]
    summary = dataclasses.replace(finding[0], sweep=tuple(entries), verdicts=tuple(decided))
    return audit_of(finding, summary)


@pytest.mark.parametrize(
    ("verdicts", "wanted"),
    [
        ({"relu_p4_b0": "no-go", "relu_p8_b0": "no-go"}, "holds"),
        ({"relu_p4_b0": "no-go", "relu_p8_b0": "preserve"}, "undecided"),
        ({"relu_p4_b0": "no-go", "relu_p8_b0": "undecided"}, "undecided"),
        ({"relu_p1_over_L": "preserve"}, "not measured"),
    ],
)
def test_no_recipe_replaces_softmax_where_each_is_shown_to_lose(finding, verdicts, wanted):
    assert claims.no_drop_in(sweep_of(finding, **verdicts)).verdict == wanted


def test_one_recipe_for_all_models_is_what_refutes_the_paper(finding):
    mine = sweep_of(finding, relu_p4_b0="preserve", relu_p8_b0="no-go")
    other = sweep_of(finding, relu_p4_b0="no-go", relu_p8_b0="preserve")
    open_ = sweep_of(finding, relu_p4_b0="undecided", relu_p8_b0="no-go")
    assert claims.no_single_recipe([mine, other]) == "holds"
    assert claims.no_single_recipe([mine, mine]) == "fails"
    # One of ten recipes that preserves by itself alone, at p = 0.02, does not refute it.
    weak = sweep_of(finding, 0.2, relu_p4_b0="preserve", relu_p8_b0="no-go")
    assert claims.no_single_recipe([weak, weak]) == "undecided"
    assert claims.no_single_recipe([mine, open_]) == "undecided"
    # One model does not show what others would.
    assert claims.no_single_recipe([mine]) == "undecided"
    assert claims.no_single_recipe([]) == "not measured"


def test_the_papers_own_table_3_supports_its_claim(finding):
    audits = []
    for model in paper.MODELS:
        right = {name: round(200 + 2 * change) for name, change in model.needle.items()}
        found = {
            name: decision.verdict(np.ones(200, bool), np.arange(200) < n).name
            for name, n in right.items()
        }
        audits.append(sweep_of(finding, **found))
    # Llama and Gemma have recipes that preserve, each their own.
    assert [claims.no_drop_in(a).verdict for a in audits].count("undecided") == 2
    assert claims.no_single_recipe(audits) == "holds"
    (claim,) = (c for c in claims.judge(audits) if c.claim.startswith("No single"))
    assert claim.verdict == "holds"


@pytest.mark.parametrize(
    ("right", "unmet", "wanted"),
    [(200, (), "holds"), (110, ("x",), "undecided"), (0, ("x",), "fails"), (80, ("x",), "fails")],
)
def test_a_needle_that_softmax_does_not_find_contradicts_the_paper(finding, right, unmet, wanted):
    (base, *rest) = sweep_of(finding, relu_p4_b0="undecided").summary.sweep
    base = dataclasses.replace(base, accuracy=wilson(right, 200))
    controls = dataclasses.replace(finding[0].controls, unmet=unmet)
    summary = dataclasses.replace(finding[0], sweep=(base, *rest), controls=controls)
    assert claims.solved(audit_of(finding, summary)).verdict == wanted


def test_a_recipe_without_normaliser_that_preserves_contradicts_the_paper(finding):
    assert claims.un_normalised(sweep_of(finding, relu_p1_over_L="preserve")).verdict == "fails"
    assert claims.un_normalised(sweep_of(finding, relu_p1_over_L="no-go")).verdict == "holds"


@pytest.mark.parametrize(
    ("share", "wanted"),
    [
        (Interval(0.8, 0.75, 0.85, 200), "holds"),
        (Interval(0.8, 0.65, 0.85, 20), "undecided"),
        (Interval(0.3, 0.2, 0.4, 200), "fails"),
        (Interval(0.3, 0.3, 0.3, 9), "undecided"),
    ],
)
def test_the_share_of_unsafe_rows_is_judged_by_its_interval(finding, share, wanted):
    entries = tuple(
        dataclasses.replace(entry, unsafe_active={"2": share}) for entry in finding[0].prevalence
    )
    audit = audit_of(finding, dataclasses.replace(finding[0], prevalence=entries))
    result = claims.mostly_unsafe(audit)
    assert (result.verdict, result.text.endswith("% over 2 suites")) == (wanted, True)


@pytest.mark.parametrize(
    ("safe", "verdict", "low", "high"),
    [
        (0.03, "no-go", "holds", "not measured"),
        (0.03, "preserve", "fails", "not measured"),
        (0.031, "no-go", "not measured", "holds"),
        (0.031, "preserve", "not measured", "fails"),
    ],
)
def test_the_screen_is_at_three_percent(finding, safe, verdict, low, high):
    (entry, *_) = finding[0].matched
    audit = sweep_of(finding, **{entry.recipe: verdict})
    (own,) = (one for one in audit.summary.verdicts if one.recipe == entry.recipe)
    own = dataclasses.replace(own, safe=Interval(safe, 0.0, 1.0, 200))
    summary = dataclasses.replace(audit.summary, matched=(entry,), verdicts=(own,))
    audit = dataclasses.replace(audit, summary=summary)
    assert claims.screen(audit).verdict == low
    assert claims.no_promise(audit).verdict == high


def test_a_false_negative_that_is_no_tie_refutes_the_bound(finding):
    held = claims.sound_bound(audit_of(finding))
    entries = finding[0].bound
    degrees = len({entry.p for entry in entries})
    judged = sum(entry.n for entry in entries)
    assert held.verdict == "holds" and degrees > 1
    assert f"of {judged:,} ({judged // degrees:,} rows x {degrees} degrees)" in held.text
    (entry, *rest) = finding[0].bound
    broken = dataclasses.replace(entry, false_negative=1, false_negative_eps=1)
    result = dataclasses.replace(finding[0], bound=(broken, *rest))
    assert claims.sound_bound(audit_of(finding, result)).verdict == "fails"


def test_a_ranking_is_judged_from_19_draws_on(finding):
    assert claims.decisive(audit_of(finding)).verdict == "not measured"
    entries = {
        flag: dataclasses.replace(finding[0].decisiveness[0], size=20, decisive=flag)
        for flag in (True, False, None)
    }
    for flag, wanted in ((True, "holds"), (False, "fails"), (None, "undecided")):
        large = {"layers": 20, "heads": 4}
        result = dataclasses.replace(finding[0], decisiveness=(entries[flag],), **large)
        assert claims.decisive(audit_of(finding, result)).verdict == wanted


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ({64: (0.2, 0.18, 0.22), 256: (0.24, 0.21, 0.27)}, "holds"),
        ({64: (0.2, 0.15, 0.25), 256: (0.28, 0.2, 0.35)}, "undecided"),
        ({64: (0.5, 0.3, 0.7), 160: (0.6, 0.4, 0.8), 256: (0.5, 0.3, 0.7)}, "undecided"),
        ({64: (0.2, 0.15, 0.25), 256: (0.32, 0.2, 0.45)}, "undecided"),
        ({64: (0.2, 0.15, 0.25), 256: (0.6, 0.5, 0.7)}, "fails"),
    ],
)
def test_the_share_over_length_is_flat_within_ten_points(finding, shares, wanted):
    (entry, *_) = (e for e in finding[0].prevalence if e.bias_kind == "zero")
    entries = tuple(
        dataclasses.replace(
            entry, suite=f"induction_{length}", unsafe_active={"2": Interval(*share, 200)}
        )
        for length, share in shares.items()
    )
    audit = audit_of(finding, dataclasses.replace(finding[0], prevalence=entries))
    assert claims.flat_over_length(audit).verdict == wanted


def test_top_and_bottom_heads_are_compared_only_where_they_do_not_overlap(finding):
    """Of Gemma 3 270M's 72 heads 8 would be among the top and the bottom 40."""
    features = {"type": np.full(80, "sink"), "rank": np.arange(80)}
    for heads, wanted in ((72, "undecided"), (80, "fails")):
        result = dataclasses.replace(
            finding[0],
            layers=heads // 4,
            heads=4,
            head_types=HeadTypes(40, {}, {}, {}),
        )
        audit = audit_of((result, finding[1], {k: v[:heads] for k, v in features.items()}))
        judged = claims.diffuse_top(audit)
        assert judged.verdict == wanted
        assert ("of 72 heads the top and the bottom 40 overlap" in judged.text) == (heads == 72)


@pytest.mark.parametrize(
    ("heads", "flags", "wanted", "large"),
    [
        (72, {20: True, 40: False}, "holds", "K = 40 is"),
        (72, {20: False, 40: True}, "fails", "K = 40 is"),
        (72, {20: None, 40: True}, "undecided", "K = 40 is"),
        (72, {40: True}, "undecided", "K = 40 is"),
        (36, {20: True, 40: True}, "undecided", "K = 20 and 40 is"),
        (80, {20: True, 40: False}, "fails", ""),
        (80, {20: True, 40: True}, "holds", ""),
    ],
)
def test_random_sets_of_most_heads_decide_nothing(finding, heads, flags, wanted, large):
    """Each size counts by itself: of 72 heads a set of 20 is less than half, one of 40 is more."""
    entry = finding[0].decisiveness[0]
    entries = tuple(
        dataclasses.replace(entry, size=size, decisive=flag) for size, flag in flags.items()
    )
    result = dataclasses.replace(finding[0], layers=heads // 4, heads=4, decisiveness=entries)
    judged = claims.decisive(audit_of(finding, result))
    assert judged.verdict == wanted
    assert f"{large} more than half of the model's {heads} heads" in judged.text or not large
    assert ("more than half" in judged.text) == bool(large) and "overlap" not in judged.text


def test_both_ends_of_a_composition_have_half_of_the_heads_at_most():
    types = np.array(["sink", "diffuse", "local", "sink", "sink"])
    result = head_types.composition({"type": types, "rank": np.arange(5)}, 4)
    assert result.size == 2
    assert sum(result.top.values()) == sum(result.bottom.values()) == 2
    assert (result.top["diffuse"], result.bottom["sink"]) == (1, 2)
