"""Real pretrained weights: our logits equal torch's, and our weights those of the file."""

import dataclasses
import functools
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.rounding import error_bound
import lm_jax
from lm_jax.text.gguf_reader import open_gguf
from lm_jax.weights import load
from tools import make_goldens

REAL = {
    "smollm2": pytest.param("smollm2", marks=pytest.mark.real("smollm2")),
    "gemma3_270m": pytest.param(
        "gemma3_270m", marks=[pytest.mark.real("gemma3_270m"), pytest.mark.slow]
    ),
}


@functools.lru_cache(maxsize=1)
def model(name):
    return lm_jax.load_pretrained(name)


@functools.partial(jax.jit, static_argnums=0)
def run(cfg, params, tokens_BT):
    out = lm_jax.forward(params, tokens_BT, cfg, record={"resid_post": lm_jax.keep})
    return out.records["resid_post"], out.logits


def mean_loss(cfg, params, ids):
    """Nats per token of a text, after its first token."""
    log_probs = jax.nn.log_softmax(run(cfg, params, jnp.array([ids]))[1][0, :-1])
    return -float(np.take_along_axis(np.asarray(log_probs), np.array(ids[1:])[:, None], 1).mean())


@functools.partial(jax.jit, static_argnums=0)
def logits_at(cfg, params, ids, positions):
    out = lm_jax.forward(params, ids[None], cfg, logits_at=positions[None])
    return out.logits[0]


MOVE = 2.0**-12


