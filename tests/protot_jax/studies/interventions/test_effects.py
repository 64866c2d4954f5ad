"""Effects equal those of `lm_jax.forward`, null edits change nothing, a sweep is one program."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import lm_jax
from lm_jax.errors import BadInputError, UsageError
import protot_jax
from protot_jax.analysis.token_ids import open_ids
from protot_jax.mixers.edits import MODES
from protot_jax.studies import interventions
from protot_jax.studies.interventions import effects, numbers
from protot_jax.studies.interventions.effects import REINITIALISE
from tests import rounding
from tests.protot_jax.studies.interventions import small_models

L, R = 3, small_models.R
AT = {"layer": 1, "prototype": 2}


@pytest.fixture(scope="module")
def model():
    return small_models.drawn()


@pytest.fixture(scope="module")
def measured(model):
    return interventions.measure(
        model, small_models.sentences(), **AT, draws=3, control_draws=2, least=0.0
    )


def rows(model):
    """Rows of ids by name, and the place in each of the first one whose probability is asked."""
    sentences = small_models.sentences()
    texts = [open_ids(model.tokenizer, s.text) for s in sentences]
    prefixes = [
        open_ids(model.tokenizer, s.text[: s.text.rindex(s.target)].rstrip()) for s in sentences
    ]
    firsts = [open_ids(model.tokenizer, s.target)[1] for s in sentences]
    return {
        # A prefix and the first token of its target.
        "targets": [([*ids, first], len(ids)) for ids, first in zip(prefixes, firsts, strict=True)],
        "pieces": [(texts[-1], len(prefixes[-1]))],
        "sentence": [(texts[0], 1)],
        "text": [(row_S[row_S != 0], 1) for row_S in text_rows(model)],
    }


def text_rows(model):
    rows_NS = np.random.default_rng(2).integers(5, model.cfg.vocab_size, (11, 14)).astype(np.int32)
    # The end of a document, and padding after it.
    rows_NS[4, 9:] = 0
    return rows_NS


def edited(layer, prototype, mode):
    """All edits in one structure; those of other modes are in a layer that is not there."""
    edits = {}
    for each in MODES:
        at = layer if each == mode else -1
        edits |= protot_jax.edit(layer=at, prototype=prototype, mode=each)
    return edits


@pytest.fixture(scope="module")
def exact(model):
    """log p of `rows` in float64, from `lm_jax.forward`, by (mode, layer, prototype) and name."""
    named = rows(model)
    token_rows = [each for part in named.values() for each in part]
    # A row is followed by one repeated token, which causality ignores.
    token_NS = np.full((len(token_rows), 17), 7)
    for n, (ids, _) in enumerate(token_rows):
        token_NS[n, : len(ids)] = ids
    positions = [
        (n, t) for n, (ids, first) in enumerate(token_rows) for t in range(first, len(ids))
    ]
    row_P, place_P = np.array(positions).T

    def log_p(pair):
        params, edits = pair
        out = lm_jax.forward(params, token_NS[:, :-1], model.cfg, mixer=model.mixer, edits=edits)
        log_p_NTV = jax.nn.log_softmax(out.logits)
        return log_p_NTV[row_P, place_P - 1, token_NS[row_P, place_P]]

    key = jax.random.split(jax.random.key(0), 3)[1]
    again = protot_jax.reinitialise(model.params, key, **AT)
    chosen = tuple(AT.values())
    everywhere = [("zero_read", *at) for at in itertools.product(range(L), range(R))]
    changed = [("none", *chosen), *((mode, *chosen) for mode in MODES), *everywhere]
    programs = (
        {(None, *chosen): (model.params, {}), (REINITIALISE, *chosen): (again, {})},
        {(mode, *at): (model.params, edited(*at, mode)) for mode, *at in changed},
    )
    ends = np.cumsum([sum(len(ids) - first for ids, first in part) for part in named.values()])
    results = {}
    for program in programs:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(jnp.asarray(leaves)), *program.values())
        log_p_of = rounding.expected(lambda x: jax.lax.map(log_p, x), stacked)
        for at, *each in zip(program, *log_p_of, strict=True):
            parts = zip(*(np.split(x, ends[:-1]) for x in each), strict=True)
            results[at] = dict(zip(named, itertools.starmap(rounding.Expected, parts), strict=True))
    # Where all are off, it is the model without edits.
    unedited, off = (results[mode, *chosen]["text"].values for mode in (None, "none"))
    np.testing.assert_array_equal(off, unedited)
    return results


def probability(log_p):
    """p of log p, whose error is that of p relative to it."""
    exact = np.exp(log_p.values)
    return rounding.Expected(exact, exact * np.expm1(log_p.bounds))


def mean(wanted):
    """Errors are independent, as in `rounding`, and add up in squares."""
    return rounding.Expected(
        wanted.values.mean(), np.linalg.norm(wanted.bounds) / wanted.bounds.size
    )


def perplexity(log_p):
    return probability(mean(rounding.Expected(-log_p.values, log_p.bounds)))


def percent(after, before):
    """Change of one positive number to another."""
    ratio = after.values / before.values
    off = np.hypot(after.bounds / after.values, before.bounds / before.values)
    return rounding.Expected(100 * (ratio - 1), 100 * ratio * off)


def test_probabilities_are_those_of_a_softmax_after_the_prefix(measured, exact):
    before = probability(exact[None, *AT.values()]["targets"])
    rounding.assert_within(measured.baseline_N, before)
    for mode, draw in (*((mode, 0) for mode in MODES), (REINITIALISE, 1)):
        found_N = measured.probability[mode][*AT.values(), draw]
        wanted = probability(exact[mode, *AT.values()]["targets"])
        rounding.assert_within(found_N, wanted, mode)
        # They differ by more than what is compared.
        assert (np.abs(wanted.values - before.values) > wanted.bounds + before.bounds).any()


def test_all_subtokens_multiply(model, measured, exact):
    """The last of the sentences has a target of several tokens."""
    whole = interventions.measure(
        model,
        small_models.sentences(),
        **AT,
        draws=1,
        control_draws=1,
        controls=False,
        all_subtokens=True,
    )
    parts = exact[None, *AT.values()]["pieces"]
    assert len(parts.values) > 1
    first = rounding.Expected(parts.values[0], parts.bounds[0])
    rounding.assert_within(measured.baseline_N[-1], probability(first))
    product = rounding.Expected(parts.values.sum(), np.linalg.norm(parts.bounds))
    rounding.assert_within(whole.baseline_N[-1], probability(product))
    assert whole.cases.target_NT[-1].sum() == len(parts.values)
    np.testing.assert_array_equal(whole.baseline_N[:3], measured.baseline_N[:3])


def test_every_effect_and_the_percentile_by_brute_force(measured, exact):
    log_before = exact[None, *AT.values()]["targets"]
    changes = []
    for at in itertools.product(range(L), range(R)):
        log_after = exact["zero_read", *at]["targets"]
        ratio = rounding.Expected(
            log_after.values - log_before.values, np.hypot(log_after.bounds, log_before.bounds)
        )
        factor = probability(mean(ratio))
        changes.append((100 * (factor.values - 1), 100 * factor.bounds))
    effect_LR, bound_LR = (np.array(part).reshape(L, R) for part in zip(*changes, strict=True))
    rounding.assert_within(measured.effects("zero_read"), rounding.Expected(effect_LR, bound_LR))

    own = effect_LR[AT["layer"], AT["prototype"]]
    others = np.delete(effect_LR.ravel(), AT["layer"] * R + AT["prototype"])
    control = numbers.control(measured, "zero_read")
    assert control.percentile == pytest.approx(100 * (others < own).sum() / others.size)
    as_low, as_high = (others <= own).sum(), (others >= own).sum()
    assert control.as_low == as_low
    assert control.p == pytest.approx(min(1, 2 * (1 + min(as_low, as_high)) / (L * R)))
    assert control.n == L * R - 1
    lowest = control.strongest[0]
    result = effect_LR[lowest.layer, lowest.prototype]
    assert result == others.min()


def test_ties_count_half_in_the_percentile(measured):
    same = dataclasses.replace(
        measured,
        probability={mode: np.ones_like(p) for mode, p in measured.probability.items()},
        baseline_N=np.ones(4),
    )
    control = numbers.control(same, "mask_read")
    assert control.percentile == pytest.approx(50.0)
    assert control.p == 1.0
    assert control.as_low == control.n


def test_a_prototype_that_does_nothing_changes_no_bit(model):
    """No output where alpha is 0; and nothing to mask where a gate is 0 already."""
    silent = dict(model.params["blocks"]["mixer"])
    silent["alpha"] = jnp.zeros_like(silent["alpha"])
    params = {**model.params, "blocks": {**model.params["blocks"], "mixer": silent}}
    mute = dataclasses.replace(model, params=params)
    result = interventions.measure(mute, small_models.sentences(), **AT, draws=2, control_draws=2)
    for mode in effects.MODES:
        np.testing.assert_array_equal(result.change(mode)[1, 2], 0.0)
        np.testing.assert_array_equal(result.perplexity_change(mode)[1, 2], 0.0)


def test_only_the_prototype_that_carries_the_word_matters():
    """The built model: KEY is stored by CARRIER alone, and read by it at the question."""
    built = small_models.built()
    at = {"layer": 0, "prototype": small_models.CARRIER}
    result = interventions.measure(
        built,
        targets("a river and the people who met", "the river of its town who met"),
        **at,
        draws=4,
        control_draws=4,
    )
    assert result.baseline_N.min() > 0.05
    for mode in effects.MODES:
        effect_R = result.effects(mode)[0]
        carrier = effect_R[small_models.CARRIER]
        others = np.delete(effect_R, small_models.CARRIER)
        assert carrier < others.min()
        assert numbers.control(result, mode).percentile == 0.0
        # A new vector of this length still lets a quarter of every gate through.
        if mode != REINITIALISE:
            assert carrier < -25.0
            assert np.abs(others).max() < 0.01
            # Its gate is 0 already, so that there is nothing to close.
            np.testing.assert_array_equal(result.change(mode)[0, small_models.EMPTY], 0.0)
    # Without the word there is nothing to lose.
    without = interventions.measure(
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
    return [interventions.Sentence("", small_models.TARGET, text) for text in texts]


def test_zeroing_the_write_gate_is_zeroing_the_read_gate(measured, exact):
    """With mass normalisation: what was never written has a mean of zero."""
    for at in itertools.product(range(L), range(R)):
        wanted = probability(exact["zero_read", *at]["targets"])
        for mode in ("zero_write", "zero_read"):
            rounding.assert_within(measured.probability[mode][*at, 0], wanted, f"{mode} at {at}")


def test_draws_repeat_under_their_seed_and_differ_from_one_another(model, measured):
    again = interventions.measure(
        model, small_models.sentences(), **AT, draws=3, control_draws=2, least=0.0
    )
    np.testing.assert_array_equal(
        again.probability[REINITIALISE], measured.probability[REINITIALISE]
    )
    own_DN = measured.probability[REINITIALISE][AT["layer"], AT["prototype"]]
    assert len(np.unique(own_DN[:, 0])) == 3
    other = interventions.measure(
        model, small_models.sentences(), **AT, draws=3, controls=False, control_draws=1, seed=1
    )
    assert not np.isin(other.probability[REINITIALISE][1, 2], own_DN).any()
    # Others have fewer draws, and the chosen one's effect is over as many.
    assert np.isfinite(measured.probability[REINITIALISE][0, 0, :2]).all()
    assert np.isnan(measured.probability[REINITIALISE][0, 0, 2]).all()
    factors = 1 + measured.change(REINITIALISE)[1, 2, :2] / 100
    effect = 100 * (stats.gmean(factors, axis=None) - 1)
    assert measured.effects(REINITIALISE)[1, 2] == pytest.approx(effect)


def test_targets_below_the_least_probability_are_excluded_and_counted(model, measured):
    least = float(np.sort(measured.baseline_N)[2])
    result = interventions.measure(
        model, small_models.sentences(), **AT, draws=1, control_draws=1, least=least
    )
    assert result.kept_N.sum() == 2
    report = numbers.of_seed(result, run="run", seed=1, step=0)
    assert (report.kept, report.excluded) == (2, 2)
    kept = result.change("mask_write")[1, 2, 0][measured.baseline_N >= least]
    assert report.modes[1].effect.mean == pytest.approx(100 * (stats.gmean(1 + kept / 100) - 1))
    none = interventions.measure(
        model, small_models.sentences(), **AT, draws=1, control_draws=1, least=0.99
    )
    empty = numbers.of_seed(none, run="run", seed=1, step=0)
    assert (empty.kept, empty.modes[0].effect.mean) == (0, None)
    assert empty.modes[0].control is None
    # So there is nothing to compare with, and nothing else was measured.
    assert np.isfinite(none.probability["mask_read"]).sum() == 4


def test_a_sweep_is_one_program(model):
    before = effects.token_log_probs._cache_size()
    three = small_models.sentences()[:3]
    interventions.measure(model, three, layer=0, prototype=0, draws=2, control_draws=1)
    assert effects.token_log_probs._cache_size() == before + 1
    # Nothing around it is compiled again for another prototype either.
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )
    interventions.measure(model, three, layer=2, prototype=3, draws=2, control_draws=1)
    assert effects.token_log_probs._cache_size() == before + 1
    assert not compiled
    jax.jit(lambda x: x + before)(1.0)
    assert compiled


def test_perplexities_of_sentences_and_of_text(model, measured, exact):
    unedited, edited = exact[None, *AT.values()], exact["mask_read", *AT.values()]
    before, after = (perplexity(each["sentence"]) for each in (unedited, edited))
    rounding.assert_within(np.exp(measured.baseline_loss_N[0]), before)
    result = measured.perplexity_change("mask_read")[1, 2, 0, 0]
    rounding.assert_within(result, percent(after, before))

    text = interventions.measure(
        model,
        small_models.sentences(),
        **AT,
        draws=1,
        control_draws=1,
        controls=False,
        text_NS=text_rows(model),
    ).text
    before, after = (perplexity(each["text"]) for each in (unedited, edited))
    assert text.tokens == 11 * 13 - 5
    rounding.assert_within(text.perplexity, before)
    change = text.change["mask_read"]
    rounding.assert_within(change.estimate, percent(after, before))
    assert change.low <= change.estimate <= change.high
    assert change.n == 11


def test_invalid_arguments_are_refused(model):
    sentences = small_models.sentences()
    with pytest.raises(UsageError, match=r"prototype = 4 is outside 0\.\.3"):
        interventions.measure(model, sentences, layer=0, prototype=4)
    with pytest.raises(UsageError, match="control_draws = 3 must be"):
        interventions.measure(model, sentences, **AT, draws=2, control_draws=3)
    with pytest.raises(UsageError, match=r"least probability 1\.0"):
        interventions.measure(model, sentences, **AT, least=1.0)
    with pytest.raises(UsageError, match="1 rows of text give no interval"):
        interventions.measure(model, sentences, **AT, text_NS=np.ones((1, 9), np.int32))
    with pytest.raises(BadInputError, match="there is no sentence"):
        interventions.measure(model, [], **AT)
    other = dataclasses.replace(model, mixer=lm_jax.model.mixers.ATTENTION)
    with pytest.raises(UsageError, match="has no prototypes"):
        interventions.measure(other, sentences, **AT)
