"""Top texts and top tokens of a prototype, and the repetition of its tokens.

Prototype Transformer, section 5.1: texts are ranked by their mean write gate, or by its sum with
`rank_by="sum"`, the paper's "total activation". Tokens are ranked by the same statistic over all
their occurrences, if they have at least `LEAST_OCCURRENCES`.

The token repetition score of appendix A.8 has no definition in the paper. Here it is 1 - unique /
all of a prototype's most activating tokens, which are the `PER_TEXT` tokens of highest write gate
in each of its top texts. Fig. 7 agrees with this (0.73 over rows of five to seven tokens).
"""

from collections.abc import Iterable
import dataclasses
from typing import Literal

import numpy as np

RankBy = Literal["mean", "sum"]
LEAST_OCCURRENCES = 5
PER_TEXT = 5


@dataclasses.dataclass(frozen=True)
class TopToken:
    """A token id with the mean and the sum of one write gate over its `count` occurrences."""

    id: int
    mean: float
    sum: float
    count: int


def text_scores(gate_NTR: np.ndarray, token_mask_NT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sum of each gate over the counted tokens of each text, `[N, R]`."""
    sum_NR = np.einsum("NTR,NT->NR", gate_NTR, token_mask_NT.astype(gate_NTR.dtype))
    return sum_NR / token_mask_NT.sum(1)[:, None], sum_NR


def top_texts(score_N: np.ndarray, top: int) -> np.ndarray:
    """Indices of the `top` texts of highest score; among equal scores the earlier text first."""
    return np.argsort(-score_N, kind="stable")[:top]


def top_tokens(
    token_M: np.ndarray, gate_MR: np.ndarray, top: int, rank_by: RankBy
) -> list[list[TopToken]]:
    """The `top` tokens of each prototype, among those that occur often enough."""
    id_U, place_M, count_U = np.unique(token_M, return_inverse=True, return_counts=True)
    often_U = np.flatnonzero(count_U >= LEAST_OCCURRENCES)
    result = []
    for gate_M in gate_MR.T:
        sum_U = np.bincount(place_M, weights=gate_M)
        mean_U = sum_U / count_U
        score_U = mean_U if rank_by == "mean" else sum_U
        best = often_U[top_texts(score_U[often_U], top)]
        result.append(
            [
                TopToken(int(id_U[u]), float(mean_U[u]), float(sum_U[u]), int(count_U[u]))
                for u in best
            ]
        )
    return result


def repetition(
    token_NT: np.ndarray, gate_NT: np.ndarray, token_mask_NT: np.ndarray, texts: Iterable[int]
) -> float:
    """Token repetition score: 1 - unique / all of the most activating tokens in `texts`."""
    tokens = [
        token for text in texts for token in _strongest(token_NT, gate_NT, token_mask_NT, text)
    ]
    return 1 - len(set(tokens)) / len(tokens)


def repetition_of_samples(
    token_NT: np.ndarray,
    gate_NT: np.ndarray,
    token_mask_NT: np.ndarray,
    score_N: np.ndarray,
    top: int,
    included_SN: np.ndarray,
) -> np.ndarray:
    """The repetition of a prototype in S samples of the texts, each with its own top texts.

    Args:
      token_NT: ids.
      gate_NT: the prototype's write gate.
      token_mask_NT: tokens that count.
      score_N: score of each text, by which top texts are chosen.
      top: how many.
      included_SN: whether a text is in a sample; at least one is.
    """
    order_N = top_texts(score_N, len(score_N))
    # A sample has half of the texts, so that its top texts are nearly always among these.
    depth = 8 * top
    while depth < len(order_N) and (included_SN[:, order_N[:depth]].sum(1) < top).any():
        depth *= 2
    order_C = order_N[:depth]
    included_SC = included_SN[:, order_C]
    chosen_SC = included_SC & (included_SC.cumsum(1) <= top)
    tokens = [_strongest(token_NT, gate_NT, token_mask_NT, text) for text in order_C]
    count_C = np.array(list(map(len, tokens)))
    id_U, place_M = np.unique(np.concatenate(tokens), return_inverse=True)
    holds_CU = np.zeros((len(order_C), len(id_U)), np.float32)
    holds_CU[np.repeat(np.arange(len(order_C)), count_C), place_M] = 1.0
    unique_S = np.count_nonzero(chosen_SC.astype(np.float32) @ holds_CU, axis=1)
    return 1 - unique_S / (chosen_SC @ count_C)


def _strongest(
    token_NT: np.ndarray, gate_NT: np.ndarray, token_mask_NT: np.ndarray, text: int
) -> list[int]:
    """The tokens of highest gate in a text."""
    token_M = token_NT[text][token_mask_NT[text]]
    gate_M = gate_NT[text][token_mask_NT[text]]
    return token_M[top_texts(gate_M, PER_TEXT)].tolist()
