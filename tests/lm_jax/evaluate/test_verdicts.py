"""Wins, consistency and controls from verdicts of judges that are known."""

import numpy as np
import pytest

from lm_jax.evaluate import pairwise, verdicts
from lm_jax.evaluate.pairwise import NullJudge, Shown

PAIRS = [(0, 1), (0, 2), (1, 2)]
LENGTHS = np.array([[5, 6, 7], [7, 5, 6]])


def scored(judged, shown_QC):
    return np.array(
        [[verdicts.score(each) for each in pairwise.both_orders(judged, row)] for row in shown_QC]
    )


TEXTS = [
    [f"text {q} of {player}" + " more" * int(LENGTHS[q, player] - 4) for player in range(3)]
    for q in range(2)
]
SHOWN = [[Shown(f"prompt {q}", TEXTS[q][a], TEXTS[q][b]) for a, b in PAIRS] for q in range(2)]


def test_a_judge_that_always_says_a_flips_every_pair_and_agrees_with_itself_by_chance():
    score_QC2 = scored(NullJudge("first"), SHOWN)
    found = verdicts.consistency(score_QC2, PAIRS, LENGTHS)
    assert found.flips.estimate == 1 and found.kappa == 0 and found.first.estimate == 1
    assert found.ties.estimate == 0 and (found.pairs, found.missing) == (6, 0)
    # One win each way of every pair, and nothing but ties where both orders must agree.
    for rule, each_way in (("each", 1), ("agreed", 0.5)):
        wins_QPP = verdicts.wins(score_QC2, PAIRS, 3, rule)
        np.testing.assert_array_equal(wins_QPP, each_way * (1 - np.eye(3)) * np.ones((2, 1, 1)))


def test_a_judge_by_length_names_the_longer_in_both_orders():
    score_QC2 = scored(NullJudge("length"), SHOWN)
    found = verdicts.consistency(score_QC2, PAIRS, LENGTHS)
    assert found.flips.estimate == 0 and found.longer.estimate == 1 and found.kappa == 1
    assert found.first.estimate == 0.5
    wins_QPP = verdicts.wins(score_QC2, PAIRS, 3, "each")
    np.testing.assert_array_equal(wins_QPP[0], [[0, 0, 0], [2, 0, 0], [2, 2, 0]])
    np.testing.assert_array_equal(wins_QPP[1], [[0, 2, 2], [0, 0, 0], [0, 2, 0]])


def test_the_coin_depends_on_the_texts_alone_and_is_fair():
    coin = NullJudge("coin")
    shown = [Shown("p", str(i), str(-i)) for i in range(1, 400)]
    both = pairwise.both_orders(coin, shown)
    assert both == pairwise.both_orders(coin, shown)
    share = np.mean([first == "A" for first, _ in both])
    # Five standard errors of a fair coin.
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(len(shown))


def test_the_two_rules_on_one_log():
    """A win in both orders, a win and a tie, a win and a loss, a verdict that is missing."""
    log = [("A", "B"), ("A", "Tie"), ("A", "A"), ("B", None)]
    score_QC2 = np.array([[verdicts.score(both)] for both in log])
    np.testing.assert_array_equal(score_QC2[:, 0], [[1, 1], [1, 0.5], [1, 0], [0, np.nan]])
    each = verdicts.wins(score_QC2, [(0, 1)], 2, "each")
    agreed = verdicts.wins(score_QC2, [(0, 1)], 2, "agreed")
    np.testing.assert_array_equal(each[:, 0, 1], [2, 1.5, 1, 0])
    np.testing.assert_array_equal(each[:, 1, 0], [0, 0.5, 1, 1])
    np.testing.assert_array_equal(agreed[:, 0, 1], [1, 0.5, 0.5, 0])
    np.testing.assert_array_equal(agreed[:, 1, 0], [0, 0.5, 0.5, 0])
    found = verdicts.consistency(score_QC2, [(0, 1)], np.full((4, 2), 3))
    assert (found.pairs, found.missing, found.flips.estimate) == (3, 1, 2 / 3)
    assert found.ties.estimate == 1 / 7 and found.longer is None
    played = verdicts.games(score_QC2, [(0, 1)], np.full((4, 2), 3))
    np.testing.assert_array_equal(played.score, [1, 1, 1, 0.5, 1, 0, 0])


