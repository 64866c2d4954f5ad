"""Features of whole prompts against their definition in float64; thresholds of the types."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from polyattn_jax import suites
from polyattn_jax.audit import head_types, measure
from polyattn_jax.recipes.head_probe import HeadProbe
from tests import rounding, tiny

L, N, B, T = 2, 4, 2, 71
CFG = lm_jax.DecoderConfig(
    num_layers=L,
    num_heads=N,
    num_kv_heads=2,
    head_dim=6,
    hidden_size=20,
    mlp_size=28,
    vocab_size=40,
    max_length=96,
    windows=(None, 9),
)
LENGTHS = np.array([T, 50])


def inputs():
    """Tokens with repeats, what followed their earlier occurrence, which queries are valid."""
    tokens_BT = np.random.default_rng(0).integers(0, 40, (B, T)).astype(np.int32)
    valid_BT = np.arange(T) < LENGTHS[:, None]
    found_BT = np.stack([head_types.successors(row) for row in tokens_BT])
    return tokens_BT, np.where(valid_BT, found_BT, -1).astype(np.int32), valid_BT


def test_successors_point_behind_the_latest_earlier_occurrence():
    np.testing.assert_array_equal(head_types.successors([5, 7, 5, 5, 7, 9]), [-1, -1, 1, 3, 2, -1])
    # In an induction prompt the last query's is the answer that was planted.
    for prompt in suites.induction(vocabulary=97, length=40, n=3).prompts:
        assert head_types.successors(prompt.tokens)[-1] == prompt.answer_position


def test_sums_of_synthetic_patterns_follow_the_definition():
    _, successors_BT, valid_BT = inputs()
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((B, N, T, T)).astype(np.float32) * 3
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    probe = HeadProbe(jnp.asarray(successors_BT), jnp.asarray(valid_BT))
    _, sums = probe(jnp.asarray(scores))
    z = scores.astype(np.float64)
    w = np.exp(z - z.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)
    for b, n in np.ndindex(B, N):
        rows = w[b, n, : LENGTHS[b]]
        t = np.arange(LENGTHS[b])
        planted = successors_BT[b, : LENGTHS[b]]
        known = planted >= 0
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(rows * np.log(rows))
        want = {
            "sink": rows[:, 0].sum(),
            "induction": rows[t[known], planted[known]].sum(),
            "distance": (t - rows.argmax(-1)).sum(),
            "entropy": entropy,
        }
        # Weights with 40 + T roundings each, logarithms with as many, and a sum over T rows.
        bound = (3 * T + 100) * 2.0**-24
        for name, value in want.items():
            np.testing.assert_allclose(sums[name][b, n], value, rtol=bound, atol=bound * T)


@pytest.mark.parametrize("fused", [False, True])
def test_features_of_a_model_match_float64(fused):
    params = tiny.params(CFG)
    params |= {"blocks": jax.tree.map(lambda a: a * 6 if a.ndim > 2 else a, params["blocks"])}
    arrays = map(jnp.asarray, inputs())

    def features(*arguments, fused=False):
        return measure.head_features(params, *arguments, cfg=CFG, fused=fused)

    arrays = tuple(arrays)
    wanted = rounding.expected(lambda: features(*arrays))
    rounding.assert_within(features(*arrays, fused=fused), wanted)


@pytest.mark.parametrize(
    ("sink", "induction", "distance", "kind"),
    [
        (0.31, 0.9, 1.0, "sink"),
        (0.3, 0.9, 1.0, "induction"),
        (0.3, 0.51, 1.0, "induction"),
        (0.3, 0.5, 1.0, "diffuse"),
        (0.0, 0.09, 7.99, "local"),
        (0.0, 0.1, 7.99, "diffuse"),
        (0.0, 0.09, 8.0, "diffuse"),
        (0.31, 0.0, 1.0, "sink"),
    ],
)
def test_types_by_their_thresholds_in_the_paper_s_order(sink, induction, distance, kind):
    features = {"sink": sink, "induction": induction, "distance": distance}
    assert head_types.head_type(features) == kind


def test_heads_of_an_audit_are_averages_over_whole_prompts(audited, tiny):
    model = lm_jax.load_pretrained(str(tiny))
    suite = suites.induction(
        vocabulary=model.tokenizer, length=64, n=4, seed=0, max_length=model.cfg.max_length
    )
    tokens_BT = jnp.asarray([prompt.tokens for prompt in suite.prompts])
    planted_BT = np.stack([head_types.successors(p.tokens) for p in suite.prompts])
    known_BT = jnp.asarray(planted_BT >= 0)

    def averages():
        record = {"attn.pattern": lm_jax.keep}
        out = lm_jax.forward(model.params, tokens_BT, model.cfg, record=record)
        pattern_LBNTS = out.records["attn.pattern"]
        at_LBNT1 = jnp.maximum(jnp.asarray(planted_BT), 0)[None, :, None, :, None]
        on_planted = jnp.take_along_axis(pattern_LBNTS, at_LBNT1, axis=-1)[..., 0]
        on_planted = jnp.where(known_BT[None, :, None], on_planted, 0.0).sum(-1)
        induction = on_planted / known_BT.sum(-1)[None, :, None]
        return {"sink": pattern_LBNTS[..., 0].mean((1, 3)), "induction": induction.mean(1)}

    heads = pq.read_table(audited / "heads.parquet").to_pylist()
    heads.sort(key=lambda head: (head["layer"], head["head"]))
    results = {
        name: np.reshape([head[name] for head in heads], (model.cfg.num_layers, -1))
        for name in ("sink", "induction")
    }
    rounding.assert_within(results, rounding.expected(averages))
    for head in heads:
        assert head["prompts"] == 4
        assert head["type"] == head_types.head_type(head)
