"""Cross-correlation of read and write gates: is a prototype read one token before it is written?

Prototype Transformer, section 5.1 and Fig. 3, shows the pattern on chosen sequences. Here two
statistics over all prototypes test it, each with an interval and a p of its own hypothesis.

1. The mean over its text is subtracted from each gate, so that a text about the prototype's theme
   does not count as correlation at every lag.
2. c_k(r, s) is the correlation of the write gate of prototype r at i with the read gate of s at
   i + k, over all pairs inside a text. Its cross-correlation is c_k(r, r) for k = -5..5: a peak at
   k = -1 is a read one token before the write.
3. `lead` is the mean over prototypes of c_-1(r, r) - c_0(r, r). Hypothesis: it is 0 for these
   prototypes. Interval and p are from a bootstrap that draws texts with replacement.
4. `own_lead` is the mean over prototypes of c_-1(r, r) - c_0(r, r) less its mean over the read
   gates s of the other prototypes of the layer. Hypothesis: it is 0, so that a prototype's own read
   gate leads its write gate as any other read gate does. The test permutes read gates among the
   prototypes of each layer; every series stays whole, on the same texts. The interval holds the
   differences that this test does not reject.

The two statistics answer different questions. Where every read gate precedes every write gate, the
lead is large and the own lead 0. Where every correlation peaks at lag 0, but that of a prototype's
own gates less than those with other prototypes, the lead is negative and the own lead positive.

A first layer with shared routing is left out: its read gate is its write gate.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from protot_jax.studies.concepts.resampling import (
    TAIL,
    bootstrap_counts,
    bootstrap_p,
    percentiles,
    permutation_p,
)
from protot_jax.studies.concepts.results import Statistic

LAGS = tuple(range(-5, 6))


@dataclasses.dataclass(frozen=True)
class LayerLag:
    """Cross-correlations of the gates of one layer; NaN where a gate never varies inside a text.

    Attributes:
      correlation_RK: correlation of each prototype's two gates, at all lags.
      lead_RR: c_-1 - c_0 of writes (rows) with reads.
      sums_N6R: sums over pairs for each text, for lag -1 and then 0: of the products of a
        prototype's own gates, of the squares of its write gate, and of those of its read gate.
    """

    correlation_RK: np.ndarray
    lead_RR: np.ndarray
    sums_N6R: np.ndarray


@dataclasses.dataclass(frozen=True)
class LagTests:
    """The lead and the own lead, as defined in the docstring of this module."""

    lead: Statistic
    own_lead: Statistic


def of_layer(write_NTR: np.ndarray, read_NTR: np.ndarray, token_mask_NT: np.ndarray) -> LayerLag:
    """Cross-correlations of one layer's gates, over pairs of counted tokens."""
    write_NTR, read_NTR = (_centred(gate, token_mask_NT) for gate in (write_NTR, read_NTR))
    correlations, sums = {}, {}
    for k in LAGS:
        pairs = _pairs(write_NTR, read_NTR, token_mask_NT, k)
        correlations[k] = _correlations(*pairs)
        if k in (-1, 0):
            sums[k] = _sums(*pairs)
    own = np.stack([np.diagonal(correlation_RR) for correlation_RR in correlations.values()], 1)
    sums_N6R = np.stack([*sums[-1], *sums[0]], axis=1)
    return LayerLag(own, correlations[-1] - correlations[0], sums_N6R)


def tests(layers: Sequence[LayerLag], *, resamples: int, seed: int) -> LagTests:
    """The tests of all layers together; prototypes without a correlation are left out.

    Args:
      layers: layers of one model over the same texts.
      resamples: number of bootstrap samples, and of permutations.
      seed: seed of the samples and the permutations.
    """
    defined = [np.isfinite(np.diagonal(layer.lead_RR)) for layer in layers]
    leads = [
        layer.lead_RR[np.ix_(varies_R, varies_R)]
        for layer, varies_R in zip(layers, defined, strict=True)
    ]
    prototypes = sum(map(len, leads))
    texts = len(layers[0].sums_N6R) if layers else 0
    if not prototypes:
        return LagTests(Statistic.none(0, texts), Statistic.none(0, texts))
    value = float(np.concatenate([np.diagonal(lead_RR) for lead_RR in leads]).mean())
    replicates_S = _resampled(
        [
            layer.sums_N6R[..., varies_R]
            for layer, varies_R in zip(layers, defined, strict=True)
            if varies_R.any()
        ],
        bootstrap_counts(texts, resamples, seed),
    )
    p = bootstrap_p(replicates_S)
    lead = Statistic.of(value, *percentiles(replicates_S), p, prototypes, texts)
    # A prototype alone in its layer has no others to compare with.
    leads = [lead_RR for lead_RR in leads if len(lead_RR) > 1]
    return LagTests(lead, _own_lead(leads, texts, resamples, seed))


