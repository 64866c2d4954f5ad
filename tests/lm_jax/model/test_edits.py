"""Sites, edits and records: an intervention changes its site and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.sites import HEAD_INPUT_SITES
from tests import rounding, tiny

CFG = lm_jax.DecoderConfig(
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    hidden_size=20,
    mlp_size=28,
    vocab_size=40,
    max_length=32,
    qk_norm="head_and_value",
    norm_placement="both",
    windows=(5, None, 5),
    block_end=lm_jax.BlockEnd(4),
)
PLAIN = lm_jax.DecoderConfig(
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=6,
    hidden_size=20,
    mlp_size=28,
    vocab_size=40,
    max_length=32,
)
B, T = 2, 11
PER_LAYER = [name for name, site in lm_jax.SITES.items() if site.per_layer]
PER_LAYER = [name for name in PER_LAYER if not name.startswith("mixer.")]
# Inputs of single heads replace `ln1`; `test_head_inputs.py` has them.
PER_LAYER = [name for name in PER_LAYER if name not in HEAD_INPUT_SITES]


def model(cfg, scale=4.0):
    params = tiny.params(cfg)
    # Larger weights than at initialisation, so that attention is far from uniform.
    params["blocks"] = jax.tree.map(lambda a: a * scale if a.ndim > 2 else a, params["blocks"])
    return params


def tokens(seed):
    return jax.random.randint(jax.random.key(seed), (B, T), 0, 40)


@functools.cache
def wanted():
    """Logits of `tokens(1)` in float64, and how far float32 may be off."""
    return rounding.expected(lambda p: lm_jax.forward(p, tokens(1), CFG).logits, model(CFG))


def recorded(params, tokens_BT, cfg, names):
    record = dict.fromkeys(names, lm_jax.keep)
    return jax.jit(lambda p: lm_jax.forward(p, tokens_BT, cfg, record=record))(params)


@pytest.mark.parametrize("site", ["attn.z", "attn.pattern", "mlp.out"])
def test_every_layer_patch_in_one_call_equals_a_layer_by_layer_oracle(site):
    params, clean, corrupt = model(CFG), tokens(1), tokens(2)
    value = recorded(params, clean, CFG, (site,)).records[site]
    traces = []
    head_axis = {"attn.z": 2, "attn.pattern": 1}.get(site)
    heads = CFG.num_heads if head_axis else 1

    def mask(layer, head):
        if head_axis is None:
            return jnp.arange(CFG.num_layers)[:, None, None, None] == layer
        shape = [1] * 5
        shape[head_axis + 1] = heads
        layers = jnp.arange(CFG.num_layers).reshape(-1, 1, 1, 1, 1) == layer
        return layers & (jnp.arange(heads).reshape(shape) == head)

    def grid(params, tokens_BT, value):
        traces.append(1)

        def one(layer, head):
            edits = {site: lm_jax.Replace(value, mask(layer, head))}
            return lm_jax.forward(params, tokens_BT, CFG, edits=edits).logits[:, -1]

        over_heads = jax.vmap(one, (None, 0))
        return jax.vmap(over_heads, (0, None))(jnp.arange(CFG.num_layers), jnp.arange(heads))

    result = jax.jit(grid)(params, corrupt, value)
    assert len(traces) == 1
    exact = rounding.expected(grid, params, corrupt, value)
    rounding.assert_within(result, exact)
    base = tiny.forward(params, corrupt, cfg=CFG).logits[:, -1]
    for layer in range(CFG.num_layers):
        for head in range(heads):
            # The oracle runs layers in a Python loop and writes the one slice by hand.
            oracle = oracle_patch(
                params, corrupt, site, layer, head, head_axis=head_axis, value=value[layer]
            )
            patched = rounding.Expected(*(x[layer, head] for x in exact))
            rounding.assert_within(oracle, patched)
            assert (np.abs(oracle - base) > 2 * patched.bounds).any()


@functools.partial(jax.jit, static_argnames=("site", "head_axis"))
def oracle_patch(params, tokens_BT, site, layer, head, head_axis, value):
    def write(x):
        if head_axis is None:
            return value
        index = [slice(None)] * x.ndim
        index[head_axis] = head
        return x.at[tuple(index)].set(value[tuple(index)])

    class AtLayer:
        """An edit as Python code; `unroll=True` calls it once per layer, in order."""

        def __init__(self):
            self.calls = -1

        def __call__(self, x):
            self.calls += 1
            return jnp.where(self.calls == layer, write(x), x)

    return lm_jax.forward(
        params, tokens_BT, CFG, edits={site: jax.tree_util.Partial(AtLayer())}, unroll=True
    ).logits[:, -1]


def test_null_edits_are_bitwise_no_ops():
    params, tokens_BT = model(CFG), tokens(1)
    unedited = tiny.forward(params, tokens_BT, cfg=CFG).logits
    values = recorded(params, tokens(2), CFG, tuple(PER_LAYER)).records
    none = {
        name: lm_jax.Replace(value, jnp.zeros((3,) + (1,) * (value.ndim - 1), bool))
        for name, value in values.items()
    }
    for edits in (none, {name: lm_jax.Freeze() for name in PER_LAYER}, {"attn.z": none["attn.z"]}):
        np.testing.assert_array_equal(
            tiny.forward(params, tokens_BT, cfg=CFG, edits=edits).logits, unedited
        )


def test_hooks_fire_on_every_layer():
    params, tokens_BT = model(CFG), tokens(1)
    ones = {
        name: lm_jax.Scale(jnp.ones((3,) + (1,) * len(lm_jax.SITES[name].dims)))
        for name in PER_LAYER
    }
    unedited = tiny.forward(params, tokens_BT, cfg=CFG, edits=ones).logits
    rounding.assert_within(unedited, wanted())
    for name in PER_LAYER:
        for layer in range(CFG.num_layers):
            halved = lm_jax.Scale(ones[name].value.at[layer].set(0.5))
            out = tiny.forward(params, tokens_BT, cfg=CFG, edits=ones | {name: halved}).logits
            # The last layer's output is normalised: halving the whole of it changes nothing.
            if not (name == "resid_post" and layer == CFG.num_layers - 1):
                # One program ran both.
                assert not np.array_equal(out, unedited), (name, layer)


def test_five_patches_one_trace():
    params, tokens_BT = model(CFG), tokens(1)
    value = recorded(params, tokens(2), CFG, ("attn.z",)).records["attn.z"]
    traces = []

    @jax.jit
    def patched(edits):
        traces.append(1)
        return lm_jax.forward(params, tokens_BT, CFG, edits=edits).logits

    outs = []
    for head in range(4):
        mask = jnp.zeros((3, 1, 1, 4, 1), bool).at[1, 0, 0, head].set(True)
        outs.append(patched({"attn.z": lm_jax.Replace(value, mask)}))
    outs.append(patched({"attn.z": lm_jax.Replace(2 * value, jnp.ones((3, 1, 1, 4, 1), bool))}))
    assert len(traces) == 1
    assert len({np.asarray(o).tobytes() for o in outs}) == 5


def test_frozen_patterns_and_scales_make_the_forward_linear():
    """With all but residual additions held, logits are affine in an injection: f(a) + f(b)."""
    params, tokens_BT = model(CFG), tokens(1)
    scales = [n for n in PER_LAYER if n.endswith(".scale")]
    held = [*scales, "attn.pattern", "mlp.out", "layer_input.out", "final.scale"]
    base = recorded(params, tokens_BT, CFG, (*held, "resid_pre"))

    def run(injection):
        edits = {
            name: lm_jax.Replace(
                value,
                jnp.ones((1,) * value.ndim, bool).repeat(
                    value.shape[0] if name != "final.scale" else 1, 0
                ),
            )
            for name, value in base.records.items()
            if name in held
        }
        edits["resid_pre"] = lm_jax.Add(injection)
        return lm_jax.forward(params, tokens_BT, CFG, edits=edits).logits

    def runs(a, b):
        return jax.vmap(run)(jnp.stack([jnp.zeros_like(a), a, b, 2 * a - 3 * b]))

    shape = base.records["resid_pre"].shape
    injections = [0.1 * jax.random.normal(jax.random.key(s), shape) for s in (3, 4)]
    exact = rounding.expected(runs, *injections)
    rounding.assert_within(jax.jit(runs)(*injections), exact)
    rounding.assert_within(base.logits, rounding.Expected(*(x[0] for x in exact)))
    of_a, of_b, combined = exact.values[1:] - exact.values[0]
    np.testing.assert_allclose(combined, 2 * of_a - 3 * of_b, atol=1e-12)
    assert np.abs(combined).max() > 0.1


def test_gradient_at_a_zero_add_equals_the_directional_derivative():
    """Backwards in float32 against forwards in float64."""
    params = model(PLAIN)

    def logit(value):
        edits = {"attn.z": lm_jax.Add(value)}
        return lm_jax.forward(params, tokens(1), PLAIN, edits=edits).logits[0, -1, 7]

    zero = jnp.zeros((3, B, T, 4, 6))
    step = jax.random.normal(jax.random.key(5), zero.shape)
    slope = rounding.expected(lambda: jax.jvp(logit, (zero,), (step,))[1])
    rounding.assert_within(jnp.vdot(jax.jit(jax.grad(logit))(zero), step), slope)
    assert abs(slope.values) > 100 * slope.bounds


def test_freeze_blocks_the_gradient_through_a_pattern():
    params, tokens_BT = model(PLAIN), tokens(1)

    def logit(q, freeze):
        edits = {"attn.q": lm_jax.Add(q)} | ({"attn.pattern": lm_jax.Freeze()} if freeze else {})
        return lm_jax.forward(params, tokens_BT, PLAIN, edits=edits).logits[:, -1].sum()

    zero = jnp.zeros((3, B, T, 4, 6))
    slope = jax.jit(jax.grad(logit), static_argnums=1)
    assert np.abs(slope(zero, False)).max() > 1e-4
    np.testing.assert_array_equal(slope(zero, True), 0.0)


def test_recording_everything_and_dropping_it_costs_no_memory():
    params, tokens_BT = model(PLAIN), jnp.zeros((4, 128), jnp.int32)
    absent = ("post.scale", "_norm", "layer_input")
    names = [n for n in PER_LAYER if not any(part in n for part in absent)]

    def memory(record, keep):
        def run(params, tokens_BT):
            out = lm_jax.forward(params, tokens_BT, PLAIN, record=record)
            return (out.logits, out.records) if keep else out.logits

        stats = jax.jit(run).lower(params, tokens_BT).compile().memory_analysis()
        return stats.temp_size_in_bytes + stats.output_size_in_bytes

    everything = dict.fromkeys(names, lm_jax.keep)
    assert memory(everything, keep=False) == memory({}, keep=False)
    assert memory(everything, keep=True) > 2 * memory({}, keep=False)


def test_a_reducer_stores_only_what_it_returns():
    params, tokens_BT = model(PLAIN), tokens(1)
    reducers = {"attn.pattern": lambda a: a[:, :, -1].max(-1), "resid_post": lambda x: x[:, -1]}
    out = lm_jax.forward(params, tokens_BT, PLAIN, record=reducers)
    whole = recorded(params, tokens_BT, PLAIN, ("attn.pattern", "resid_post")).records
    np.testing.assert_array_equal(
        out.records["attn.pattern"], whole["attn.pattern"][:, :, :, -1].max(-1)
    )
    np.testing.assert_array_equal(out.records["resid_post"], whole["resid_post"][:, :, -1])


def test_masked_keys_stay_masked_whatever_the_edit():
    params, tokens_BT = model(CFG), tokens(1)
    edits = {"attn.scores": lm_jax.Add(jnp.full((3, 1, 1, 1, 1), 1e4))}

    def run():
        record = {"attn.pattern": lm_jax.keep}
        out = lm_jax.forward(params, tokens_BT, CFG, edits=edits, record=record)
        return out.logits, out.records["attn.pattern"]

    (logits, pattern), exact = jax.jit(run)(), rounding.expected(run)
    rounding.assert_within((logits, pattern), exact)
    np.testing.assert_allclose(exact.values[0], wanted().values, atol=1e-9)
    age = np.arange(T)[:, None] - np.arange(T)[None]
    assert (np.asarray(pattern)[:, :, :, age < 0] == 0).all()
    assert (np.asarray(pattern)[0][:, :, age >= 5] == 0).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"record": {"attn.score": lm_jax.keep}}, "did you mean 'attn.scores'"),
        ({"edits": {"resid": lm_jax.Freeze()}}, "no site 'resid'"),
        ({"record": {"mixer.read": lm_jax.keep}}, "this model has no site 'mixer.read'"),
        ({"record": {"ln1_post.scale": lm_jax.keep}}, "this model has no site 'ln1_post.scale'"),
        ({"edits": {"attn.z": lm_jax.Add(jnp.zeros((3, 6)))}}, "expected 5 axes LBTNH"),
        ({"edits": {"attn.z": lm_jax.Add(jnp.zeros((1, 1, 1, 4, 6)))}}, "first axis L must be 3"),
        ({"edits": {"attn.z": lm_jax.Add(jnp.zeros((3, 1, 1, 5, 6)))}}, "N = 5; expected 1 or 4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kwargs, message):
    with pytest.raises(UsageError, match=message):
        lm_jax.forward(model(PLAIN), tokens(1), PLAIN, **kwargs)


def test_parallel_blocks_have_no_resid_mid():
    import dataclasses

    cfg = dataclasses.replace(PLAIN, parallel_residual=True)
    with pytest.raises(UsageError, match="no site 'resid_mid'"):
        lm_jax.forward(model(cfg), tokens(1), cfg, edits={"resid_mid": lm_jax.Freeze()})


def test_fused_path_equals_softmax_and_refuses_score_sites():
    params, tokens_BT = model(CFG), tokens(1)
    fused = lm_jax.fused(lm_jax.softmax, "xla")
    out = tiny.forward(params, tokens_BT, cfg=CFG, attend=fused).logits
    rounding.assert_within(out, wanted())
    for touch in (
        {"record": {"attn.pattern": lm_jax.keep}},
        {"edits": {"attn.scores": lm_jax.Freeze()}},
    ):
        with pytest.raises(UsageError, match="forms no scores"):
            lm_jax.forward(params, tokens_BT, CFG, attend=fused, **touch)
    with pytest.raises(UsageError, match="did you mean 'xla'"):
        lm_jax.fused(lm_jax.softmax, "xlla")


def test_attend_with_data_of_its_own_per_layer_and_head():
    params, tokens_BT = model(PLAIN), tokens(1)

    def uniform_where(scores_BNTS, heads_N):
        allowed = ~jnp.isneginf(scores_BNTS)
        uniform = allowed / allowed.sum(-1, keepdims=True)
        pattern = jnp.where(heads_N[None, :, None, None], uniform, lm_jax.softmax(scores_BNTS))
        return pattern, {"replaced": heads_N.sum()}

    @functools.partial(jax.jit)
    def run(heads_LN):
        attend = lm_jax.PerLayer(uniform_where, heads_LN)
        return lm_jax.forward(params, tokens_BT, PLAIN, attend=attend)

    none = jnp.zeros((3, 4), bool)
    np.testing.assert_array_equal(
        run(none).logits, tiny.forward(params, tokens_BT, cfg=PLAIN).logits
    )
    outs = {}
    for layer in range(3):
        for head in range(4):
            out = run(none.at[layer, head].set(True))
            np.testing.assert_array_equal(out.aux["replaced"], np.eye(3, dtype=int)[layer])
            outs[layer, head] = np.asarray(out.logits).tobytes()
    assert len(set(outs.values())) == 12
    assert run._cache_size() == 1
