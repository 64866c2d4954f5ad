"""The ranking is Cohen's d, and matching gives back how prototypes were permuted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.statistics import cohens_d
from protot_jax.analysis.token_ids import word_ids
from protot_jax.mixers.edits import MODES
from protot_jax.studies import interventions
from protot_jax.studies.interventions import effects, matching
from tests import rounding
from tests.protot_jax.studies.interventions import small_models

L, R = 3, small_models.R


@pytest.fixture(scope="module")
def model():
    return small_models.drawn()


@pytest.fixture(scope="module")
def text_NS(model):
    """Rows of words in which padding follows, one word of several tokens among them."""
    rng = np.random.default_rng(3)
    rows = []
    for length in rng.integers(6, 20, 21):
        words = rng.choice([*small_models.WORDS, "townhouse"], length)
        ids = model.tokenizer.encode(" ".join(words))[:20]
        rows.append(np.pad(ids, (0, 20 - len(ids))))
    return np.stack(rows).astype(np.int32)


def write_gates(model, text_NS):
    """A function of the parameters."""

    def run(params):
        record = {"mixer.write": lm_jax.keep}
        out = lm_jax.forward(params, text_NS, model.cfg, mixer=model.mixer, record=record)
        return out.records["mixer.write"]

    return run


@pytest.fixture(scope="module")
def mean_VLR(model, text_NS):
    """Mean gates of every token that occurs, in float64, and how far float32 may be off."""
    gates = rounding.expected(write_gates(model, text_NS), model.params)
    shape = (model.cfg.vocab_size, L, R)
    mean = rounding.Expected(np.zeros(shape), np.zeros(shape))
    for token in np.unique(text_NS[text_NS != 0]):
        at_NT = text_NS == token
        mean.values[token] = gates.values[:, at_NT].mean(1)
        # Of the gates, independent of each other, and of adding them up.
        mean.bounds[token] = np.linalg.norm(gates.bounds[:, at_NT], axis=1) / at_NT.sum()
        mean.bounds[token] += at_NT.sum() * 2.0**-24 * mean.values[token]
    return mean


def test_mean_gates_of_tokens(model, text_NS, mean_VLR):
    result = interventions.over_text(model, text_NS)
    assert result.ranking == ()
    np.testing.assert_array_equal(
        result.count_V[1:], np.bincount(text_NS.ravel(), minlength=model.cfg.vocab_size)[1:]
    )
    assert result.count_V[0] == 0
    rounding.assert_within(result.mean_VLR, mean_VLR)


def test_prototypes_are_ranked_by_cohens_d(model, text_NS):
    result = interventions.over_text(model, text_NS, ["river", "townhouse"])
    pieces = word_ids(model.tokenizer, ["townhouse"])[0]
    assert len(pieces) > 1
    on = np.isin(text_NS, word_ids(model.tokenizer, ["river"])[0])
    count = 0
    for n, row in enumerate(text_NS):
        for t in range(len(row) - len(pieces) + 1):
            if row[t : t + len(pieces)].tolist() == pieces:
                on[n, t : t + len(pieces)] = True
                count += 1
    assert result.occurrences["townhouse"] == count > 0
    elsewhere = ~on & (text_NS != 0)
    sizes = on.sum(), elsewhere.sum()

    def ranked(params):
        """Gates, d by sums of squares, and both means."""
        gate_LNTR = write_gates(model, text_NS)(params)
        parts = [
            [
                jnp.sum(jnp.where(at[None, :, :, None], x, 0.0), (1, 2))
                for x in (gate_LNTR, gate_LNTR**2)
            ]
            for at in (on, elsewhere)
        ]
        means = [total / size for (total, _), size in zip(parts, sizes, strict=True)]
        within = sum(
            squares - total * mean for (total, squares), mean in zip(parts, means, strict=True)
        )
        d = (means[0] - means[1]) / jnp.sqrt(within / (sum(sizes) - 2))
        return {"score": d, "on_words": means[0], "elsewhere": means[1]}, gate_LNTR

    (wanted, gate_LNTR), (bounds, _) = rounding.expected(ranked, model.params)
    assert len(result.ranking) == L * R
    for one in result.ranking:
        at = one.layer, one.prototype
        gate_NT = gate_LNTR[one.layer, :, :, one.prototype]
        assert wanted["score"][at] == pytest.approx(cohens_d(gate_NT[on], gate_NT[elsewhere]))
        for name in wanted:
            exact = rounding.Expected(wanted[name][at], bounds[name][at])
            rounding.assert_within(getattr(one, name), exact, name)
    scores = [one.score for one in result.ranking]
    assert scores == sorted(scores, reverse=True)


def test_words_that_do_not_occur_are_refused(model, text_NS):
    with pytest.raises(BadInputError, match=r"'riverhouse' does not occur in the \d+ tokens"):
        interventions.over_text(model, text_NS, ["riverhouse"])
    # One of several may be absent; its count says so.
    result = interventions.over_text(model, text_NS, ["river", "riverhouse"])
    assert result.occurrences["riverhouse"] == 0


def permuted(model, order_LR):
    """The same function, with the prototypes of each layer in another order."""
    mixer = dict(model.params["blocks"]["mixer"])
    for name in ("prototypes", "decay_logit"):
        mixer[name] = jnp.stack([x[order] for x, order in zip(mixer[name], order_LR, strict=True)])
    params = {**model.params, "blocks": {**model.params["blocks"], "mixer": mixer}}
    return dataclasses.replace(model, params=params)


def test_matching_recovers_a_permutation_and_the_effects_with_it(model, text_NS, mean_VLR):
    rng = np.random.default_rng(4)
    order_LR = np.stack([rng.permutation(R) for _ in range(L)])
    other = permuted(model, order_LR)
    first, second = (interventions.over_text(each, text_NS) for each in (model, other))
    partner_M = matching.assign(interventions.similarities(first, second, least_count=3))
    for layer in range(L):
        for place, prototype in enumerate(order_LR[layer]):
            assert partner_M[layer * R + prototype] == layer * R + place
    result = interventions.match(first, second, layer=1, prototype=2, least_count=3)
    assert (result.layer, result.prototype) == (1, order_LR[1].tolist().index(2))
    # Two vectors that are apart by a share of their length; its square is what the cosine loses.
    counted_V = first.count_V >= 3
    values_V, bounds_V = (x[counted_V, 1, 2] for x in mean_VLR)
    apart = 2 * np.linalg.norm(bounds_V) / np.linalg.norm(values_V - values_V.mean())
    assert apart < 0.01
    assert result.similarity == pytest.approx(1.0, rel=0, abs=apart**2 + in_float64(values_V))
    assert result.best == result.similarity
    assert result.null_median < result.null_95 < result.similarity
    assert (result.p_value, result.percentile, result.others) == (1 / 25, 100.0, 2 * L * R)

    arguments = {"draws": 1, "control_draws": 1, "controls": False, "least": 0.0}
    at = {"layer": result.layer, "prototype": result.prototype}
    sentences = small_models.sentences()
    here = interventions.measure(model, sentences, layer=1, prototype=2, **arguments)
    there = interventions.measure(other, sentences, **at, **arguments)
    modes = (None, *MODES)
    edits = [effects.edits_for(mode, 1, 2) for mode in modes]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(jnp.asarray(leaves)), *edits)
    tokens_NS, target_NT = here.cases.tokens_NS, here.cases.target_NT

    def target_log_p(params, stacked):
        def one(edits):
            static = {"cfg": model.cfg, "mixer": model.mixer}
            log_p_NT = effects.token_log_probs(params, tokens_NS, edits, **static)
            return jnp.sum(jnp.where(target_NT, log_p_NT, 0.0), 1)

        return jax.lax.map(one, stacked)

    exact, off = rounding.expected(target_log_p, model.params, stacked)
    for i, mode in enumerate(modes[1:], 1):
        ratio_N, off_N = np.exp(exact[i] - exact[0]), np.hypot(off[i], off[0])
        wanted = rounding.Expected(100 * (ratio_N - 1), 100 * ratio_N * np.expm1(off_N))
        for measured, prototype in ((here, 2), (there, result.prototype)):
            rounding.assert_within(measured.change(mode)[1, prototype, 0], wanted, mode)


def in_float64(*vectors):
    """How far a correlation of two such vectors may be off by rounding in float64.

    Means are taken away, which may be much larger than what is left.
    """
    largest = max(np.linalg.norm(x) / np.linalg.norm(x - x.mean()) for x in vectors)
    return 8 * len(vectors[0]) * 2.0**-53 * (1 + largest)


def test_similarity_is_the_correlation_over_tokens(model, text_NS):
    first, second = (
        interventions.over_text(each, text_NS) for each in (model, small_models.drawn(seed=7))
    )
    found_MM = interventions.similarities(first, second, least_count=3)
    common = (first.count_V >= 3) & (second.count_V >= 3)
    a, b = (gates.mean_VLR[common].reshape(common.sum(), -1) for gates in (first, second))
    want = np.corrcoef(a.T, b.T)[: L * R, L * R :]
    off = in_float64(*a.T, *b.T)
    np.testing.assert_allclose(found_MM, want, rtol=0, atol=off)
    match = interventions.match(first, second, layer=0, prototype=1, least_count=3)
    assert match.best >= match.similarity
    # The null, by a loop over pairs of different prototypes of one seed.
    null = []
    for x in (a, b):
        inside = np.corrcoef(x.T)
        null += [max(np.delete(inside[m], m)) for m in range(L * R)]
    assert match.null_95 == pytest.approx(np.quantile(null, 0.95))
    assert match.p_value == pytest.approx((1 + sum(np.array(null) >= match.similarity)) / 25)


def with_a_nuisance(rng, concepts_MV):
    """Gates of 4 layers of 6 that follow their concepts, and punctuation to some extent each."""
    M, V = concepts_MV.shape
    punctuation_V = (np.arange(V) < 20) * 1.0
    load_M1 = rng.uniform(0.5, 1.5, (M, 1))
    gates_MV = concepts_MV + load_M1 * punctuation_V / punctuation_V.std()
    gates_VLR = gates_MV.T.reshape(V, 4, 6)
    return interventions.TextGates(np.full(V, 9), gates_VLR, {}, ())


def concepts(rng):
    """24 concepts of a few of 400 tokens each."""
    made_MV = (rng.random((24, 400)) < 0.03) * rng.exponential(size=(24, 400))
    return made_MV / made_MV.std(1, keepdims=True)


def shuffled_p(first, second, own, result):
    """The test by shuffled tokens, which asks whether there is any relation at all."""
    first_MV, second_MV = (
        (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) / 20
        for x in (gates.mean_VLR.reshape(400, 24).T for gates in (first, second))
    )
    rng = np.random.default_rng(0)
    null = [(second_MV @ rng.permutation(first_MV[own])).max() for _ in range(200)]
    return (1 + np.sum(np.array(null) >= result)) / 201


def test_a_shared_nuisance_is_not_the_same_concept():
    p_S, shuffled_S = [], []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        first, second = (with_a_nuisance(rng, concepts(rng)) for _ in range(2))
        result = interventions.match(first, second, layer=1, prototype=2)
        p_S.append(result.p_value)
        if seed < 20:
            shuffled_S.append(shuffled_p(first, second, 8, result.similarity))
    # Different concepts under one nuisance: any relation at all is found nearly always,
    assert np.mean(np.array(shuffled_S) <= 0.05) > 0.9
    # and that they are the same no more often than at the level (99.9 % binomial limit).
    assert np.count_nonzero(np.array(p_S) <= 0.05) <= stats.binom(150, 0.05).ppf(0.999)
    assert np.median(p_S) > 0.25


def test_the_same_concepts_are_found_under_a_shared_nuisance():
    rng = np.random.default_rng(1)
    first_MV, order = concepts(rng), rng.permutation(24)
    second_MV = first_MV[order] + 0.5 * rng.normal(size=(24, 400))
    first, second = (with_a_nuisance(rng, gates_MV) for gates_MV in (first_MV, second_MV))
    partner_M = matching.assign(interventions.similarities(first, second))
    np.testing.assert_array_equal(order[partner_M], np.arange(24))
    for own in range(24):
        result = interventions.match(first, second, layer=own // 6, prototype=own % 6)
        assert order[result.layer * 6 + result.prototype] == own
        assert result.p_value <= 0.05
        assert result.percentile > 95


def test_a_constant_gate_is_similar_to_nothing():
    rng = np.random.default_rng(0)
    gates = interventions.TextGates(np.full(9, 9), rng.random((9, 2, 2)), {}, ())
    gates.mean_VLR[:, 0, 1] = 0.25
    found_MM = interventions.similarities(gates, gates)
    np.testing.assert_array_equal(found_MM[1], 0.0)
    assert found_MM[0, 0] == pytest.approx(1.0)


def test_a_match_is_the_assigned_partner_and_not_the_most_similar_one():
    """Both prototypes of the first are most like the other's first, which only one of them gets."""
    # Directions that are orthogonal to one another and to a constant.
    basis_QV = np.linalg.qr(np.c_[np.ones(9), np.eye(9)[:, :4]])[0].T[1:]
    cosines_MQ = np.array([[0.9, 0.0, 0.0, 0.0], [0.8, 0.1, 0.0, 0.0]])
    for m, rest in enumerate((2, 3)):
        cosines_MQ[m, rest] = np.sqrt(1 - (cosines_MQ[m] ** 2).sum())
    first, second = (
        interventions.TextGates(np.full(9, 9), (vectors_MV.T + 1)[:, None], {}, ())
        for vectors_MV in (cosines_MQ @ basis_QV, basis_QV[:2])
    )
    np.testing.assert_allclose(
        interventions.similarities(first, second), cosines_MQ[:, :2], rtol=0, atol=1e-12
    )
    # 0.9 + 0.1 is more than 0.8 + 0.
    found = interventions.match(first, second, layer=0, prototype=1)
    assert found.prototype == 1
    assert (found.similarity, found.best) == pytest.approx((0.1, 0.8))


def test_models_that_cannot_be_matched_are_refused():
    gates = interventions.TextGates(np.full(9, 9), np.ones((9, 2, 2)), {}, ())
    other = interventions.TextGates(np.full(9, 9), np.ones((9, 2, 3)), {}, ())
    with pytest.raises(BadInputError, match="2 layers with 2 prototypes cannot be matched"):
        interventions.match(gates, other, layer=0, prototype=0)
    alone = interventions.TextGates(np.full(9, 9), np.ones((9, 1, 1)), {}, ())
    with pytest.raises(BadInputError, match="has no other to compare with"):
        interventions.match(alone, alone, layer=0, prototype=0)
    rare = interventions.TextGates(np.ones(9, int), np.ones((9, 2, 2)), {}, ())
    with pytest.raises(BadInputError, match="only 0 tokens occur 5 times"):
        interventions.similarities(gates, rare)
    short = interventions.TextGates(np.full(8, 9), np.ones((8, 2, 2)), {}, ())
    with pytest.raises(BadInputError, match="vocabularies of 9 and 8 tokens"):
        interventions.similarities(gates, short)