def _resampled(sums: Sequence[np.ndarray], counts_SN: np.ndarray) -> np.ndarray:
    """The lead in every bootstrap sample of texts."""
    leads = []
    for sums_N6R in sums:
        N, _, R = sums_N6R.shape
        sums_S6R = (counts_SN @ sums_N6R.reshape(N, -1)).reshape(-1, 6, R)
        before, write_before, read_before, at, write_at, read_at = np.moveaxis(sums_S6R, 1, 0)
        # A gate that varies in few texts may be constant in a whole sample.
        with np.errstate(invalid="ignore", divide="ignore"):
            leads.append(
                before / np.sqrt(write_before * read_before) - at / np.sqrt(write_at * read_at)
            )
    lead_SQ = np.concatenate(leads, axis=1)
    known_SQ = np.isfinite(lead_SQ)
    total_S = np.where(known_SQ, lead_SQ, 0.0).sum(1)
    return total_S / np.maximum(known_SQ.sum(1), 1)


def _own_lead(leads: Sequence[np.ndarray], texts: int, permutations: int, seed: int) -> Statistic:
    """Permutation test of the own lead, and the interval of the values that it does not reject.

    The hypothesis that every prototype's own lead is greater by d than those of the others is
    tested on lead_RR less d on the diagonal. A permutation that keeps Q - moved of the Q diagonal
    entries has a sum as large as the observed one if d >= (own sum - its sum) / moved. So the test
    of every d is a count of these quotients.
    """
    Q = sum(map(len, leads))
    if not Q:
        return Statistic.none(0, texts)
    rng = np.random.default_rng(seed)
    total_S, moved_S, value = np.zeros(permutations), np.zeros(permutations), 0.0
    for lead_RR in leads:
        R = len(lead_RR)
        place_R = np.arange(R)
        own_R = np.diagonal(lead_RR)
        value += float(own_R.sum() - (lead_RR.sum() - own_R.sum()) / (R - 1)) / Q
        owner_SR = rng.permuted(np.tile(place_R, (permutations, 1)), axis=1)
        total_S += lead_RR[place_R[None], owner_SR].sum(1)
        moved_S += (owner_SR != place_R).sum(1)
    own = float(sum(np.trace(lead_RR) for lead_RR in leads))
    p = permutation_p(total_S / Q, own / Q)
    changed = moved_S > 0
    quotients = np.sort((own - total_S[changed]) / moved_S[changed])
    # Permutations that change nothing are in both tails of every test, and so is the data.
    inside = TAIL * (permutations + 1) - 1 - np.count_nonzero(~changed)
    at = int(np.floor(inside))
    if at < 0 or 2 * at >= len(quotients):
        return Statistic(value, None, None, p, Q, texts)
    return Statistic.of(value, quotients[at], quotients[-1 - at], p, Q, texts)


def _centred(gate_NTR: np.ndarray, token_mask_NT: np.ndarray) -> np.ndarray:
    """Gates less their mean over the text, 0 where a token does not count."""
    counted_NT1 = token_mask_NT[..., None].astype(gate_NTR.dtype)
    sums_N1R = (gate_NTR * counted_NT1).sum(1, keepdims=True)
    return (gate_NTR - sums_N1R / counted_NT1.sum(1, keepdims=True)) * counted_NT1


def _pairs(
    write_NTR: np.ndarray, read_NTR: np.ndarray, token_mask_NT: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Write gates, and read gates k tokens later; 0 where either token does not count."""
    T = token_mask_NT.shape[1]
    at, read_at = slice(max(0, -k), T - max(0, k)), slice(max(0, k), T - max(0, -k))
    both_NT1 = (token_mask_NT[:, at] & token_mask_NT[:, read_at])[..., None]
    return write_NTR[:, at] * both_NT1, read_NTR[:, read_at] * both_NT1


def _correlations(write_NTR: np.ndarray, read_NTR: np.ndarray) -> np.ndarray:
    """Correlation of every write gate (rows) with every read gate (columns), over all pairs.

    Sums of squares are over the same pairs, so that long lags are not biased towards 0.
    """
    R = write_NTR.shape[-1]
    squares = (np.square(gate).sum((0, 1), dtype=np.float64) for gate in (write_NTR, read_NTR))
    # A gate that never varies has no correlation.
    with np.errstate(invalid="ignore", divide="ignore"):
        products_RR = write_NTR.reshape(-1, R).T @ read_NTR.reshape(-1, R)
        return products_RR / np.sqrt(np.outer(*squares))


def _sums(write_NTR: np.ndarray, read_NTR: np.ndarray) -> list[np.ndarray]:
    """Sums per text of write * read, write^2 and read^2 of each prototype, `[N, R]` each."""
    pairs = ((write_NTR, read_NTR), (write_NTR, write_NTR), (read_NTR, read_NTR))
    return [np.einsum("NTR,NTR->NR", x, y, dtype=np.float64) for x, y in pairs]
