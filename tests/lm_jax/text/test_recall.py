"""Sequences to recall from: lengths, counts and answers are as their definitions say."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text import recall

IDS = np.arange(3, 203)


def rng(seed=0):
    return np.random.RandomState([seed, 0])


def by_lookup(made):
    """What followed the last earlier occurrence of each query's token."""
    tokens, results = made.tokens, []
    for query in made.queries:
        before = max(i for i in range(query) if tokens[i] == tokens[query])
        results.append((before + 1, tokens[before + 1]))
    return results


@given(pairs=st.integers(1, 20), noise=st.integers(0, 60), seed=st.integers(0, 99))
def test_mqar_asks_for_every_pair_once(pairs, noise, seed):
    length = recall.least_mqar_length(pairs) + noise
    made = recall.mqar(rng(seed), IDS, length, pairs)
    assert len(made.tokens) == length and made.queries[-1] == length - 1
    keys, values = made.tokens[: 2 * pairs : 2], made.tokens[1 : 2 * pairs : 2]
    assert len({*keys, *values}) == 2 * pairs
    found = dict(zip(keys, values, strict=True))
    assert sorted(made.tokens[query] for query in made.queries) == sorted(keys)
    assert made.targets == tuple(found[made.tokens[query]] for query in made.queries)
    assert by_lookup(made) == list(zip(made.answers, made.targets, strict=True))
    # A pair, a query with its value except for the last, and noise that is neither.
    counts = Counter(made.tokens)
    assert sorted(counts[token] for token in (*keys, *values)) == [1] + [2] * (2 * pairs - 1)
    assert (
        sum(n for token, n in counts.items() if token not in found and token not in values) == noise
    )


@given(length=st.integers(3, 150), seed=st.integers(0, 99))
def test_induction_repeats_its_block(length, seed):
    made = recall.induction(rng(seed), IDS, length)
    size = length // 2 + 1
    assert len(set(made.tokens[:size])) == size
    assert made.tokens[size:] == made.tokens[: length - size]
    assert made.queries == tuple(range(size, length))
    assert by_lookup(made) == list(zip(made.answers, made.targets, strict=True))


@given(length=st.integers(3, 150), seed=st.integers(0, 99))
def test_a_needle_stands_once_after_the_mark(length, seed):
    made = recall.needle(rng(seed), IDS, length)
    assert len(made.tokens) == length
    assert [i for i, token in enumerate(made.tokens) if token == 3] == [
        made.answers[0] - 1,
        length - 1,
    ]
    assert made.tokens.count(made.targets[0]) == 1
    assert by_lookup(made) == list(zip(made.answers, made.targets, strict=True))


def test_needles_are_uniform_over_places_and_values():
    made = [recall.needle(np.random.RandomState([1, i]), np.arange(8), 12) for i in range(4000)]
    for found, choices in (
        ([each.answers[0] for each in made], 10),
        ([each.targets[0] for each in made], 7),
    ):
        counts = np.array(list(Counter(found).values()))
        assert len(counts) == choices
        # Five standard deviations of a binomial count.
        p = 1 / choices
        assert np.abs(counts - 4000 * p).max() < 5 * np.sqrt(4000 * p * (1 - p))


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="length=14 is too short for pairs=4: raise it to 15"):
        recall.mqar(rng(), IDS, 14, 4)
    with pytest.raises(BadInputError, match="needs 101 distinct random tokens"):
        recall.induction(rng(), IDS[:100], 200)
    with pytest.raises(BadInputError, match="needs 3 tokens, the vocabulary has 2"):
        recall.needle(rng(), IDS[:2], 5)
