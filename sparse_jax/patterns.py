"""The attention of chosen heads on a text, before post-training and after.

`patterns.json` of a run holds what is drawn, rounded to three digits; a weight of 0 is an edge that
is closed, or one that the softmax itself makes nothing of.
"""

from collections.abc import Sequence
from typing import TypedDict

import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.parallel import sharding
from lm_jax.weights.load import Pretrained
from sparse_jax.model import SparseModel

PATTERN = "attn.pattern"
MOST_HEADS, MOST_TOKENS = 4, 48
_DIGITS = 3

Choice = tuple[int, int]


class Head(TypedDict):
    """One head on one text: weights by query and key in both models, and its open edges."""

    layer: int
    head: int
    dense: list[list[float]]
    sparse: list[list[float]]
    open: int
    pairs: int


class Shown(TypedDict):
    """The beginning of a text, as it is and by its tokens; and its heads."""

    text: str
    tokens: list[str]
    heads: list[Head]


def legible(after_LNTS: np.ndarray, open_LN: np.ndarray, pairs_L: np.ndarray) -> list[Choice]:
    """Heads where few open edges carry much weight, at most one of a layer, in order of layers.

    What a head scores is the mean weight by query on keys after the first, where heads put what
    they do not need, less the share of its edges that are open.
    """
    carried_LN = after_LNTS[..., 1:].sum(-1).mean(-1)
    score_LN = carried_LN - open_LN / pairs_L[:, None]
    best_L = score_LN.argmax(1)
    layers = np.argsort(-score_LN.max(1), kind="stable")[:MOST_HEADS]
    return [(int(layer), int(best_L[layer])) for layer in sorted(layers)]


def named(heads: Sequence[str], layers: int, count: int) -> list[Choice]:
    """Heads written as "layer.head".

    Raises:
      UsageError: the model has no such head.
    """
    results = [(int(layer), int(head)) for layer, head in (name.split(".") for name in heads)]
    for name, (layer, head) in zip(heads, results, strict=True):
        if layer >= layers or head >= count:
            raise UsageError(
                f"config.heads has {name}, and the model has layers 0 to {layers - 1} with heads 0 "
                f"to {count - 1}"
            )
    return results


def trace_patterns(
    dense: Pretrained, sparse: SparseModel, text: str, heads: Sequence[Choice] = ()
) -> Shown:
    """The patterns of both models on the beginning of a text, in these heads or `legible` ones."""
    tokenizer = dense.tokenizer
    assert tokenizer is not None, "post-training refuses a model without one"
    ids = tokenizer.encode(text, split_special_tokens=True)
    ids = ids[: min(MOST_TOKENS, dense.cfg.max_length)]
    # What the tokenizer puts around a text. No other special token is left out: `<unk>` stands for
    # something in the text.
    around = {tokenizer.bos_id, tokenizer.eos_id}
    tokens_BT = jnp.asarray([ids], jnp.int32)
    record = {PATTERN: lm_jax.keep}
    plain = lm_jax.forward(dense.params, tokens_BT, dense.cfg, record=record)
    gated = sparse.forward(tokens_BT, record=record)
    patterns = [sharding.fetch(output.records[PATTERN])[:, 0] for output in (plain, gated)]
    open_LN = sharding.fetch(gated.aux["open_edges_BN"])[:, 0]
    pairs_L = sharding.fetch(gated.aux["pairs_B"])[:, 0]
    before_LNTS, after_LNTS = (np.round(p.astype(np.float64), _DIGITS) for p in patterns)
    heads = heads or legible(after_LNTS, open_LN, pairs_L)
    return {
        "text": tokenizer.decode(one for one in ids if one not in around),
        "tokens": [tokenizer.decode([one]) for one in ids],
        "heads": [
            {
                "layer": layer,
                "head": head,
                "dense": before_LNTS[layer, head].tolist(),
                "sparse": after_LNTS[layer, head].tolist(),
                "open": int(open_LN[layer, head]),
                "pairs": int(pairs_L[layer]),
            }
            for layer, head in heads
        ],
    }
