"""Effects are those of plain forwards, null edits change nothing, and all is one program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
import protot_jax
from protot_jax import intervene
from protot_jax.edits import MODES
from protot_jax.intervene import effects, summary
from protot_jax.intervene.effects import REINITIALISE
from protot_jax.intervene.sentences import open_ids
from tests.protot_jax.intervene import small_models

L, R = 3, small_models.R
AT = {"layer": 1, "prototype": 2}


@pytest.fixture(scope="module")
def model():
    return small_models.drawn()


@pytest.fixture(scope="module")
def measured(model):
    return intervene.measure(
        model, small_models.sentences(), **AT, draws=3, control_draws=2, least=0.0
    )


@functools.partial(jax.jit, static_argnames=("cfg", "mixer"))
def plain(params, tokens_BT, edits, *, cfg, mixer):
    return lm_jax.forward(params, tokens_BT, cfg, mixer=mixer, edits=edits).logits


def direct(model, prefix: str, target: str, params=None, edits=None) -> float:
    """p of the target's first token by a softmax over the plain forward of its prefix.

    What follows the prefix is one token over and over, which causality keeps out.
    """
    ids = open_ids(model.tokenizer, prefix)
    padded = np.pad(ids, (0, 16 - len(ids)), constant_values=7)
    logits = plain(
        model.params if params is None else params,
        jnp.asarray(padded)[None],
        edits or {},
        cfg=model.cfg,
        mixer=model.mixer,
    )
    logits_V = np.asarray(logits, np.float64)[0, len(ids) - 1]
    first = open_ids(model.tokenizer, target)[1]
    return float(np.exp(logits_V[first]) / np.exp(logits_V).sum())


def prefixes(sentences):
    return [(s.text[: s.text.rindex(s.target)].rstrip(), s.target) for s in sentences]


def test_probabilities_are_those_of_a_softmax_after_the_prefix(model, measured):
    for n, (prefix, target) in enumerate(prefixes(small_models.sentences())):
        assert measured.baseline_N[n] == pytest.approx(direct(model, prefix, target), rel=1e-5)
        for mode in MODES:
            given = protot_jax.edit(**AT, mode=mode)
            found = measured.probability[mode][AT["layer"], AT["prototype"], 0, n]
            assert found == pytest.approx(direct(model, prefix, target, edits=given), rel=1e-5)
        key = jax.random.split(jax.random.key(0), 3)[1]
        params = protot_jax.reinitialise(model.params, key, **AT)
        found = measured.probability[REINITIALISE][AT["layer"], AT["prototype"], 1, n]
        assert found == pytest.approx(direct(model, prefix, target, params=params), rel=1e-5)


def test_all_subtokens_multiply(model, measured):
    """The last of the sentences has a target of several tokens."""
    sentences = small_models.sentences()
    whole = intervene.measure(
        model, sentences, **AT, draws=1, control_draws=1, controls=False, all_subtokens=True
    )
    text, target = sentences[-1].text, sentences[-1].target
    ids = open_ids(model.tokenizer, text)
    start = len(open_ids(model.tokenizer, text[: -len(target)].rstrip()))
    padded = np.pad(ids, (0, 16 - len(ids)), constant_values=7)
    logits = plain(model.params, jnp.asarray(padded)[None], {}, cfg=model.cfg, mixer=model.mixer)
    log_p = np.asarray(jax.nn.log_softmax(logits))[0]
    parts = [log_p[t - 1, ids[t]] for t in range(start, len(ids))]
    assert len(parts) > 1
    assert measured.baseline_N[-1] == pytest.approx(np.exp(parts[0]), rel=1e-5)
    assert whole.baseline_N[-1] == pytest.approx(np.exp(sum(parts)), rel=1e-5)
    assert whole.cases.target_NT[-1].sum() == len(parts)
    np.testing.assert_array_equal(whole.baseline_N[:3], measured.baseline_N[:3])


def test_every_effect_and_the_percentile_by_brute_force(model, measured):
    cases = prefixes(small_models.sentences())
    before = np.array([direct(model, *case) for case in cases])
    effect_LR = np.zeros((L, R))
    for layer in range(L):
        for prototype in range(R):
            given = protot_jax.edit(layer=layer, prototype=prototype, mode="zero_read")
            after = np.array([direct(model, *case, edits=given) for case in cases])
            effect_LR[layer, prototype] = (100 * (after / before - 1)).mean()
    np.testing.assert_allclose(measured.effects("zero_read"), effect_LR, rtol=1e-3, atol=1e-3)

    own = effect_LR[AT["layer"], AT["prototype"]]
    others = np.delete(effect_LR.ravel(), AT["layer"] * R + AT["prototype"])
    control = summary.control(measured, "zero_read")
    assert control["percentile"] == pytest.approx(100 * (others < own).sum() / others.size)
    as_low, as_high = (others <= own).sum(), (others >= own).sum()
    assert control["as_low"] == as_low
    assert control["p"] == pytest.approx(min(1, 2 * (1 + min(as_low, as_high)) / (L * R)))
    assert control["n"] == L * R - 1
    lowest = control["strongest"][0]
    assert effect_LR[lowest["layer"], lowest["prototype"]] == pytest.approx(others.min(), rel=1e-3)


def test_ties_count_half_in_the_percentile(measured):
    same = dataclasses.replace(
        measured,
        probability={mode: np.ones_like(p) for mode, p in measured.probability.items()},
        baseline_N=np.ones(4),
    )
    control = summary.control(same, "mask_read")
    assert control["percentile"] == pytest.approx(50.0)
    assert control["p"] == 1.0
    assert control["as_low"] == control["n"]


def test_a_prototype_that_does_nothing_changes_no_bit(model):
    """No output where alpha is 0; and nothing to mask where a gate is 0 already."""
    silent = dict(model.params["blocks"]["mixer"])
    silent["alpha"] = jnp.zeros_like(silent["alpha"])
    params = {**model.params, "blocks": {**model.params["blocks"], "mixer": silent}}
    mute = dataclasses.replace(model, params=params)
    found = intervene.measure(mute, small_models.sentences(), **AT, draws=2, control_draws=2)
    for mode in effects.MODES:
        np.testing.assert_array_equal(found.change(mode)[1, 2], 0.0)
        np.testing.assert_array_equal(found.perplexity_change(mode)[1, 2], 0.0)


def test_only_the_prototype_that_carries_the_word_matters():
    """The built model: KEY is stored by CARRIER alone, and read by it at the question."""
    built = small_models.built()
    at = {"layer": 0, "prototype": small_models.CARRIER}
    found = intervene.measure(
        built,
        targets("a river and the people who met", "the river of its town who met"),
        **at,
        draws=4,
        control_draws=4,
    )
    assert found.baseline_N.min() > 0.05
    for mode in effects.MODES:
        effect_R = found.effects(mode)[0]
        carrier = effect_R[small_models.CARRIER]
        others = np.delete(effect_R, small_models.CARRIER)
        assert carrier < others.min()
        assert summary.control(found, mode)["percentile"] == 0.0
        # A new vector of this length still lets a quarter of every gate through.
        if mode != REINITIALISE:
            assert carrier < -25.0
            assert np.abs(others).max() < 0.01
            # Its gate is 0 already, so that there is nothing to close.
            np.testing.assert_array_equal(found.change(mode)[0, small_models.EMPTY], 0.0)
    # Without the word there is nothing to lose.
    without = intervene.measure(
        built,
        targets("a house and the people who met", "the house of its town who met"),
        **at,
        draws=1,
        control_draws=1,
        controls=False,
        least=0.0,
    )
    assert abs(without.effects("mask_write")[0, small_models.CARRIER]) < 0.01


def targets(*texts):
    return [intervene.Sentence("", small_models.TARGET, text) for text in texts]


def test_zeroing_the_write_gate_is_zeroing_the_read_gate(measured):
    """With mass normalisation: what was never written has a mean of zero."""
    np.testing.assert_allclose(
        measured.probability["zero_write"], measured.probability["zero_read"], rtol=1e-5
    )


def test_draws_repeat_under_their_seed_and_differ_from_one_another(model, measured):
    again = intervene.measure(
        model, small_models.sentences(), **AT, draws=3, control_draws=2, least=0.0
    )
    np.testing.assert_array_equal(
        again.probability[REINITIALISE], measured.probability[REINITIALISE]
    )
    own_DN = measured.probability[REINITIALISE][AT["layer"], AT["prototype"]]
    assert len(np.unique(own_DN[:, 0])) == 3
    other = intervene.measure(
        model, small_models.sentences(), **AT, draws=3, controls=False, control_draws=1, seed=1
    )
    assert not np.isin(other.probability[REINITIALISE][1, 2], own_DN).any()
    # Others have fewer draws, and the chosen one's effect is over as many.
    assert np.isfinite(measured.probability[REINITIALISE][0, 0, :2]).all()
    assert np.isnan(measured.probability[REINITIALISE][0, 0, 2]).all()
    effect = measured.change(REINITIALISE)[1, 2, :2].mean()
    assert measured.effects(REINITIALISE)[1, 2] == pytest.approx(effect)


def test_targets_below_the_least_probability_are_excluded_and_counted(model, measured):
    least = float(np.sort(measured.baseline_N)[2])
    found = intervene.measure(
        model, small_models.sentences(), **AT, draws=1, control_draws=1, least=least
    )
    assert found.kept_N.sum() == 2
    told = summary.of_seed(found)
    assert (told["kept"], told["excluded"]) == (2, 2)
    kept = found.change("mask_write")[1, 2, 0][measured.baseline_N >= least]
    assert told["modes"][1]["effect"]["mean"] == pytest.approx(kept.mean())
    none = intervene.measure(
        model, small_models.sentences(), **AT, draws=1, control_draws=1, least=0.99
    )
    told = summary.of_seed(none)
    assert (told["kept"], told["modes"][0]["effect"]["mean"]) == (0, None)
    assert told["modes"][0]["control"] is None
    # So there is nothing to compare with, and nothing else was measured.
    assert np.isfinite(none.probability["mask_read"]).sum() == 4


def test_a_sweep_is_one_program(model):
    before = effects.token_log_probs._cache_size()
    three = small_models.sentences()[:3]
    intervene.measure(model, three, layer=0, prototype=0, draws=2, control_draws=1)
    assert effects.token_log_probs._cache_size() == before + 1
    # Nor does anything around it compile anew for another prototype.
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )
    intervene.measure(model, three, layer=2, prototype=3, draws=2, control_draws=1)
    assert effects.token_log_probs._cache_size() == before + 1
    assert not compiled
    jax.jit(lambda x: x + before)(1.0)
    assert compiled


def test_perplexities_of_sentences_and_of_text(model, measured):
    given = protot_jax.edit(**AT, mode="mask_read")

    def perplexity(rows, edits):
        losses = []
        for ids in rows:
            padded = jnp.asarray(np.pad(ids, (0, 16 - len(ids)), constant_values=7))[None]
            logits = plain(model.params, padded, edits, cfg=model.cfg, mixer=model.mixer)
            log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)[0]
            losses += [-log_p[t, token] for t, token in enumerate(ids[1:])]
        return np.exp(np.mean(losses))

    sentence = [open_ids(model.tokenizer, small_models.sentences()[0].text)]
    before, after = (perplexity(sentence, edits) for edits in ({}, given))
    assert np.exp(measured.baseline_loss_N[0]) == pytest.approx(before, rel=1e-5)
    found = measured.perplexity_change("mask_read")[1, 2, 0, 0]
    assert found == pytest.approx(100 * (after / before - 1), abs=1e-3)

    rng = np.random.default_rng(2)
    text_NS = rng.integers(5, model.cfg.vocab_size, (11, 14)).astype(np.int32)
    # The end of a document, and padding after it.
    text_NS[4, 9:] = 0
    rows = [row[row != 0] for row in text_NS]
    text = intervene.measure(
        model,
        small_models.sentences(),
        **AT,
        draws=1,
        control_draws=1,
        controls=False,
        text_NS=text_NS,
    ).text
    before, after = (perplexity(rows, edits) for edits in ({}, given))
    assert text.tokens == 11 * 13 - 5
    assert text.perplexity == pytest.approx(before, rel=1e-5)
    change = text.change["mask_read"]
    assert change.estimate == pytest.approx(100 * (after / before - 1), abs=1e-3)
    assert change.low <= change.estimate <= change.high
    assert change.n == 11


def test_what_cannot_be_measured_is_refused(model):
    given = small_models.sentences()
    with pytest.raises(UsageError, match=r"prototype = 4 is outside 0\.\.3"):
        intervene.measure(model, given, layer=0, prototype=4)
    with pytest.raises(UsageError, match="control_draws = 3 must be"):
        intervene.measure(model, given, **AT, draws=2, control_draws=3)
    with pytest.raises(UsageError, match=r"least probability 1\.0"):
        intervene.measure(model, given, **AT, least=1.0)
    with pytest.raises(UsageError, match="1 rows of text give no interval"):
        intervene.measure(model, given, **AT, text_NS=np.ones((1, 9), np.int32))
    with pytest.raises(BadInputError, match="there is no sentence"):
        intervene.measure(model, [], **AT)
    other = dataclasses.replace(model, mixer=lm_jax.mixers.ATTENTION)
    with pytest.raises(UsageError, match="has no prototypes"):
        intervene.measure(other, given, **AT)
