"""Whether a prototype is read one token before it is written.

Prototype Transformer, section 5.1 and Fig. 3, shows the pattern on chosen sequences. Here it is a
statistic over all prototypes with a test.

1. Of each gate the mean of its text is taken away, so that a text about the prototype's theme does
   not count as agreement at every lag.
2. c_k(r, s) is the correlation of the write gate of prototype r at i with the read gate of s at
   i + k, over all pairs inside a text. Its cross-correlation is c_k(r, r) for k = -5..5: a peak at
   k = -1 is a read one token before the write.
3. The lead is the mean over prototypes of c_-1(r, r) - c_0(r, r).
4. Under the null hypothesis a prototype's own read gate leads its write gate no more than that of
   another prototype of its layer does: within each layer, read gates change owners. Every series
   stays whole, on the same texts. (Reads of other texts would be a null that nearly every model
   refutes, one with random weights too, for both gates depend on the token.)

A first layer with shared routing takes no part: its read gate is its write gate.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from lm_jax import stats

LAGS = tuple(range(-5, 6))
_NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class LayerLag:
    """Cross-correlations of one layer `[R, lags]`, and c_-1 - c_0 of writes (rows) with reads.

    NaN where a gate never varies inside a text.
    """

    correlation_RK: np.ndarray
    lead_RR: np.ndarray


@dataclasses.dataclass(frozen=True)
class Lead:
    """Mean lead over `n` prototypes, its two-sided permutation p, and a bootstrap over them.

    NaN where there is nothing to test.
    """

    value: float
    p: float
    low: float
    high: float
    n: int


def of_layer(write_NTR: np.ndarray, read_NTR: np.ndarray, counted_NT: np.ndarray) -> LayerLag:
    """Correlations of one layer's gates; tokens that do not count make no pairs."""
    write_NTR, read_NTR = (_centred(gate, counted_NT) for gate in (write_NTR, read_NTR))
    found = {k: _correlations(write_NTR, read_NTR, counted_NT, k) for k in LAGS}
    own = np.stack([np.diagonal(correlation_RR) for correlation_RR in found.values()], axis=1)
    return LayerLag(own, found[-1] - found[0])


def lead(layers: Sequence[LayerLag], *, permutations: int, seed: int) -> Lead:
    """The test of all layers together; prototypes without a correlation are left out."""
    leads = []
    for layer in layers:
        defined = np.isfinite(np.diagonal(layer.lead_RR))
        leads.append(layer.lead_RR[np.ix_(defined, defined)])
    own_Q = np.concatenate([np.empty(0), *(np.diagonal(lead_RR) for lead_RR in leads)])
    n = len(own_Q)
    if not n:
        return Lead(_NAN, _NAN, _NAN, _NAN, 0)
    rng = np.random.default_rng(seed)
    null_S = np.zeros(permutations)
    for lead_RR in leads:
        R = len(lead_RR)
        owner_SR = rng.permuted(np.tile(np.arange(R), (permutations, 1)), axis=1)
        null_S += lead_RR[np.arange(R)[None], owner_SR].sum(1)
    value = float(own_Q.mean())
    p = _two_sided(value, null_S / n)
    if n < 2:
        return Lead(value, p, _NAN, _NAN, n)
    interval = stats.clustered_bootstrap(own_Q, np.arange(n), seed=seed)
    return Lead(value, p, interval.low, interval.high, n)


def _two_sided(value: float, null_S: np.ndarray) -> float:
    """Twice the smaller tail, the observed owners counted among the permutations."""
    # The sums of equal numbers in another order must count as equal.
    slack = 1e-9 * max(1.0, abs(value))
    above = 1 + (null_S >= value - slack).sum()
    below = 1 + (null_S <= value + slack).sum()
    return min(1.0, 2 * float(min(above, below)) / (len(null_S) + 1))


def _centred(gate_NTR: np.ndarray, counted_NT: np.ndarray) -> np.ndarray:
    """Deviation from the text's mean, 0 where a token does not count."""
    counted_NT1 = counted_NT[..., None].astype(gate_NTR.dtype)
    sums_N1R = (gate_NTR * counted_NT1).sum(1, keepdims=True)
    return (gate_NTR - sums_N1R / counted_NT1.sum(1, keepdims=True)) * counted_NT1


def _correlations(
    write_NTR: np.ndarray, read_NTR: np.ndarray, counted_NT: np.ndarray, k: int
) -> np.ndarray:
    """c_k of every write gate (rows) with every read gate (columns).

    Sums of squares are over the pairs alone, so that a longer lag is not drawn towards 0.
    """
    T = counted_NT.shape[1]
    at, read_at = slice(max(0, -k), T - max(0, k)), slice(max(0, k), T - max(0, -k))
    both_NT = counted_NT[:, at] & counted_NT[:, read_at]
    write_MR, read_MR = write_NTR[:, at][both_NT], read_NTR[:, read_at][both_NT]
    squares = (np.square(gate_MR).sum(0, dtype=np.float64) for gate_MR in (write_MR, read_MR))
    # A gate that never varies has no correlation.
    with np.errstate(invalid="ignore", divide="ignore"):
        return write_MR.T @ read_MR / np.sqrt(np.outer(*squares))
