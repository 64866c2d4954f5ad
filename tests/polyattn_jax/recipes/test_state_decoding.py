"""Decoding in constant memory equals the recipe on whole rows of scores."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model import decoder
from lm_jax.model.attention import softmax
from lm_jax.model.rope import DynamicScaling, Rope
import polyattn_jax
from polyattn_jax.recipes.decoding import constant_memory
from polyattn_jax.recipes.linear_state import linear_state
from polyattn_jax.recipes.row_maps import parse_recipe
from tests import tiny

CFG, T = tiny.GROUPED, 21
RECIPES = (
    "window:w=4",
    "window:w=3,sinks=2",
    "elu1",
    "hedgehog",
    "performer:m=10",
    "elu1:w=3,sinks=1,gamma=0.3",
    "hedgehog:w=4",
    "performer:m=10,w=3,sinks=2",
    "taylor2",
    "taylor2:b=-1.5",
    "taylor2:b=0.5,w=3,sinks=1,gamma=0.3",
    "gdn:distance=3",
    "gdn:distance=0",
)
every_recipe = pytest.mark.parametrize("text", RECIPES)
# Of float32 with sums over keys in another order, relative to the largest logit: at most T + F
# roundings of 2^-24 in each of 2 layers' sums, which norms and two MLPs pass on; 40 times that.
BOUND = 40 * 2 * (T + 12) * 2.0**-24


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Chunks of five tokens, so that texts have several, wider than some windows."""
    monkeypatch.setattr(constant_memory, "_CHUNK", 5)


@pytest.fixture(scope="module")
def params():
    """Weights under which scores are about 1, so that their squares matter."""
    params = tiny.params(CFG)
    large = {name: 25 * x if name in "qk" else x for name, x in params["blocks"]["mixer"].items()}
    return params | {"blocks": params["blocks"] | {"mixer": large}}


def tokens(rows=2, count=T):
    return np.random.default_rng(3).integers(0, CFG.vocab_size, (rows, count)).astype(np.int32)


def whole(params, tokens_BT, text, cfg=CFG):
    return np.asarray(
        tiny.forward(params, tokens_BT, cfg=cfg, attend=polyattn_jax.recipe(text)).logits
    )


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=BOUND * np.abs(expected).max())


@every_recipe
def test_a_pass_without_a_cache_is_the_recipe(text, params):
    mixer = polyattn_jax.state_mixer(text)
    out = tiny.forward(params, tokens(), cfg=CFG, mixer=mixer)
    assert_close(np.asarray(out.logits), whole(params, tokens(), text))


@every_recipe
@pytest.mark.parametrize("read", [1, 8])
def test_token_by_token_after_a_prompt_is_the_recipe(text, read, params):
    mixer = polyattn_jax.state_mixer(text)
    tokens_BT = tokens()
    cache = decoder.init_cache(CFG, 2, 1, mixer=mixer)
    step = jax.jit(lambda cache, x: lm_jax.forward(params, x, CFG, cache=cache, mixer=mixer))
    logits = []
    places = [0, *range(read, T + 1)]
    for start, end in itertools.pairwise(places):
        out = step(cache, tokens_BT[:, start:end])
        logits.append(np.asarray(out.logits))
        cache = out.cache
    assert_close(np.concatenate(logits, 1), whole(params, tokens_BT, text))


@pytest.mark.parametrize(
    "text",
    ["window:w=3,sinks=2", "elu1:w=3,sinks=1,gamma=0.3", "hedgehog", "taylor2", "gdn:distance=3"],
)
def test_prompts_of_unequal_length_are_continued_as_each_by_itself(text, params):
    """As `generate` does with a KV cache and the recipe's attend."""
    prompts = [row[:count].tolist() for row, count in zip(tokens(4), (1, 4, 7, 13), strict=True)]
    own = lm_jax.generate(
        params, prompts, CFG, mixer=polyattn_jax.state_mixer(text), max_new_tokens=9
    )
    attend = polyattn_jax.recipe(text)
    alone = [
        lm_jax.generate(params, [prompt], CFG, attend=attend, max_new_tokens=9)[0]
        for prompt in prompts
    ]
    assert own == alone


@every_recipe
def test_the_cache_has_the_counted_size_at_any_length(text):
    mixer = polyattn_jax.state_mixer(text)
    recipe = parse_recipe(text)
    sizes = set()
    for length in (1, 10_000):
        layers = decoder.init_cache(CFG, 1, length, mixer=mixer).layers
        counted = {name: part.size for name, part in layers.items()}
        # Positions and logarithms that are taken out are no keys, values or sums.
        sizes.add(sum(counted[name] for name in counted if name not in ("place", "top")))
    entry = linear_state(recipe, 0.0, CFG)
    assert entry.state is not None
    assert sizes == {CFG.num_layers * CFG.num_kv_heads * entry.state}


