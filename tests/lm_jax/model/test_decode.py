"""Decoding with a cache equals repeated full passes, and samples the stated distribution."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.model import decode
from lm_jax.model.mixers import ATTENTION
from lm_jax.model.sampling import InverseSampling, Sampling, filter_logits, sample
from tools import make_goldens

CASES = ["llama_gqa", "llama_mha_tied_bias", "gpt2", "neox", "gemma3", "gemma3_gqa_logit_softcap"]
CASES += ["gemma4", "gemma4_tied_kv"]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8]]
NEW = 9


@functools.cache
def model(case):
    loaded = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    return loaded.params, loaded.cfg


@functools.partial(jax.jit, static_argnames="cfg")
def next_logits(params, tokens_BT, last_B1, cfg):
    return lm_jax.forward(params, tokens_BT, cfg, logits_at=last_B1).logits[:, 0]


def greedy(params, cfg, prompt):
    """The definition: a full pass over the whole text for every token, no cache, no batch."""
    text = list(prompt)
    for _ in range(NEW):
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(text)] = text
        logits = next_logits(params, padded, np.array([[len(text) - 1]]), cfg)
        text.append(int(logits[0].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("case", CASES)
def test_greedy_with_a_cache_is_greedy_without(case):
    params, cfg = model(case)
    new_ids = lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW)
    assert new_ids == [greedy(params, cfg, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("case", ["llama_gqa", "gemma4_tied_kv"])
def test_a_cache_that_grows_continues_alike(case, monkeypatch):
    params, cfg = model(case)
    whole = lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW)
    monkeypatch.setattr(decode, "_FIRST_CACHE", 2)
    monkeypatch.setattr(decode, "_SMALL_CACHE", 0)
    assert decode._cache_lengths(3, 7, NEW, ATTENTION) == [9, 11, 15, 16]
    decode._generate.clear_cache()
    assert lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW) == whole
    decode._generate.clear_cache()


def test_prompts_of_unequal_length_are_continued_as_each_alone():
    params, cfg = model("gemma3")
    together = lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW)
    assert lm_jax.generate(params, PROMPTS[::-1], cfg, max_new_tokens=NEW) == together[::-1]
    assert lm_jax.generate(params, [PROMPTS[1]], cfg, max_new_tokens=NEW) == [together[1]]


def test_a_row_ends_after_its_stop_id():
    params, cfg = model("llama_gqa")
    free = lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW)
    stop = free[0][4]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert [len(row) for row in cut] != [len(row) for row in free]
    assert lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW, stop_id=stop) == cut
    # Every row stopped at its first token, before the loop.
    same, stop = [PROMPTS[0]] * 3, free[0][0]
    assert lm_jax.generate(params, same, cfg, max_new_tokens=NEW, stop_id=stop) == [[stop]] * 3


def test_each_row_ends_at_the_first_of_several_stop_ids():
    params, cfg = model("llama_gqa")
    free = lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW)
    stops = (free[0][3], free[1][5])

    def until(row):
        ends = [count for count, token in enumerate(row, 1) if token in stops]
        return row[: ends[0]] if ends else row

    cut = [until(row) for row in free]
    # Both ids end a row, and no row ends because another did.
    assert {row[-1] for row in cut} >= set(stops)
    assert len({len(row) for row in cut}) > 1
    for order in (stops, stops[::-1], set(stops)):
        assert lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW, stop_id=order) == cut
    assert lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW, stop_id=()) == free
    for prompt, row in zip(PROMPTS, cut, strict=True):
        streamed = decode.stream(params, prompt, cfg, mixer=ATTENTION, stop_id=stops)
        ended = row[-1] in stops
        assert [*itertools.islice(streamed, NEW)][: len(row)] == (row[:-1] if ended else row)


@pytest.mark.parametrize("case", ["gpt2", "gemma3"])
def test_prompts_padded_to_a_multiple_are_continued_alike(case):
    params, cfg = model(case)
    free = lm_jax.generate(params, PROMPTS, cfg, max_new_tokens=NEW)
    decode._generate.clear_cache()
    for prompt, row in zip(PROMPTS, free, strict=True):
        options = {"max_new_tokens": NEW, "length_step": 16}
        assert lm_jax.generate(params, [prompt], cfg, **options) == [row]
    assert decode._generate._cache_size() == 1
    # What does not fit into the context any more is not padded to the multiple.
    lm_jax.generate(params, [[1] * 30], cfg, max_new_tokens=2, length_step=64)


def test_decoding_uses_the_attend_argument():
    params, cfg = model("llama_gqa")

    def only_self(scores_BNTS):
        last = jnp.isfinite(scores_BNTS).cumsum(-1).argmax(-1)
        return jax.nn.one_hot(last, scores_BNTS.shape[-1])

    prompts = [[7, 7, 3, 8, 1, 2, 3], [3], [5, 3]]
    new_ids = lm_jax.generate(params, prompts, cfg, max_new_tokens=NEW, attend=only_self)
    # Attending to itself alone, a token's continuation depends on nothing before it.
    assert new_ids[0] == new_ids[1] == new_ids[2]
    assert new_ids != lm_jax.generate(params, prompts, cfg, max_new_tokens=NEW)


# Sampling

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.7, -3.0])


def probabilities(temperature, top_k=0, top_p=1.0):
    """Softmax of the scaled logits over the tokens that top-k and then top-p leave."""
    order = np.argsort(-LOGITS)
    kept = order[: top_k or None]
    p = scipy.special.softmax(LOGITS[kept] / temperature)
    inside = int(np.searchsorted(np.cumsum(p), top_p)) + 1
    out = np.zeros(len(LOGITS))
    out[kept[:inside]] = p[:inside] / p[:inside].sum()
    return out


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.5, "top_p": 0.85},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.8},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_filtered_logits_have_the_stated_probabilities(setting):
    filtered = filter_logits(jnp.asarray(LOGITS)[None], Sampling(**setting))
    expected = probabilities(**setting)
    # Half units of the largest logit: 8 for its rounding, division and the maximum that is taken
    # off, in the term and in the sum; then exponentials, the sum of eight terms and a division.
    units = 20 * np.abs(LOGITS).max() / setting["temperature"] + 20
    np.testing.assert_allclose(jax.nn.softmax(filtered)[0], expected, rtol=units * 2.0**-24)
    np.testing.assert_array_equal(np.isneginf(filtered[0]), expected == 0)


@pytest.mark.parametrize("cls", [Sampling, InverseSampling])
@pytest.mark.parametrize("setting", [SETTINGS[1], SETTINGS[4], SETTINGS[9]], ids=str)
def test_samples_are_distributed_as_stated(setting, cls):
    count = 20_000
    logits = jnp.tile(jnp.asarray(LOGITS), (count, 1))
    drawn = sample(jax.random.key(0), logits, cls(**setting))
    observed = np.bincount(drawn, minlength=len(LOGITS))
    expected = count * probabilities(**setting)
    assert not observed[expected == 0].any()
    likely = expected > 0
    assert scipy.stats.chisquare(observed[likely], expected[likely]).pvalue > 1e-3


def test_inversion_takes_the_token_at_the_share_of_a_random_number():
    """Against float64, in a vocabulary of several blocks, the last one not full."""
    rng, size, count = np.random.default_rng(0), 1_000, 4_000
    logits = rng.normal(0.0, 3.0, size).astype(np.float32)
    logits[rng.random(size) < 0.3] = -np.inf
    key, width = jax.random.key(2), 32
    drawn = np.asarray(sample(key, jnp.tile(logits, (count, 1)), InverseSampling(temperature=1.0)))
    assert np.isfinite(logits[drawn]).all()
    # A token's place in its block is where the two random numbers point, but for rounding.
    p = np.pad(scipy.special.softmax(logits.astype(np.float64)), (0, -size % width))
    p = p.reshape(-1, width)
    block, inside = np.divmod(drawn, width)
    for sums, at, u in (
        (np.cumsum(p.sum(1))[None].repeat(count, 0), block, jax.random.uniform(key, (2, count))[0]),
        (np.cumsum(p, 1)[block], inside, jax.random.uniform(key, (2, count))[1]),
    ):
        rows, whole = np.arange(count), sums[:, -1]
        below = np.where(at > 0, sums[rows, at - 1], 0.0)
        # A sum of 32 terms of float32.
        slack = 64 * 2.0**-24 * whole
        assert (below - slack <= np.asarray(u) * whole).all()
        assert (np.asarray(u) * whole <= sums[rows, at] + slack).all()


def test_ties_at_the_edge_are_kept():
    logits = jnp.array([[1.0, 3.0, 1.0, 1.0, 0.0]])
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.8)):
        assert np.isfinite(filter_logits(logits, sampling)[0]).tolist() == [1, 1, 1, 1, 0]


def test_a_tiny_temperature_is_greedy():
    sampling = Sampling(temperature=1e-30)
    filtered = filter_logits(1e10 * jnp.asarray(LOGITS)[None], sampling)
    np.testing.assert_array_equal(jax.nn.softmax(filtered)[0], np.eye(8)[0])


def test_generated_text_follows_the_sampling():
    params, cfg = model("gpt2")
    prompt, count = [3, 1, 4], 4000
    sampling = Sampling(temperature=1.0, top_k=6)
    rows = lm_jax.generate(
        params, [prompt] * count, cfg, max_new_tokens=2, sampling=sampling, key=jax.random.key(1)
    )
    # The second token, after the most frequent first one, comes out of the cache.
    first = np.bincount([row[0] for row in rows]).argmax()
    second = np.bincount([row[1] for row in rows if row[0] == first], minlength=cfg.vocab_size)
    padded = np.zeros((1, 16), np.int32)
    padded[0, :4] = [*prompt, first]
    logits = np.asarray(next_logits(params, padded, np.array([[3]]), cfg)[0], np.float64)
    kept = np.argsort(-logits)[:6]
    assert second.sum() == second[kept].sum()
    expected = second.sum() * scipy.special.softmax(logits[kept])
    assert scipy.stats.chisquare(second[kept], expected).pvalue > 1e-3


def test_the_key_decides_the_text():
    params, cfg = model("llama_gqa")
    sampling = Sampling(temperature=2.0)

    def text(seed, prompts=PROMPTS):
        key = jax.random.key(seed)
        return lm_jax.generate(params, prompts, cfg, max_new_tokens=NEW, sampling=sampling, key=key)

    assert text(0) == text(0)
    assert text(0) != text(1)
    # Equal prompts in one batch are drawn apart.
    rows = text(0, [PROMPTS[0]] * 3)
    assert rows[0] != rows[1] != rows[2]


def test_bfloat16_parameters_decode_as_they_run():
    loaded = lm_jax.load_pretrained(make_goldens.GOLDEN / "llama_gqa", dtype=jnp.bfloat16)
    new_ids = lm_jax.generate(loaded.params, PROMPTS[:1], loaded.cfg, max_new_tokens=3)[0]
    text = [*PROMPTS[0], *new_ids]
    padded = np.zeros((1, 16), np.int32)
    padded[0, : len(text)] = text
    for step, token in enumerate(new_ids):
        at = np.array([[len(PROMPTS[0]) - 1 + step]])
        row = np.asarray(next_logits(loaded.params, padded, at, loaded.cfg)[0])
        # Where a full pass ranks two tokens closer than bfloat16 resolves, either may be drawn.
        assert row[token] > row.max() - 2**-6 * abs(row).max()


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
    ],
)
def test_sampling_that_means_nothing(setting, word):
    with pytest.raises(UsageError, match=word):
        Sampling(**setting)


# Refusals


@pytest.mark.parametrize(
    ("prompts", "options", "error", "word"),
    [
        ([], {}, BadInputError, "at least one prompt"),
        ([[1], []], {}, BadInputError, "at least one token"),
        ([[1, 48]], {}, BadInputError, "outside 0..47"),
        ([[-1]], {}, BadInputError, "outside 0..47"),
        ([[1] * 30], {"max_new_tokens": 3}, BadInputError, "exceeds the model's context of 32"),
        ([[1]], {"max_new_tokens": 0}, UsageError, "max_new_tokens"),
        ([[1]], {"sampling": Sampling(1.0)}, UsageError, "random key"),
        ([[1]], {"stop_id": 48}, UsageError, "stop_id = 48"),
        ([[1]], {"stop_id": -1}, UsageError, "stop_id = -1"),
        ([[1]], {"stop_id": (2, 48)}, UsageError, "stop_id = 48"),
    ],
)
def test_prompts_that_cannot_be_continued(prompts, options, error, word):
    params, cfg = model("llama_gqa")
    with pytest.raises(error, match=word):
        lm_jax.generate(params, prompts, cfg, **{"max_new_tokens": 2} | options)


def test_the_whole_context_can_be_used():
    params, cfg = model("gpt2")
    new_ids = lm_jax.generate(params, [[1] * 30], cfg, max_new_tokens=2)[0]
    logits = next_logits(params, np.array([[1] * 30 + new_ids[:1]]), np.array([[30]]), cfg)
    assert new_ids[1] == int(logits[0].argmax())


def test_edits_of_a_layer_or_head_that_does_not_exist_are_refused():
    params, cfg = model("llama_gqa")
    nothing = lm_jax.Scale(jnp.zeros((1, 1, 1, 1)))
    edits = {"attn.z": lm_jax.OneLayer(cfg.num_layers, nothing)}
    for run in (
        lambda edits: lm_jax.generate(params, [[1]], cfg, max_new_tokens=1, edits=edits),
        lambda edits: next(decode.stream(params, [1], cfg, mixer=ATTENTION, edits=edits)),
    ):
        with pytest.raises(UsageError, match=f"layer = {cfg.num_layers} is outside"):
            run(edits)
        with pytest.raises(UsageError, match="head 99 of layer 0 is outside"):
            run(lm_jax.ablate("L0H99"))
