"""The loss of a transcoder, written out; scales and outliers; a step through the shared loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.train.objective import ignore_index_batch
from sparse_jax.transcoders.inputs import Scales, measure_scales, read_activations
from sparse_jax.transcoders.objective import Frozen, Penalties, Progress, Transcoding
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig, spec
from tests import rounding
from tests.sparse_jax.circuits.small_models import circuit_model

F = 12
PENALTIES = Penalties(sparsity=0.5, dead=0.25, ramp=0.5, active=2, active_start=8, silent_steps=2)


@pytest.fixture(scope="module")
def model():
    return circuit_model()


def rows(vocab=20):
    tokens_BS = np.random.default_rng(0).integers(0, vocab, (3, 7)).astype(np.int32)
    tokens_BS[1, 4:] = -1
    return jnp.asarray(tokens_BS)


def objective_of(model, kind="jumprelu", **changes):
    cfg = TranscoderConfig(model.cfg.num_layers, model.cfg.hidden_size, F, kind=kind, threshold=0.3)
    return Transcoding(cfg, PENALTIES, steps=10, **changes)


def drawn(objective):
    params = params_lib.init(jax.random.key(5), spec(objective.cfg))
    return params | {"encoder_bias": params["encoder_bias"] + 0.1}


@pytest.fixture(scope="module")
def frozen(model):
    scales = measure_scales(model, [ignore_index_batch(rows())], skip_start=1)
    return Frozen(model, scales)


def test_scales_bring_the_mean_norm_to_the_root_of_the_size(model, frozen):
    acts = read_activations(
        model, frozen.scales, ignore_index_batch(rows()), skip_start=1, outlier=np.inf
    )
    # Six inputs a row without the first, and of the second row four inputs.
    np.testing.assert_array_equal(acts.mask_X.reshape(3, 6).sum(1), [5, 3, 5])
    root = np.sqrt(model.cfg.hidden_size)
    for x_LXD in (acts.input_LXD, acts.output_LXD):
        norms = np.linalg.norm(np.asarray(x_LXD, np.float64), axis=-1)[:, np.asarray(acts.mask_X)]
        # 13 norms, each of D squares, and their mean.
        np.testing.assert_allclose(norms.mean(1), root, rtol=64 * 2.0**-24)


def test_outliers_are_left_out(model, frozen):
    batch = ignore_index_batch(rows())
    every = read_activations(model, frozen.scales, batch, skip_start=1, outlier=np.inf)
    norms_LX = np.linalg.norm(every.input_LXD, axis=-1) / np.sqrt(model.cfg.hidden_size)
    bound = np.sort(norms_LX[:, np.asarray(every.mask_X)].max(0))[-3:-1].mean()
    few = read_activations(model, frozen.scales, batch, skip_start=1, outlier=float(bound))
    np.testing.assert_array_equal(few.mask_X, every.mask_X & jnp.asarray((norms_LX < bound).all(0)))
    assert few.mask_X.sum() == every.mask_X.sum() - 2


def test_batches_without_tokens_are_refused(model):
    with pytest.raises(UsageError, match="hold no token"):
        measure_scales(model, [ignore_index_batch(jnp.full((1, 4), -1))], skip_start=1)


@pytest.mark.parametrize("updates", [0, 3, 9])
def test_the_loss_is_the_formula(model, frozen, updates):
    objective = objective_of(model)
    params, tokens_BS = drawn(objective), rows()
    acts = read_activations(
        model, frozen.scales, ignore_index_batch(tokens_BS), skip_start=1, outlier=20.0
    )
    mask = np.asarray(acts.mask_X)
    x_LXD, y_LXD = (jnp.asarray(np.asarray(a)[:, mask]) for a in (acts.input_LXD, acts.output_LXD))
    strength = 0.5 * min(updates / 5, 1.0)

    def written_out(params, x_LXD, y_LXD):
        model = Transcoder(params, objective.cfg)
        pre_LXF = model.pre_activations(x_LXD)
        theta_L1F = jnp.exp(params["log_threshold"])[:, None]
        z_LXF = jnp.where(pre_LXF > theta_L1F, pre_LXF, 0.0)
        norms_L1F = model.decoder_norms()[:, None]
        return (
            jnp.sum((model.decode(z_LXF) - y_LXD) ** 2)
            + strength * jnp.sum(jnp.tanh(4.0 * z_LXF * norms_L1F))
            + 0.25 * jnp.sum(jnp.maximum(theta_L1F - pre_LXF, 0.0) * norms_L1F)
        ) / mask.sum()

    wanted = rounding.expected(written_out, params, x_LXD, y_LXD)
    progress = Progress(jnp.int32(updates), objective.init_state().silent_LF)
    key = jax.random.key(0)
    normalizers = objective.normalizers(tokens_BS)
    assert normalizers["tokens"] == mask.sum()
    got, metrics = objective.loss_terms(params, frozen, progress, tokens_BS, normalizers, key)
    rounding.assert_within(got, wanted)
    _, columns = objective.update(progress, metrics)
    assert columns["sparsity"] == pytest.approx(strength)
    parts = _error(objective, params, x_LXD, y_LXD)
    error, size = (float((np.asarray(x, np.float64) ** 2).sum()) for x in parts)
    assert columns["nmse"] == pytest.approx(error / size, rel=1e-4)
    z_LXF = Transcoder(params, objective.cfg).encode(x_LXD)
    assert metrics["l0"] == pytest.approx(float((z_LXF > 0).sum() / mask.sum()))
    np.testing.assert_array_equal(metrics["fired_LF"], (z_LXF > 0).any(1))


def _error(objective, params, x_LXD, y_LXD):
    """Errors of the reconstruction, and what is reconstructed."""
    inner = Transcoder(params, objective.cfg)
    return inner.decode(inner.encode(x_LXD)) - y_LXD, y_LXD


def test_batchtopk_keeps_fewer_features_with_every_update(model, frozen):
    objective = objective_of(model, "batchtopk")
    params, tokens_BS = drawn(objective), rows()
    counts = []
    for updates in (0, 2, 5, 9):
        progress = Progress(jnp.int32(updates), objective.init_state().silent_LF)
        _, metrics = objective.loss_terms(
            params, frozen, progress, tokens_BS, objective.normalizers(tokens_BS), None
        )
        counts.append(round(float(metrics["l0"]) * 13))
    # 8 falls to 2 by a factor of 4 in five updates; two layers, 13 tokens. At the start all 12
    # features are positive at fewer tokens than that.
    kept = [2 * 13 * 8 * 0.25 ** min(updates / 5, 1.0) for updates in (2, 5, 9)]
    assert counts[1:] == [int(np.ceil(x - 1e-4)) for x in kept]
    assert counts[0] >= counts[1]


def aux_by_hand(objective, params, acts, silent_LF, count):
    """AuxK of the `count` largest pre-activations of dead features, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x_LXD, y_LXD = (np.asarray(a, np.float64) for a in (acts.input_LXD, acts.output_LXD))
    mask = np.asarray(acts.mask_X)
    pre_LXF = np.einsum("lxd,lfd->lxf", x_LXD, p["encoder"]) + p["encoder_bias"][:, None]

    def written(z_LXF):
        return np.stack(
            [
                np.einsum("sxf,sfd->xd", z_LXF[: layer + 1], p["decoder"][f"to_{layer}"])
                for layer in range(2)
            ]
        )

    z_LXF = np.where(pre_LXF > np.exp(p["log_threshold"])[:, None], pre_LXF, 0.0)
    left_LXD = y_LXD - written(z_LXF) - p["decoder_bias"][:, None]
    dead_LXF = np.where((silent_LF >= 2)[:, None] & mask[None, :, None], pre_LXF, 0.0)
    kept = np.sort(dead_LXF[dead_LXF > 0])[::-1][:count]
    dead_LXF = np.where(dead_LXF >= kept[-1], dead_LXF, 0.0)
    missed_LXD = (written(dead_LXF) - left_LXD)[:, mask]
    return (missed_LXD**2).sum() / mask.sum(), dead_LXF, missed_LXD