def test_no_verdict_at_all_has_no_shares():
    found = verdicts.consistency(np.full((2, 1, 2), np.nan), [(0, 1)], np.ones((2, 2)))
    assert (found.pairs, found.missing, found.flips, found.kappa) == (0, 4, None, None)
    made = verdicts.control("other", np.full((2, 2), np.nan))
    assert made.share is None and not made.passed


PROMPTS = [f"prompt {i}" for i in range(40)]
REAL = [f" it was the year {i} when two of the kings went to war" for i in range(40)]


class Reader:
    """Knows the real continuations, and says A between two that it does not know apart."""

    name = "reader"

    def verdicts(self, shown):
        known = dict(zip(PROMPTS, REAL, strict=True))
        return ["B" if each.second == known[each.prompt] != each.first else "A" for each in shown]


def controlled(judged):
    made = verdicts.controls(PROMPTS, REAL, seed=0)
    return {
        kind: verdicts.control(
            kind, np.array([verdicts.score(each) for each in pairwise.both_orders(judged, shown)])
        )
        for kind, shown in made.items()
    }


def test_worse_continuations_are_as_long_and_differ_as_said():
    made = verdicts.controls(PROMPTS, REAL, seed=0)
    assert tuple(made) == verdicts.CONTROLS
    for i, real in enumerate(REAL):
        assert all(
            shown[i].first == real and shown[i].prompt == PROMPTS[i] for shown in made.values()
        )
        assert all(len(shown[i].second.split()) == len(real.split()) for shown in made.values())
        assert sorted(made["shuffled"][i].second.split()) == sorted(real.split())
        assert made["shuffled"][i].second != real
        assert made["other"][i].second == REAL[(i + 1) % 40]
        assert made["looped"][i].second.startswith(" it was the year it was the year it")
        assert made["itself"][i].second == real


@pytest.mark.parametrize(
    ("prompt", "real", "blank"),
    [
        ("the old king", " said so", " "),
        ("the old king", "\nsaid so", "\n"),
        ("Q:\n", "said so", ""),
    ],
)
def test_a_control_begins_as_the_real_continuation_does(prompt, real, blank):
    """Without its blank the first word is fused with the prompt's last one, and scored so."""
    for shown in verdicts.controls([prompt, prompt], [real, real], seed=0).values():
        for text in (shown[0].first, shown[0].second):
            assert text[: len(text) - len(text.lstrip())] == blank


def test_length_tells_nothing_where_continuations_are_of_unequal_length():
    real = [" ".join(f"w{i}" for i in range(n)) for n in (9, 3, 6)]
    made = verdicts.controls(PROMPTS[:3], real, seed=0)
    for shown in made.values():
        assert all(len(each.first.split()) == len(each.second.split()) for each in shown)
        both = pairwise.both_orders(NullJudge("length"), shown)
        assert set(both) == {("Tie", "Tie")}
    assert [len(each.first.split()) for each in made["other"]] == [3, 3, 6]


def test_a_judge_that_knows_the_real_text_rates_and_none_that_reads_nothing_does():
    found = controlled(Reader())
    assert verdicts.rates(list(found.values()))
    assert found["shuffled"].better == found["looped"].better == 40
    assert found["itself"].passed and found["itself"].share is None
    for kind in pairwise.NULLS:
        assert not verdicts.rates(list(controlled(NullJudge(kind)).values()))
    # Always A: the two orders cancel on every prompt.
    first = controlled(NullJudge("first"))["other"]
    assert (first.better, first.worse, first.n) == (0, 0, 40)


@pytest.mark.parametrize(
    ("kind", "scores"),
    [
        *((kind, (1.0, 0.0)) for kind in ("shuffled", "other", "looped")),
        # The perplexity of a language model, which finds a loop likelier than any text.
        ("looped", (0.0, 0.0)),
        # One of two equal texts in both orders.
        ("itself", (1.0, 1.0)),
        ("itself", (np.nan, np.nan)),
    ],
)
def test_one_control_that_is_not_passed_is_enough_to_rate_nothing(kind, scores):
    found = controlled(Reader()) | {kind: verdicts.control(kind, np.tile(scores, (40, 1)))}
    assert not verdicts.rates(list(found.values()))
    assert verdicts.failed(list(found.values())) == (kind,)
    assert not found[kind].passed
    del found[kind]
    assert verdicts.failed(list(found.values())) == (kind,)
