"""Attention patterns with chosen edges, for the tests of what is measured on them."""

import numpy as np

from sparse_jax.studies.addition import problems
from sparse_jax.studies.addition.attention_trace import AttentionTrace

T = problems.READ


def pattern(*edges: tuple[int, int, int], layers: int = 2, weight: float = 0.25) -> np.ndarray:
    """`[L, T, T]` with these (layer, reader, source) open."""
    pattern_LTS = np.zeros((layers, T, T), np.float32)
    for edge in edges:
        pattern_LTS[edge] = weight
    return pattern_LTS


def trace(*patterns: np.ndarray, exact: bool = True) -> AttentionTrace:
    """The trace of one sum per pattern."""
    pattern_LPTS = np.stack(patterns, axis=1)
    count = len(patterns)
    return AttentionTrace(
        answer_PA=np.ones((count, problems.ANSWERED), int),
        exact_P=np.full(count, exact),
        pattern_LPTS=pattern_LPTS,
        open_LPTS=pattern_LPTS > 0,
    )