@pytest.mark.parametrize("active", [1, 12])
def test_auxk_is_the_error_that_dead_features_leave(model, frozen, active):
    plain = objective_of(model)
    changes = {"aux": 0.125, "aux_active": active}
    objective = dataclasses.replace(plain, penalties=dataclasses.replace(PENALTIES, **changes))
    params, tokens_BS = drawn(objective), rows()
    batch = ignore_index_batch(tokens_BS)
    acts = read_activations(model, frozen.scales, batch, skip_start=1, outlier=20.0)
    silent_LF = jnp.zeros((2, F), jnp.int32).at[:, 2:7].set(3)
    tokens = acts.mask_X.sum()

    def added(params, silent_LF):
        losses = [
            each.loss(params, acts, Progress(jnp.int32(0), silent_LF), tokens)[0]
            for each in (objective, plain)
        ]
        return losses[0] - losses[1]

    count = active * 2 * int(tokens)
    value, dead_LXF, missed_LXD = aux_by_hand(objective, params, acts, silent_LF, count)
    got, grads = jax.value_and_grad(added)(params, silent_LF)
    # Differences of losses about 100 times as large, of a few hundred terms each.
    assert got == pytest.approx(0.125 * value, rel=1e-4)
    # Only dead features learn from it: what is left of the outputs is a constant.
    for layer in range(2):
        wanted = np.einsum(
            "sxf,xd->sfd", dead_LXF[: layer + 1][:, np.asarray(acts.mask_X)], missed_LXD[layer]
        )
        wanted *= 2 * 0.125 / int(tokens)
        np.testing.assert_allclose(
            grads["decoder"][f"to_{layer}"], wanted, atol=1e-4 * np.abs(wanted).max()
        )
    assert not grads["decoder_bias"].any() or np.abs(grads["decoder_bias"]).max() < 1e-5
    live = np.ones(F, bool)
    live[2:7] = False
    assert np.abs(grads["encoder"][:, live]).max() < 1e-5 < np.abs(grads["encoder"]).max()
    assert added(params, jnp.zeros((2, F), jnp.int32)) == 0


