"""Attention patterns made by hand, for the tests of what is read off them."""

import numpy as np

from sparse_jax.addition import problems
from sparse_jax.addition.attention_trace import AttentionTrace

T = problems.READ


def pattern(*edges: tuple[int, int, int], layers: int = 2, weight: float = 0.25) -> np.ndarray:
    """`[L, T, T]` with these (layer, reader, source) open."""
    pattern_LTS = np.zeros((layers, T, T), np.float32)
    for edge in edges:
        pattern_LTS[edge] = weight
    return pattern_LTS


def seen(*patterns: np.ndarray, exact: bool = True) -> AttentionTrace:
    """A pass over one sum per pattern."""
    pattern_LPTS = np.stack(patterns, axis=1)
    count = len(patterns)
    return AttentionTrace(
        answer_PA=np.ones((count, problems.ANSWERED), int),
        exact_P=np.full(count, exact),
        pattern_LPTS=pattern_LPTS,
        open_LPTS=pattern_LPTS > 0,
    )
