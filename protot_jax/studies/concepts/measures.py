"""Statistics of gates: concentration (L1 ratio, Gini, entropy), half-life, mutual information.

Prototype Transformer, appendix A.8, Eq. 3 to 6, and the router statistics of A.7.1. A gate array
`gate_MR` has the gates of M tokens in one layer over its R prototypes.
"""

from collections.abc import Sequence

import numpy as np
from scipy import special

from protot_jax.mixers.gate_statistics import ACTIVE, entropy, gini, half_life, l1_ratio
from protot_jax.studies.concepts import resampling
from protot_jax.studies.concepts.results import LayerGate, LayerIntervals, PrototypeGate

BINS = 10
_DIGITS = 5

__all__ = [
    "ACTIVE",
    "BINS",
    "entropy",
    "gini",
    "half_life",
    "l1_ratio",
    "memory",
    "mutual_information",
    "of_layer",
    "of_prototypes",
    "rounded",
]


def mutual_information(token_M: np.ndarray, gate_M: np.ndarray, bins: int = BINS) -> float:
    """Eq. 6 in nats, between token ids and a gate in quantile bins, Miller-Madow corrected.

    The paper does not define the bins. In I = H(token) + H(bin) - H(both) each entropy gets
    (cells in use - 1) / 2M added (Miller, 1955). For rare tokens that is too little, and the value
    of a small sample is too large, so compare it with that of shuffled tokens (`of_prototypes`).
    Equal gates share a bin, so that a constant gate has a single one. A gate that is on an edge has
    the bin of that edge: a sparse unit, most of whose quantiles are 0, is 0 or in another bin.
    """
    edges = np.unique(np.quantile(gate_M, np.arange(1, bins) / bins))
    # Even bins lie between edges, odd ones are an edge.
    bin_M = np.searchsorted(edges, gate_M, "left") + np.searchsorted(edges, gate_M, "right")
    columns = 2 * len(edges) + 1
    joint = np.bincount(token_M * columns + bin_M)
    # Rows of the table are tokens.
    joint_VA = np.pad(joint, (0, -len(joint) % columns)).reshape(-1, columns)
    cells = (joint_VA.sum(1), joint_VA.sum(0), joint)
    token, gate, both = (_entropy(counts) for counts in cells)
    return token + gate - both


def _entropy(counts: np.ndarray) -> float:
    """Entropy of counts in nats, Miller-Madow corrected."""
    counts = counts[counts > 0]
    total = counts.sum()
    return float(special.entr(counts / total).sum() + (len(counts) - 1) / (2 * total))


def of_prototypes(
    gate_MR: np.ndarray, token_M: np.ndarray, *, seed: int = 0
) -> list[PrototypeGate]:
    """Statistics of the write or read gate of each prototype of a layer.

    `seed` is of the shuffled tokens, for the mutual information by chance.
    """
    shuffled_M = np.random.default_rng(seed).permutation(token_M)
    top_M = gate_MR.argmax(1)
    results = []
    for r, gate_M in enumerate(gate_MR.T):
        mean, largest = float(gate_M.mean(dtype=np.float64)), float(gate_M.max())
        results.append(
            PrototypeGate(
                mean=mean,
                max=largest,
                peak_over_mean=largest / mean if mean else None,
                mutual_information=mutual_information(token_M, gate_M),
                mutual_information_by_chance=mutual_information(shuffled_M, gate_M),
                top_1=float((top_M == r).mean()),
                active=float((gate_M >= ACTIVE).mean()),
            )
        )
    return results


def of_layer(
    gate_MR: np.ndarray,
    text_M: np.ndarray,
    prototypes: Sequence[PrototypeGate],
    counts_SN: np.ndarray,
) -> LayerGate:
    """Statistics of the write or read gates of a layer.

    Args:
      gate_MR: gates of M tokens.
      text_M: the index of each token's text.
      prototypes: the statistics of each prototype.
      counts_SN: how often each text is in each bootstrap sample.
    """
    second_M, first_M = np.partition(gate_MR, -2, axis=1)[:, -2:].T
    of_tokens = {
        "l1_ratio": l1_ratio(gate_MR),
        "gini": gini(gate_MR),
        "entropy": entropy(gate_MR),
        "top_1": first_M,
        "margin": first_M - second_M,
        "active": (gate_MR >= ACTIVE).sum(1),
    }
    N = counts_SN.shape[1]
    sums_NF, use_NR = (
        np.stack([np.bincount(text_M, values_M, minlength=N) for values_M in columns], axis=1)
        for columns in (of_tokens.values(), gate_MR.T)
    )
    tokens_N = np.bincount(text_M, minlength=N)
    result = dict(zip(of_tokens, resampling.means(sums_NF, tokens_N, counts_SN), strict=True))
    share_R, share_SR = (
        use / use.sum(-1, keepdims=True) for use in (use_NR.sum(0), counts_SN @ use_NR)
    )
    ginis_S = gini(share_SR)
    result["usage_gini"] = (float(gini(share_R)), *resampling.percentiles(ginis_S))
    result["max_share"] = (float(share_R.max()), *resampling.percentiles(share_SR.max(1)))
    return LayerGate(
        **{name: value for name, (value, _, _) in result.items()},
        intervals=LayerIntervals(**{name: (low, high) for name, (_, low, high) in result.items()}),
        **{
            name: float(np.mean([getattr(each, name) for each in prototypes]))
            for name in ("mutual_information", "mutual_information_by_chance")
        },
        dead=sum(each.active == 0 for each in prototypes),
    )


def rounded(gate_T: np.ndarray) -> tuple[float, ...]:
    """Gates as they are stored: in float16, which has no more digits."""
    return tuple(np.round(gate_T.astype(np.float64), _DIGITS).tolist())


def memory(write_NT: np.ndarray, decay: float) -> np.ndarray:
    """Discounted mean of the write gate before each token: (1-b) sum_{j<i} b^(i-1-j) write_j."""
    memory_NT = np.zeros_like(write_NT)
    for i in range(1, write_NT.shape[1]):
        memory_NT[:, i] = decay * memory_NT[:, i - 1] + (1 - decay) * write_NT[:, i - 1]
    return memory_NT
