"""b_auto by streaming brackets equals b_auto by sorting, and obeys the 5 % rule that defines it."""

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import BadInputError, CorruptError, UsageError
from polyattn_jax.audit import model_calibration
from polyattn_jax.recipes import calibrate
from polyattn_jax.recipes.calibrate import MassBelow


def causal(scores):
    T, S = scores.shape[-2:]
    return np.where(np.arange(S) <= np.arange(T)[:, None] + (S - T), scores, -np.inf)


def numpy_measure(scores):
    """M(t) in float64, straight from its definition."""
    z = scores.reshape(-1, scores.shape[-1]).astype(np.float64)
    z = z[(z > -np.inf).any(-1)]
    weight = np.exp(z - z.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return lambda thresholds_M: MassBelow(
        np.array([weight[z < t].sum() for t in thresholds_M]), np.int64(len(z))
    )


def heads(seed, scale=2.0, offset=0.0, shape=(3, 2, 2, 16, 16)):
    rng = np.random.default_rng(seed)
    return causal(rng.standard_normal(shape) * scale + offset).astype(np.float32)


@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    offset=st.floats(-200, 200),
    rounding=st.booleans(),
    budget=st.sampled_from([0.0, 0.0113, 0.0517, 0.317, 0.973]),
)
def test_streaming_equals_sorting(seed, scale, offset, rounding, budget):
    scores = heads(seed, scale, offset, (2, 5, 6))
    if rounding:  # bfloat16 scores tie often
        scores = np.asarray(jnp.asarray(scores, jnp.bfloat16), np.float32)
    got = calibrate.calibrate(numpy_measure(scores), budget=budget, num_thresholds=64)
    assert got.bias == calibrate.exact_bias(scores, budget=budget)
    assert -got.bias in scores


def test_the_rule_holds_at_the_bias_and_fails_just_below_it():
    scores = heads(4)
    got = calibrate.calibrate(numpy_measure(scores))
    step = np.nextafter(np.float32(-got.bias), np.float32(np.inf))
    at, past = numpy_measure(scores)([-got.bias, step]).total_M / got.rows
    assert at <= 0.05 < past
    np.testing.assert_allclose(got.mass, at)


@pytest.mark.parametrize("num_thresholds", [1, 7, 256, 1023])
def test_layers_reduced_in_jax_give_the_same_bias_in_few_passes(num_thresholds):
    scores = heads(5)
    calls = []

    @jax.jit
    def one_pass(thresholds_M):
        calls.append(None)
        return jax.lax.map(lambda layer: calibrate.mass_below(layer, thresholds_M, (16,)), scores)

    got = calibrate.calibrate(one_pass, num_thresholds=num_thresholds)
    assert got.bias == calibrate.exact_bias(scores)
    assert got.rows == 3 * 2 * 2 * 16
    assert got.passes <= {1: 33, 7: 11, 256: 4, 1023: 4}[num_thresholds]
    assert len(calls) == 1


def below(scores_TS, thresholds_M):
    """`mass_below` of one head of one text, all of its rows."""
    scores_BNTS = jnp.asarray(scores_TS)[None, None]
    result = calibrate.mass_below(scores_BNTS, jnp.asarray(thresholds_M), (scores_BNTS.shape[2],))
    return MassBelow(result.total_M[0, 0], result.rows[0, 0])


def test_mass_below_is_strict_and_skips_rows_without_keys():
    got = below(np.float32([[1, 1, 2, -np.inf], [-np.inf] * 4]), np.float32([0.5, 1, 1.5, 2, 2.5]))
    tied = 2 / (2 + np.e)
    # Weights over the sum of three, a dozen operations for each.
    np.testing.assert_allclose(got.total_M, [0, 0, tied, tied, 1], rtol=2 * (3 + 12) * 2**-24)
    assert got.rows == 1


def test_mass_below_of_each_text_and_length_is_that_of_its_first_rows():
    scores_BNTS = heads(6, shape=(3, 2, 16, 16))
    thresholds, lengths = np.linspace(-6, 6, 41).astype(np.float32), (1, 5, 16)
    got = jax.jit(calibrate.mass_below, static_argnums=2)(scores_BNTS, thresholds, lengths)
    for text in range(3):
        for c, length in enumerate(lengths):
            want = numpy_measure(scores_BNTS[text, :, :length])(thresholds)
            # Weights of float32, a sum of positive ones over at most 16 keys, 16 rows and 2 heads.
            bound = (16 + 16 + 2 + 40) * 2.0**-24
            np.testing.assert_allclose(got.total_M[text, c], want.total_M, rtol=bound, atol=bound)
            assert got.rows[text, c] == want.rows


@pytest.mark.parametrize(("budget", "threshold"), [(0.0, -2), (0.2, -2), (0.25, 0), (0.5, 1)])
def test_ties_and_a_budget_met_exactly(budget, threshold):
    # Four rows of one key each: every score carries a quarter of the mass.
    scores = np.float32([[-2], [0], [1], [1]])
    got = calibrate.calibrate(lambda t: below(scores, t), budget=budget)
    assert got.bias == calibrate.exact_bias(scores, budget=budget) == -threshold
    assert not np.signbit(got.bias) or got.bias != 0


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38, 3.4028235e38, 1.2e-38])
def test_extreme_scores_are_found_exactly(value):
    scores = np.full((2, 3), value, np.float32)
    got = calibrate.calibrate(numpy_measure(scores))
    assert np.float32(-got.bias) == np.float32(value)


