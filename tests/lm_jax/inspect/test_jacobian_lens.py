"""The Jacobian lens against its definition, entry by entry, and what it reads of streams."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.inspect import jacobian_lens
from lm_jax.inspect.jacobian_lens import Sums
from lm_jax.model.layers import unembedding
from protot_jax import build_model
from tests import tiny

CFG = dataclasses.replace(tiny.GROUPED, num_layers=3)
D, T, SKIPPED = CFG.hidden_size, 9, 2


@dataclasses.dataclass(frozen=True)
class Model:
    params: dict
    cfg: lm_jax.DecoderConfig


@pytest.fixture(scope="module")
def model():
    """Weights large enough that attention and MLPs matter."""
    params = tiny.params(CFG)
    blocks = jax.tree.map(lambda x: 12 * x if x.ndim > 2 else x, params["blocks"])
    return Model(params | {"blocks": blocks}, CFG)


def prompts(count, length=T, seed=0):
    return np.random.default_rng(seed).integers(0, CFG.vocab_size, (count, length)).tolist()


def by_definition(model, ids, mixer=None):
    """J of one prompt `[S, D, D]`: every derivative of every pair of tokens, summed by hand."""
    tokens = jnp.asarray([ids], jnp.int32)
    options = {} if mixer is None else {"mixer": mixer}
    L, length = model.cfg.num_layers, len(ids)

    def last(offset_LTD):
        edits = {"resid_post": lm_jax.Add(offset_LTD[:, None])}
        record = {"final_input": lm_jax.keep}
        run = lm_jax.forward(model.params, tokens, model.cfg, edits=edits, record=record, **options)
        return run.records["final_input"][0]

    zero = jnp.zeros((L, length, model.cfg.hidden_size))
    # Output token and coordinate, then layer, token and coordinate of the input.
    jacobian = np.asarray(jax.jacrev(last)(zero), np.float64)
    inside = range(SKIPPED, length - 1)
    sums = [
        sum(jacobian[after, :, layer, before] for before in inside for after in inside)
        for layer in range(L - 1)
    ]
    return np.stack(sums) / len(inside)


def test_a_prompt_of_all_rows_gives_the_definition(model):
    (ids,) = prompts(1)
    lens = jacobian_lens.fit(model, [ids], length=T, rows=D, skipped=SKIPPED)
    wanted = by_definition(model, ids)
    np.testing.assert_allclose(lens.matrix_SDD, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    # Blocks do something, and not the same.
    assert np.linalg.norm(wanted[0] - np.eye(D)) > 2 * np.linalg.norm(wanted[1] - np.eye(D)) > 0.1
    assert (lens.prompts, lens.layers, lens.rows) == (1, 3, D) and np.isnan(lens.spread_S).all()


def test_rows_in_turn_are_means_over_the_prompts_that_gave_them(model):
    """Padding, a row behind, and prompts that are too short change nothing."""
    k, some = 7, prompts(7)
    some[3] = some[3][:6]
    too_short = [some[0][: SKIPPED + 1]]
    lens = jacobian_lens.fit(model, too_short + some, length=T, rows=k, skipped=SKIPPED)
    each = [by_definition(model, ids) for ids in some]
    total, visits = np.zeros_like(each[0]), np.zeros(D)
    for p, jacobian in enumerate(each):
        for row in (p * k + np.arange(k)) % D:
            total[:, row] += jacobian[:, row]
            visits[row] += 1
    assert visits.min() >= 2
    wanted = total / visits[None, :, None]
    np.testing.assert_allclose(lens.matrix_SDD, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    assert lens.prompts == 7 and (lens.spread_S > 0).all() and (lens.spread_S < 1).all()


def test_the_spread_is_the_relative_standard_error_of_the_mean(model):
    """On many draws of independent numbers: what the halves say is how far the mean is off."""
    rng, prompts_of_a_row, truth = np.random.default_rng(0), 10, 3.0
    said, was = [], []
    for _ in range(20):
        sums = Sums.empty(CFG)
        for _ in range(prompts_of_a_row):
            value = truth + rng.standard_normal((D, 2, D))
            sums.add(sums.rows(D), value.astype(np.float32))
        lens = sums.lens(rows=D, skipped=0)
        said.append(lens.spread_S)
        was.append(np.linalg.norm(lens.matrix_SDD - truth, axis=(1, 2)) / (truth * D))
    assert np.mean(said) == pytest.approx(np.mean(was), rel=0.05)


def test_a_fit_goes_on_from_what_was_kept(model):
    some, kept = prompts(6), []
    options = {"length": T, "rows": D // 2, "skipped": SKIPPED}
    whole = jacobian_lens.fit(model, some, **options)

    class Stopped(Exception):
        pass

    def stop_after_three(sums):
        kept.append(Sums(sums.total_2SDD.copy(), sums.visits_D.copy(), sums.prompts))
        if sums.prompts == 3:
            raise Stopped

    with pytest.raises(Stopped):
        jacobian_lens.fit(model, some, after=stop_after_three, **options)
    again = jacobian_lens.fit(model, some, sums=kept[-1], **options)
    np.testing.assert_array_equal(again.matrix_SDD, whole.matrix_SDD)


def test_prototypes_have_a_lens_too():
    cfg, mixer = build_model(
        "protot",
        hidden_size=16,
        num_layers=2,
        vocab_size=30,
        context=16,
        num_prototypes=3,
        tie_embeddings=True,
    )
    params = lm_jax.init_params(jax.random.key(1), cfg, mixer=mixer)
    own = Model(jax.tree.map(lambda x: 6 * x if x.ndim > 2 else x, params), cfg)
    ids = np.random.default_rng(0).integers(0, 30, T).tolist()
    lens = jacobian_lens.fit(own, [ids], length=T, rows=16, skipped=SKIPPED, mixer=mixer)
    wanted = by_definition(own, ids, mixer)
    np.testing.assert_allclose(lens.matrix_SDD, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_a_model_whose_last_block_is_linear_is_read_exactly():
    """Without attention and MLPs a stream is what it will be: the lens is the logit lens."""
    params = tiny.params(CFG)
    blocks = jax.tree.map(jnp.zeros_like, params["blocks"])
    still = Model(params | {"blocks": blocks | {"ln1": params["blocks"]["ln1"]}}, CFG)
    lens = jacobian_lens.fit(still, prompts(1), length=T, rows=D, skipped=SKIPPED)
    np.testing.assert_allclose(lens.matrix_SDD, np.tile(np.eye(D), (2, 1, 1)), atol=1e-6)
    h_BTD = jax.random.normal(jax.random.key(0), (1, 2, D))
    wanted = lm_jax.logit_lens(still.params, h_BTD, CFG)
    for layer in range(3):
        np.testing.assert_allclose(
            lens.logits(still.params, CFG, h_BTD, layer), wanted, atol=1e-5 * np.abs(wanted).max()
        )


def test_a_direction_says_its_token(model):
    """The product of a stream with it is the token's logit before the last norm."""
    lens = jacobian_lens.fit(model, prompts(1), length=T, rows=D, skipped=SKIPPED)
    h_D = jax.random.normal(jax.random.key(0), (D,))
    for layer in range(3):
        direction_D = lens.direction(model.params, CFG, 5, layer)
        moved_D = lens.transport(h_D, layer)
        said = float(moved_D @ unembedding(model.params, CFG)[5])
        assert float(h_D @ direction_D) == pytest.approx(said, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 3}, r"length = 3 must be 4 \(two more than skipped\) to 32"),
        ({"length": 99}, "length = 99 must be 4"),
        ({"rows": 0}, "rows = 0 must be 1 to 20"),
        ({"rows": 3}, "2 prompts of 3 rows each gave 6 of 20 rows; give at least 7 prompts"),
    ],
)
def test_settings_that_give_no_lens_are_named(model, options, said):
    with pytest.raises(UsageError, match=said):
        jacobian_lens.fit(
            model, prompts(2), **({"length": T, "rows": D, "skipped": SKIPPED} | options)
        )


def test_other_streams_and_layers_are_refused(model):
    lens = jacobian_lens.fit(model, prompts(1), length=T, rows=D, skipped=SKIPPED)
    with pytest.raises(UsageError, match="of width 20, and the stream has 7"):
        lens.transport(jnp.zeros(7), 0)
    with pytest.raises(UsageError, match=r"layer = 3 is outside 0\.\.2"):
        lens.direction(model.params, CFG, 0, 3)
