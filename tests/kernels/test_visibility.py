"""Which keys a query may read: the mask against its definition, and the block ranges against it."""

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.attention import visibility

LARGEST = np.iinfo(np.int32).max


def _visible(causal, window, query, key):
    """By the definition, on python integers."""
    return (not causal or key <= query) and (window is None or query - key < window)


def _bounds(blocks):
    """The half-open range of the blocks, (None, None) for none."""
    return (min(blocks), max(blocks) + 1) if blocks else (None, None)


windows = st.one_of(st.none(), st.integers(1, 12), st.just(LARGEST))


@hypothesis.example(False, LARGEST, -3, 1, 4, 2)
@hypothesis.example(False, 1, 1, 1, 1, 2)
@hypothesis.given(st.booleans(), windows, st.integers(-3, 20), *[st.integers(1, 9)] * 3)
def test_key_blocks_hold_a_visible_pair_and_all_others_none(causal, window, first, rows, S, block):
    low, high = visibility.key_blocks(
        causal, None if window is None else jnp.int32(window), jnp.int32(first), rows, S, block
    )
    visible = {
        key // block
        for key in range(S)
        for query in range(first, first + rows)
        if _visible(causal, window, query, key)
    }
    assert (int(low) == int(high)) if not visible else (int(low), int(high)) == _bounds(visible)


@hypothesis.given(
    st.booleans(), windows, st.integers(-3, 9), st.integers(0, 20), *[st.integers(1, 9)] * 3
)
def test_query_blocks_hold_a_visible_pair_and_all_others_none(
    causal, window, start, first, columns, T, block
):
    low, high = visibility.query_blocks(
        causal,
        None if window is None else jnp.int32(window),
        jnp.int32(start),
        jnp.int32(first),
        columns,
        T,
        block,
    )
    visible = {
        t // block
        for t in range(T)
        for key in range(first, first + columns)
        if _visible(causal, window, start + t, key)
    }
    # Where nothing is visible, one block may be walked in vain.
    assert (int(high) - int(low) <= 1) if not visible else (int(low), int(high)) == _bounds(visible)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("start", [None, 2, jnp.asarray([0, 4])])
def test_the_mask_is_the_definition(causal, window, start):
    B, T, S = 2, 5, 7
    query_segments = np.asarray([[0, 0, 1, 1, -1], [2, 2, 2, -1, 0]])
    key_segments = np.asarray([[0, 0, 1, 1, -1, 1, 0], [2, 2, -1, -1, 0, 0, 2]])
    visible = visibility.visibility(
        "op",
        B,
        T,
        S,
        causal=causal,
        window=window,
        segment_ids=(query_segments, key_segments),
        start=start,
    )
    mask_BTS = np.asarray(visible.mask_BTS(T, S))
    positions = np.broadcast_to(np.asarray(S - T if start is None else start), (B,))
    for b, t, s in np.ndindex(B, T, S):
        expected = (
            _visible(causal, window, positions[b] + t, s)
            and query_segments[b, t] == key_segments[b, s]
            and key_segments[b, s] >= 0
        )
        assert mask_BTS[b, t, s] == expected, (b, t, s)


def test_a_call_that_hides_nothing_has_no_mask_on_its_tiles():
    visible = visibility.visibility(
        "op", 1, 4, 4, causal=False, window=None, segment_ids=None, start=None
    )
    assert visible.tile(jnp.arange(4)[:, None], jnp.arange(4)[None]) is None
    assert bool(visible.mask_BTS(4, 4).all())


def test_visibility_is_an_argument_of_jit_and_its_window_is_traced():
    traced = []

    @jax.jit
    def masks(visible):
        traced.append(visible)
        return visible.mask_BTS(4, 4)

    for window in (1, 2):
        visible = visibility.visibility(
            "op", 1, 4, 4, causal=True, window=jnp.int32(window), segment_ids=None, start=None
        )
        assert int(masks(visible).sum()) == 4 + 3 * (window - 1)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 0}, r"op: window is 0; it counts the query itself, so at least 1"),
        (
            {"start": jnp.zeros((3,), int)},
            r"op: start has shape \(3,\); expected a scalar or \[B\]",
        ),
        (
            {"segment_ids": jnp.zeros((2, 4), int)},
            r"op: segment_ids is one array but T = 4 and S = 5",
        ),
        ({"segment_ids": (jnp.zeros((2, 5), int),) * 2}, r"op: segment_ids has T = 5, not 4"),
        ({"segment_ids": (jnp.zeros((4,), int),) * 2}, r"op: segment_ids has shape \(4,\)"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    arguments = {"causal": True, "window": None, "segment_ids": None, "start": None} | changed
    with pytest.raises(ValueError, match=message):
        visibility.visibility("op", 2, 4, 5, **arguments)