@pytest.mark.parametrize("budget", [-0.1, 1.0, float("nan")])
def test_impossible_budgets_are_refused(budget):
    with pytest.raises(UsageError, match="budget"):
        calibrate.calibrate(numpy_measure(heads(0)), budget=budget)


def test_no_thresholds_and_no_rows_and_nan_scores_are_refused():
    with pytest.raises(UsageError, match="num_thresholds"):
        calibrate.calibrate(numpy_measure(heads(0)), num_thresholds=0)
    for fill, message in ((-np.inf, "no row has an unmasked key"), (np.nan, "not finite")):
        scores = jnp.full((2, 3), fill)
        with pytest.raises(BadInputError, match=message):
            calibrate.calibrate(lambda t, z=scores: below(z, t))


LENGTHS = (8, 20, 48)


def texts_of(seed, texts=6):
    """Scores `[text, head, T, T]` whose level and spread differ by text and grow with position."""
    rng = np.random.default_rng(seed)
    T = LENGTHS[-1]
    level = rng.normal(0, 0.8, (texts, 1, 1, 1)) - np.log1p(np.arange(T))[:, None] / 2
    return causal(rng.standard_normal((texts, 3, T, T)) * 1.5 + level).astype(np.float32)


def measure_of(scores_UNTS, calls=None):
    """Masses in float64 by text and length, in two layers."""

    def measure(thresholds):
        if calls is not None:
            calls.append(len(thresholds))
        results = [
            [
                [numpy_measure(layer[:, :length])(thresholds) for length in LENGTHS]
                for layer in np.split(text, (1,))
            ]
            for text in scores_UNTS
        ]
        total = np.array([[[m.total_M for m in layer] for layer in text] for text in results])
        rows = np.array([[[m.rows for m in layer] for layer in text] for text in results])
        return MassBelow(total.swapaxes(0, 1), rows.swapaxes(0, 1))

    return measure


def test_texts_are_calibrated_together_at_the_chosen_length():
    scores, calls = texts_of(0), []
    got = calibrate.calibrate_texts(measure_of(scores, calls), LENGTHS, 20, num_thresholds=128)
    assert got.bias == calibrate.exact_bias(scores[:, :, :20])
    assert (got.length, got.texts, got.rows) == (20, 6, 6 * 3 * 20)
    assert got.passes == len(calls) <= 6 and set(calls) == {128}
    assert got.mass <= 0.05
    assert got.low <= got.bias <= got.high


def test_the_curve_is_that_of_each_length_to_the_step_of_its_grid():
    scores = texts_of(1)
    got = calibrate.calibrate_texts(measure_of(scores), LENGTHS, 48)
    assert [one.length for one in got.curve] == list(LENGTHS)
    # The grid spans less than two powers of two above the largest of these numbers.
    assert got.step < 0.05
    for one in got.curve:
        part = scores[:, :, : one.length]
        assert one.bias == pytest.approx(calibrate.exact_bias(part), abs=got.step)
        single = [calibrate.exact_bias(text) for text in part]
        assert one.least == pytest.approx(min(single), abs=got.step)
        assert one.most == pytest.approx(max(single), abs=got.step)
        assert one.least <= one.low <= one.bias <= one.high <= one.most
    assert got.curve[0].bias < got.curve[2].bias
    assert got.curve[2].bias == pytest.approx(got.bias, abs=got.step)


def test_the_interval_is_a_bootstrap_over_whole_texts():
    scores = texts_of(2)
    got = calibrate.calibrate_texts(measure_of(scores), LENGTHS, 48, resamples=400, seed=3)
    drawn = np.random.default_rng(3).multinomial(6, np.full(6, 1 / 6), 400)
    biases = [calibrate.exact_bias(np.repeat(scores, times, axis=0)) for times in drawn]
    low, high = np.quantile(biases, (0.025, 0.975))
    assert (got.low, got.high) == pytest.approx((low, high), abs=got.step)
    # Texts that are all the same leave nothing to resample.
    same = calibrate.calibrate_texts(measure_of(scores[:1].repeat(4, axis=0)), LENGTHS, 48)
    assert same.high - same.low <= same.step


def test_long_texts_are_taken_as_they_are_and_short_ones_joined(starting):
    texts = ["apple " * 9, "table " * 12, "house " * 8]
    first = [starting.encode(text) for text in texts]
    assert model_calibration.pieces(texts, starting, 9) == first
    # Of 9 + 12 + 8 words in a row, with a start token before each piece.
    row = [token for ids in first for token in ids[1:]]
    got = model_calibration.pieces(texts, starting, 11)
    assert got == [[1, *row[0:10]], [1, *row[10:20]]]
    # No more pieces than there are shipped texts.
    assert len(model_calibration.pieces(["apple " * 100], starting, 3)) == 8
    with pytest.raises(BadInputError, match=r"two pieces of as many tokens, 30 in all.* has 29 in"):
        model_calibration.pieces(texts, starting, 16)


def test_calibration_texts_are_the_shipped_ones(monkeypatch):
    texts = model_calibration.calibration_texts()
    assert len(texts) == 8 and "1825-Adams-1" in texts
    assert all(2300 <= len(text.split()) < 2500 for text in texts.values())
    monkeypatch.setattr(model_calibration, "CALIBRATION_TEXTS_SHA256", "0" * 64)
    with pytest.raises(CorruptError, match="reinstall"):
        model_calibration.calibration_texts()