@pytest.mark.parametrize(
    ("rise", "shares"),
    [("linear", [0, 0.4, 0.8, 1, 1]), ("cosine", [0, 0.3454915, 0.9045085, 1, 1])],
)
def test_the_coefficient_rises_to_its_peak_and_stays(model, rise, shares):
    # (1 - cos(2 pi / 5)) / 2 and (1 - cos(4 pi / 5)) / 2, after two and four of five updates.
    objective = dataclasses.replace(
        objective_of(model), penalties=dataclasses.replace(PENALTIES, rise=rise)
    )
    got = [float(objective._strength(jnp.int32(updates))) for updates in (0, 2, 4, 5, 9)]
    np.testing.assert_allclose(got, 0.5 * np.array(shares), atol=1e-6)


def test_a_feature_is_dead_after_silent_updates(model):
    objective = objective_of(model)
    fired_LF = jnp.zeros((2, F), jnp.int32).at[0, 3].set(1)
    state = objective.init_state()
    shares = []
    for _ in range(3):
        state, columns = objective.update(state, {"fired_LF": fired_LF, "error": 1.0, "size": 2.0})
        shares.append(float(columns["dead"]))
    assert shares == pytest.approx([0.0, 1 - 1 / (2 * F), 1 - 1 / (2 * F)])
    assert state.updates == 3 and state.silent_LF[0, 3] == 0 and state.silent_LF[1, 3] == 3


def test_an_evaluation_has_what_variance_explained_needs(model, frozen):
    objective = objective_of(model)
    params, tokens_BS = drawn(objective), rows()
    sums = objective.evaluate(params, frozen, tokens_BS)
    acts = read_activations(
        model, frozen.scales, ignore_index_batch(tokens_BS), skip_start=1, outlier=20.0
    )
    mask = np.asarray(acts.mask_X)
    y = np.asarray(acts.output_LXD, np.float64)[:, mask]
    inner = Transcoder(params, objective.cfg)
    z_LXF = inner.encode(acts.input_LXD[:, mask])
    error_L = ((np.asarray(inner.decode(z_LXF), np.float64) - y) ** 2).sum((1, 2))
    # Sums of 13 tokens x 32 squares.
    np.testing.assert_allclose(sums["error_L"], error_L, rtol=1e-5)
    centred_L = ((y - y.mean(1, keepdims=True)) ** 2).sum((1, 2))
    mean_LD = np.asarray(sums["output_LD"], np.float64) / mask.sum()
    from_sums = np.asarray(sums["square_L"], np.float64) - mask.sum() * (mean_LD**2).sum(-1)
    np.testing.assert_allclose(from_sums, centred_L, rtol=1e-5)
    np.testing.assert_array_equal(sums["active_L"], (z_LXF > 0).sum((1, 2)))
    assert sums["tokens"] == mask.sum()


def test_settings_are_checked_and_bound():
    with pytest.raises(UsageError, match=r"penalties\.ramp = 0 must be above 0"):
        Penalties(ramp=0)
    with pytest.raises(UsageError, match=r"penalties\.rise = 'line' must be one of linear, cosine"):
        Penalties(rise="line")
    with pytest.raises(UsageError, match="active_start = 3 must be at least `active`"):
        Penalties(active=4, active_start=3)
    one = Transcoding(TranscoderConfig(2, 4, 8), Penalties(), steps=3)
    other = dataclasses.replace(one, penalties=Penalties(sparsity=1.0))
    assert one.metadata() != other.metadata()
    assert isinstance(Scales.none(2), Scales)
