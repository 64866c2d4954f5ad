"""Attention patterns of chosen heads on a text, before and after post-training.

They are rounded to three digits for `patterns.json` (`results.TextPatterns`).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.precision import exact_products
from lm_jax.parallel import sharding
from lm_jax.weights.load import Pretrained
from sparse_jax.gates.model import SparseModel
from sparse_jax.studies.posttrain.results import HeadPatterns, TextPatterns

PATTERN = "attn.pattern"
MOST_HEADS, MOST_TOKENS = 4, 48
_DIGITS = 3

# Layer and head.
Head = tuple[int, int]


def legible(after_LNTS: np.ndarray, open_LN: np.ndarray, pairs_L: np.ndarray) -> list[Head]:
    """Heads where few open edges carry much weight, at most one per layer, in order of layers.

    The score of a head is the mean over queries of its weight on all keys but the first, which is
    an attention sink, minus the share of its edges that are open.
    """
    carried_LN = after_LNTS[..., 1:].sum(-1).mean(-1)
    score_LN = carried_LN - open_LN / pairs_L[:, None]
    best_L = score_LN.argmax(1)
    layers = np.argsort(-score_LN.max(1), kind="stable")[:MOST_HEADS]
    return [(int(layer), int(best_L[layer])) for layer in sorted(layers)]


def named(heads: Sequence[str], layers: int, count: int) -> list[Head]:
    """Parses heads written as "layer.head".

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
    dense: Pretrained, sparse: SparseModel, text: str, heads: Sequence[Head] = ()
) -> TextPatterns:
    """Patterns of both models on the first 48 tokens of a text, in `heads` or `legible` ones."""
    tokenizer = dense.tokenizer
    assert tokenizer is not None, "post-training refuses a model without one"
    ids = tokenizer.encode(text, split_special_tokens=True)
    ids = ids[: min(MOST_TOKENS, dense.cfg.max_length)]
    # Tokens that the tokenizer adds at the ends of a text. Other special tokens are kept: `<unk>`
    # stands for something in the text.
    added = {tokenizer.bos_id, tokenizer.eos_id}
    tokens_BT = jnp.asarray([ids], jnp.int32)
    record = {PATTERN: lm_jax.keep}
    with exact_products():
        ungated = lm_jax.forward(dense.params, tokens_BT, dense.cfg, record=record)
        gated = sparse.forward(tokens_BT, record=record)
    patterns = [sharding.fetch(output.records[PATTERN])[:, 0] for output in (ungated, gated)]
    open_LN = sharding.fetch(gated.aux["open_edges_BN"])[:, 0]
    pairs_L = sharding.fetch(gated.aux["pairs_B"])[:, 0]
    before_LNTS, after_LNTS = (np.round(p.astype(np.float64), _DIGITS) for p in patterns)
    heads = heads or legible(after_LNTS, open_LN, pairs_L)
    return TextPatterns(
        text=tokenizer.decode(one for one in ids if one not in added),
        tokens=tuple(tokenizer.piece(one) for one in ids),
        heads=tuple(
            HeadPatterns(
                layer=layer,
                head=head,
                dense=_rows(before_LNTS[layer, head]),
                sparse=_rows(after_LNTS[layer, head]),
                open=int(open_LN[layer, head]),
                pairs=int(pairs_L[layer]),
            )
            for layer, head in heads
        ),
    )


def _rows(pattern_TS: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, pattern_TS.tolist()))