def moved(params, seed):
    """Every weight larger or smaller by `MOVE` of itself, at random."""
    rng = np.random.default_rng(seed)

    def of(weight):
        signs = np.unpackbits(np.frombuffer(rng.bytes(-(-weight.size // 8)), np.uint8))
        move = np.array([1 - MOVE, 1 + MOVE], np.float32)[signs[: weight.size]]
        return np.asarray(weight) * move.reshape(weight.shape)

    return jax.tree.map(of, params)


def rounding_of_logits(cfg, params, ids, positions):
    """How far rounding may move the logits of each position, `[position, 1]`.

    A product of n terms is, in float32, one of weights that are each off by about sqrt(n) u (Higham
    and Mary, 2019), and logits are linear in so small a change. `rounding.expected` is a hundred
    times too wide here: through thirty layers it follows sizes alone, and no error takes another
    back.
    """
    before = logits_at(cfg, params, ids, positions)
    changes = [
        np.abs(logits_at(cfg, moved(params, seed), ids, positions) - before) for seed in range(4)
    ]
    n = max(cfg.mlp_size, cfg.hidden_size, cfg.num_heads * cfg.head_dim)
    return np.sqrt(n) * 2.0**-24 / MOVE * np.max(changes, axis=(0, 2))[:, None]


@pytest.mark.long
@pytest.mark.real("smollm2")
def test_golden_logits_of_smollm2():
    """Ours and torch's are each those of float64, within the rounding errors of this model."""
    golden = json.loads((make_goldens.GOLDEN / "smollm2_real.json").read_text())
    loaded = model("smollm2")
    assert loaded.sha256 == golden["weights_sha256"]
    ids = loaded.tokenizer.encode(golden["text"])
    assert ids == golden["ids"]
    positions = np.array([row["position"] % len(ids) for row in golden["rows"]])
    inputs = loaded.params, jnp.array(ids), jnp.array(positions)
    run = functools.partial(logits_at, loaded.cfg)
    exact, _ = error_bound.value_and_error(run, *inputs)
    bound = rounding_of_logits(loaded.cfg, *inputs)
    ours = np.asarray(run(*inputs))
    assert (np.abs(ours - exact) <= bound).all()
    top_ids = np.array([row["top_ids"] for row in golden["rows"]])
    np.testing.assert_array_equal(np.argsort(-ours, axis=1)[:, :5], top_ids)
    torch_s = np.array([row["logits"] for row in golden["rows"]])
    # Written with five decimals.
    off = np.abs(torch_s - np.take_along_axis(exact, top_ids, 1))
    assert (off <= bound + 0.5e-5).all()


@pytest.mark.torch
@pytest.mark.parametrize("name", REAL.values())
def test_every_layer_and_the_logits_are_those_of_torch(name):
    loaded = model(name)
    tokens_BT = np.array([loaded.tokenizer.encode(make_goldens.TEXT)])
    reference = make_goldens.real_reference(loaded)
    hidden, logits = make_goldens.hidden_and_logits(reference, tokens_BT)
    ours_hidden, ours_logits = run(loaded.cfg, loaded.params, tokens_BT)
    # Some coordinates of these models are thousands of times the rest; the error of a position is
    # therefore taken over its whole vector. A layer may cancel what an earlier one wrote: rounding
    # is then of the size of the largest residual so far. At one position of SmolLM2 a single neuron
    # writes a residual of norm 642, of which 115 are left. XLA's product on a CPU adds the 1,536
    # neurons one after another, each sum rounded at the size of that one: off by 1.6e-6, where sums
    # of blocks are off by 7e-8.
    norm_LBT = np.linalg.norm(hidden, axis=-1)
    largest_LBT = np.maximum.accumulate(norm_LBT, axis=0)
    assert (np.linalg.norm(ours_hidden - hidden, axis=-1) / largest_LBT).max() < 1e-5
    cancelled_BT1 = (largest_LBT / norm_LBT).max(0)[..., None]
    assert np.median(cancelled_BT1) < 1.5
    np.testing.assert_array_less(
        np.abs(ours_logits - logits), 1e-4 * cancelled_BT1 + 1e-5 * np.abs(logits)
    )


def stored_by_hand(tensor):
    """Q4_1 and Q8_0 by their definition: blocks of 32 weights, a float16 step, Q4_1 an offset."""
    if tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0:
        blocks = np.asarray(tensor.data).reshape(-1, 34)
        step = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return step * blocks[:, 2:].view(np.int8)
    blocks = np.asarray(tensor.data).reshape(-1, 20)
    step, offset = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    # Low halves of the 16 bytes are the first 16 weights, high halves the last.
    return step * np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1) + offset


@pytest.mark.real("smollm2")
def test_the_weights_are_the_blocks_of_the_file():
    params, cfg = model("smollm2").params, model("smollm2").cfg
    D, H = cfg.hidden_size, cfg.head_dim
    tensors = {t.name: t for t in open_gguf(load.resolve("smollm2")).tensors}

    def stored(name):
        return stored_by_hand(tensors[name]).reshape(-1, tensors[name].shape[0])

    np.testing.assert_array_equal(params["embed"]["tokens"], stored("token_embd.weight"))
    block = jax.tree.map(lambda a: np.asarray(a[17]), params["blocks"])
    np.testing.assert_array_equal(block["mlp"]["down"].T, stored("blk.17.ffn_down.weight"))
    np.testing.assert_array_equal(
        block["mixer"]["o"].reshape(-1, D).T, stored("blk.17.attn_output.weight")
    )
    # Coordinate i of the first half of a head is at 2 i, its partner in rotation at 2 i + 1.
    order = np.concatenate([np.arange(0, H, 2), np.arange(1, H, 2)])
    for name, heads in (("q", cfg.num_heads), ("k", cfg.num_kv_heads)):
        rows_NHD = stored(f"blk.17.attn_{name}.weight").reshape(heads, H, D)[:, order]
        np.testing.assert_array_equal(block["mixer"][name].transpose(1, 2, 0), rows_NHD)
    assert tensors["blk.17.attn_v.weight"].tensor_type == gguf.GGMLQuantizationType.Q4_1


def interleaved(w_LDNH):
    """The other convention about q and k: halves of a head as neighbouring pairs."""
    shape = w_LDNH.shape
    return w_LDNH.reshape(*shape[:-1], 2, shape[-1] // 2).swapaxes(-1, -2).reshape(shape)


@pytest.mark.parametrize("name", REAL.values())
def test_the_conventions_of_the_file_are_the_ones_that_predict_text(name):
    cfg, params = model(name).cfg, model(name).params
    ids = model(name).tokenizer.encode(make_goldens.TEXT)
    loss = mean_loss(cfg, params, ids)
    assert loss < 3.2

    def worse(change=lambda path, leaf: leaf, **fields):
        leaves = lm_jax.params.by_path(params)
        changed = lm_jax.params.tree_from_paths({n: change(n, leaves[n]) for n in leaves})
        return mean_loss(dataclasses.replace(cfg, **fields), changed, ids) - loss

    turned = ("blocks/mixer/q", "blocks/mixer/k")
    assert worse(lambda path, w: interleaved(w) if path in turned else w) > 1.0
    if cfg.family != "gemma3_text":
        return
    assert worse(lambda path, w: w + 1 if path.endswith("scale") else w) > 5.0
    assert worse(local_rope=cfg.rope) > 0.1
    # The text is shorter than the window, so this moves which layers turn by the local base.
    assert worse(windows=cfg.windows[3:] + cfg.windows[:3]) > 0.03
