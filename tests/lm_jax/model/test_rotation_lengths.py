"""Rotations that depend on how many tokens a row has: LongRoPE and dynamic NTK."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model import decode, layers
from lm_jax.model.mixers import ATTENTION
from tests import rounding, tiny

FIRST = 6
SCALINGS = {
    "longrope": lm_jax.LongRopeScaling((1.0, 1.5, 2.0), (4.0, 7.0, 9.0), FIRST, 1.3),
    "dynamic": lm_jax.DynamicScaling(40.0, FIRST),
}
U = 2.0**-24
BOTH = pytest.mark.parametrize("kind", SCALINGS)


def config(kind, **changes):
    rope = lm_jax.Rope(theta=10.0, scaling=SCALINGS[kind])
    return tiny.decoder(head_dim=6, max_length=16, rope=rope, **changes)


@functools.cache
def model(cfg):
    """Weights whose attention is sharp enough for every key's rotation to count."""
    # Other weights may continue a text alike with wrong rotations (tests/mistakes.toml).
    params = lm_jax.init_params(jax.random.key(3), cfg)
    mixer = params["blocks"]["mixer"]
    sharp = mixer | {name: 12 * mixer[name] for name in ("q", "k")} | {"v": 8 * mixer["v"]}
    return params | {"blocks": params["blocks"] | {"mixer": sharp}}


def text(length, cfg):
    ids = np.random.default_rng(length).integers(0, cfg.vocab_size, length)
    return ids.tolist()


@functools.cache
def greedy(cfg, prompt, count):
    """The continuation by passes over the whole text so far, of this row alone."""
    ids = list(prompt)
    for _ in range(count):
        logits_BTV = tiny.forward(model(cfg), jnp.array([ids]), cfg=cfg).logits
        ids.append(int(logits_BTV[0, -1].argmax()))
    return ids[len(prompt) :]


@BOTH
def test_tables_go_by_the_tokens_of_each_row_or_document(kind):
    rope, counts = lm_jax.Rope(theta=100.0, scaling=SCALINGS[kind]), (FIRST - 1, FIRST, FIRST + 1)
    positions_BT = jnp.arange(9)[None]
    by_row = layers.RowLengths(jnp.array(counts)[:, None], 9)
    by_position = layers.RowLengths(jnp.array([[7, 7, 7, 7, 7, 7, 7, 2, 2]]), 9)
    got = layers.rope_tables(rope, 6, jnp.broadcast_to(positions_BT, (3, 9)), by_row)
    mixed = layers.rope_tables(rope, 6, positions_BT, by_position)
    for row, count in enumerate(counts):
        for pair in range(3):
            freq, scale = 100.0 ** (-2 * pair / 6), 1.0
            if kind == "longrope":
                factors = SCALINGS[kind].long_factor, SCALINGS[kind].short_factor
                freq, scale = freq / factors[count <= FIRST][pair], 1.3
            elif count > FIRST:
                base = 100.0 * (40.0 * count / FIRST - 39.0) ** (6 / 4)
                freq = base ** (-2 * pair / 6)
            angle = np.arange(9) * freq
            # A frequency and an angle are rounded, then a cosine and, perhaps, its product.
            bound = scale * (2.1 * U * angle + 4 * U)
            for table, of in zip(got, (np.cos, np.sin), strict=True):
                assert (np.abs(table[row, :, pair] - scale * of(angle)) <= bound).all()
    for table, of_rows in zip(mixed, got, strict=True):
        np.testing.assert_array_equal(table[0, :7], of_rows[2, :7])
        np.testing.assert_array_equal(table[0, 7:], of_rows[0, 7:])


@BOTH
def test_rows_of_a_padded_batch_are_read_as_alone(kind):
    cfg = config(kind)
    counts = (FIRST - 1, FIRST, FIRST + 1)
    tokens_BT, lengths_B = decode.pad_prompts([text(n, cfg) for n in counts], cfg)
    valid_BT = np.arange(FIRST + 1)[None] < lengths_B[:, None]
    padded = tiny.forward(model(cfg), tokens_BT, cfg=cfg, valid_BT=valid_BT).logits
    for row, count in enumerate(counts):

        def alone(params, row=row, count=count):
            return lm_jax.forward(params, tokens_BT[row : row + 1, :count], cfg).logits[0]

        rounding.assert_within(padded[row, :count], rounding.expected(alone, model(cfg)))


@BOTH
def test_joined_documents_are_rotated_as_alone(kind):
    cfg = config(kind)
    parts = [text(n, cfg) for n in (FIRST + 1, FIRST - 1)]
    document_BT = np.repeat([0, 1], [FIRST + 1, FIRST - 1])[None]

    def in_one_row(params):
        tokens_BT = jnp.array([[*parts[0], *parts[1]]])
        return lm_jax.forward(params, tokens_BT, cfg, document_BT=document_BT).logits[0]

    def alone(params):
        rows = [lm_jax.forward(params, jnp.array([part]), cfg).logits[0] for part in parts]
        return jnp.concatenate(rows)

    # Positions go on, so that angles are larger and so are their rounding errors.
    wanted = rounding.expected(alone, model(cfg))._replace(
        bounds=rounding.expected(in_one_row, model(cfg)).bounds
    )
    rounding.assert_within(jax.jit(in_one_row)(model(cfg)), wanted)


@BOTH
def test_generation_is_that_of_whole_texts_row_by_row(kind):
    cfg = config(kind)
    prompts = [text(n, cfg) for n in (FIRST - 1, FIRST, FIRST + 1)]
    got = lm_jax.generate(model(cfg), prompts, cfg, max_new_tokens=3)
    assert got == [greedy(cfg, tuple(prompt), 3) for prompt in prompts]
    one = lm_jax.generate(model(cfg), prompts, cfg, max_new_tokens=1)
    assert one == [row[:1] for row in got]


@BOTH
def test_a_stream_is_that_of_whole_texts(kind, monkeypatch):
    monkeypatch.setattr(decode, "_REREAD", 8)
    cfg = config(kind)
    for length in (FIRST - 1, FIRST, FIRST + 1):
        prompt = text(length, cfg)
        ids = decode.stream(model(cfg), prompt, cfg, mixer=ATTENTION)
        assert list(itertools.islice(ids, 3)) == greedy(cfg, tuple(prompt), 3)


@BOTH
def test_a_pass_rotates_anew_all_keys_that_a_row_holds(kind):
    cfg = config(kind, num_layers=1)
    tokens_BT = jnp.array([text(FIRST + 2, cfg)])

    def last(params):
        return lm_jax.forward(params, tokens_BT, cfg).logits[:, FIRST:]

    wanted = rounding.expected(last, model(cfg))
    cache = lm_jax.init_cache(cfg, 1, 12)
    # Keys that an edit has rotated are turned back: this one changes nothing.
    for edits in ({}, {"attn.rot_k": lm_jax.Scale(jnp.ones((1, 1, 1, 1, 1)))}):
        before = tiny.forward(
            model(cfg), tokens_BT[:, :FIRST], cfg=cfg, cache=cache, edits=edits
        ).cache
        after = tiny.forward(
            model(cfg), tokens_BT[:, FIRST:], cfg=cfg, cache=before, edits=edits
        ).logits
        rounding.assert_within(after, wanted)
