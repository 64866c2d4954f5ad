"""Concentration of gates and half-life of what they write (Prototype Transformer, appendix A.8).

A gate array `gate_MR` has the gates of M tokens in one layer over its R prototypes.
"""

import numpy as np
from scipy import special

# A prototype is active at a token from this gate on.
ACTIVE = 0.01


def half_life(decay_logit: np.ndarray) -> np.ndarray:
    """Half-life of a contribution in tokens, -ln 2 / ln sigmoid(decay_logit)."""
    # ln sigmoid(x) from the logit, since a decay in float32 near 1 has lost its digits.
    return np.log(2.0) / np.logaddexp(0.0, -np.asarray(decay_logit, np.float64))


def l1_ratio(gate_MR: np.ndarray) -> np.ndarray:
    """Eq. 3 for each token: largest over mean; between 1 and R."""
    return gate_MR.max(-1) / gate_MR.mean(-1)


def gini(gate_MR: np.ndarray) -> np.ndarray:
    """Eq. 4 for each token: 0 where all are equal, 1 - 1/R where one has everything."""
    R = gate_MR.shape[-1]
    weights_R = np.arange(R, 0, -1)
    weighted_M = (np.sort(gate_MR, axis=-1) * weights_R).sum(-1)
    return (R + 1 - 2 * weighted_M / gate_MR.sum(-1)) / R


def entropy(gate_MR: np.ndarray) -> np.ndarray:
    """Eq. 5 for each token, in nats; ln R where all are equal."""
    return special.entr(gate_MR / gate_MR.sum(-1, keepdims=True)).sum(-1)