def test_mean_distances_of_every_layer_and_key_head(params):
    """Measured ones differ, so that a layer that read another's would be seen."""
    key_heads_LK = np.array([[0.0, 7.0], [30.0, 0.4]])
    table_LN = np.repeat(key_heads_LK, CFG.num_heads // CFG.num_kv_heads, axis=1)
    mixer = polyattn_jax.state_mixer("gdn", bias=table_LN)
    out = tiny.forward(params, tokens(), cfg=CFG, mixer=mixer)
    attend = polyattn_jax.recipe("gdn", bias=table_LN)
    assert_close(
        np.asarray(out.logits),
        np.asarray(tiny.forward(params, tokens(), cfg=CFG, attend=attend).logits),
    )


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (None, "mean distances of the heads are not known; pass them as bias"),
        (np.ones(4), r"bias has shape \(4,\); gdn has one mean distance of each head"),
        (np.ones((3, 4)), r"bias has shape \(3, 4\), and these layers are 2 of 4 heads"),
        (np.arange(8.0).reshape(2, 4), "differs in heads that read one key head"),
    ],
)
def test_mean_distances_that_do_not_fit_are_refused(bias, words, params):
    def run():
        mixer = polyattn_jax.state_mixer("gdn", bias=bias)
        return lm_jax.forward(params, tokens(), CFG, mixer=mixer)

    with pytest.raises(UsageError, match=words):
        run()


def test_features_of_great_size_do_not_overflow(params):
    """Keys a thousand times as large, whose features alone are beyond float32."""
    big = jax.tree.map(lambda x: x, params)
    big["blocks"]["mixer"] = dict(big["blocks"]["mixer"])
    big["blocks"]["mixer"]["k"] = 1e3 * big["blocks"]["mixer"]["k"]
    text = "performer:m=10,w=3"
    out = tiny.forward(big, tokens(), cfg=CFG, mixer=polyattn_jax.state_mixer(text))
    assert np.isfinite(np.asarray(out.logits)).all()
    agree = np.asarray(out.logits).argmax(-1) == whole(big, tokens(), text).argmax(-1)
    assert agree.all()


def test_a_window_beside_sliding_windows_of_the_model(params):
    cfg = dataclasses.replace(CFG, windows=(None, 4))
    text = "window:w=6,sinks=2"
    out = tiny.forward(params, tokens(), cfg=cfg, mixer=polyattn_jax.state_mixer(text))
    assert_close(np.asarray(out.logits), whole(params, tokens(), text, cfg))


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("taylor2", {"score_softcap": 20.0}, "caps its scores by a tanh, so that weights"),
        ("taylor2:b=auto_head", {}, "has a bias of each head, and the sums of all heads have one"),
        ("relu:p=2", {}, "cannot be decoded in constant memory here; name a window"),
        ("softmax", {}, "decode with its attend and a KV cache"),
        ("elu1", {"windows": (None, 4)}, "name a recipe window:w=,sinks= for it"),
        (
            "gdn:distance=3",
            {"windows": (None, 4)},
            "what leaves it cannot be taken out of a memory",
        ),
        (
            "window:w=3",
            {"rope": Rope(scaling=DynamicScaling(factor=2.0, original_length=8))},
            "rotations of this model depend on the length of the text",
        ),
    ],
)
def test_what_has_no_state_is_refused(text, changes, words, params):
    cfg = dataclasses.replace(CFG, **changes)

    def run():
        return lm_jax.forward(params, tokens(), cfg, mixer=polyattn_jax.state_mixer(text))

    with pytest.raises(UsageError, match=words):
        run()


def test_a_kernel_of_softmax_is_no_other_attend(params):
    """What `LanguageModelling` passes where no attend is named."""
    mixer = polyattn_jax.state_mixer("window:w=3")
    attend = lm_jax.fused(softmax, "kernels")
    out = tiny.forward(params, tokens(), cfg=CFG, mixer=mixer, attend=attend)
    assert_close(np.asarray(out.logits), whole(params, tokens(), "window:w=3"))


def test_float64_weights_are_read_as_well(params):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        mixer = polyattn_jax.state_mixer("elu1:w=3,sinks=1")
        out = lm_jax.forward(wide, tokens(), CFG, mixer=mixer)
    assert_close(np.asarray(out.logits), whole(params, tokens(), "elu1:w=3,sinks=1"))


def test_sites_of_scores_and_another_attend_are_refused(params):
    mixer = polyattn_jax.state_mixer("window:w=3")
    with pytest.raises(UsageError, match="forms no rows of scores"):
        lm_jax.forward(params, tokens(), CFG, mixer=mixer, record={"attn.pattern": lm_jax.keep})
    with pytest.raises(UsageError, match="has a recipe of its own"):
        lm_jax.forward(params, tokens(), CFG, mixer=mixer, attend=polyattn_jax.recipe("elu1"))
