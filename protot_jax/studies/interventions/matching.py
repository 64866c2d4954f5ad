"""Matching of prototypes between seeds, by the tokens that they write.

Prototype Transformer, appendix A.3.2, finds its COVID prototypes of three seeds by eye. Here

1. each prototype is the vector of its mean write gates, one entry per token of the vocabulary that
   occurs often enough in the same validation text;
2. the similarity of two prototypes is the correlation of their vectors;
3. all prototypes of one seed are assigned to those of the other, one to one and across layers, so
   that the sum of similarities is maximal (Hungarian method, by scipy);
4. the similarity of a pair is compared with those of prototypes that are known to be different: for
   each prototype of either seed, the highest similarity with another of its own seed. These too
   include gates that follow the same nuisance, say punctuation, and each is a maximum over as many
   prototypes. (Unassigned pairs between the seeds are not a valid null: the assignment leaves the
   lower ones, so that even without any correspondence the assigned pairs exceed them.)

The cosine of the prototypes' own vectors is not informative: each seed has its own directions of
the residual stream. Similarity by tokens requires the same tokenizer for both models.
"""

import dataclasses
from typing import Annotated

import numpy as np
from scipy import stats
from scipy.optimize import linear_sum_assignment

from lm_jax.errors import BadInputError
from lm_jax.run.results import Between, Count
from protot_jax.studies.interventions.gates import TextGates


@dataclasses.dataclass(frozen=True)
class Match:
    """The match of one prototype in another seed.

    Attributes:
      layer, prototype: indices of the match.
      similarity: correlation of the two.
      best: the highest correlation with any prototype of the other seed, which may be assigned to
        another one.
      median: median similarity of all assigned pairs.
      null_median, null_95: median of the `others` similarities of different prototypes (step 4),
        and the value that 5 % of them exceed.
      percentile: rank of `similarity` among them, ties counted half.
      p_value: share of them that are at least `similarity`, itself included.
      others: number of prototypes of both seeds.
      tokens: number of entries of the vectors.
    """

    layer: Count
    prototype: Count
    similarity: float
    best: float
    median: float
    null_median: float
    null_95: float
    percentile: Annotated[float, Between(0, 100)]
    p_value: float
    others: Count
    tokens: Count


def similarities(first: TextGates, second: TextGates, *, least_count: int = 5) -> np.ndarray:
    """Correlations `[L * R, L * R]` of mean write gates over tokens, first seed by second.

    A prototype whose gate is the same for every token has similarity 0 with all.

    Raises:
      BadInputError: fewer than three tokens occur `least_count` times in both.
    """
    first_MQ, second_MQ = _vectors(first, second, least_count)
    return first_MQ @ second_MQ.T


def assign(similarity_MM: np.ndarray) -> np.ndarray:
    """The column assigned to each row, such that the sum of similarities is maximal."""
    return linear_sum_assignment(similarity_MM, maximize=True)[1]


def match(
    first: TextGates,
    second: TextGates,
    *,
    layer: int,
    prototype: int,
    least_count: int = 5,
) -> Match:
    """Matches one prototype of the first seed with one of the second.

    Raises:
      BadInputError: the models differ in layers or prototypes, have a single prototype, or have
        too few tokens in common.
    """
    (_, L, R), other = first.mean_VLR.shape, second.mean_VLR.shape[1:]
    if other != (L, R):
        raise BadInputError(
            f"a model of {L} layers with {R} prototypes cannot be matched with one of {other[0]} "
            f"with {other[1]}; name runs of the same shape"
        )
    if L * R < 2:
        raise BadInputError(
            "a model of one prototype has no other to compare with; name a larger model"
        )
    first_MQ, second_MQ = _vectors(first, second, least_count)
    similarity_MM = first_MQ @ second_MQ.T
    partner_M = assign(similarity_MM)
    own = layer * R + prototype
    partner = int(partner_M[own])
    null = np.concatenate([_best_other(first_MQ), _best_other(second_MQ)])
    result = float(similarity_MM[own, partner])
    return Match(
        layer=partner // R,
        prototype=partner % R,
        similarity=result,
        best=float(similarity_MM[own].max()),
        median=float(np.median(similarity_MM[np.arange(len(partner_M)), partner_M])),
        null_median=float(np.median(null)),
        null_95=float(np.quantile(null, 0.95)),
        percentile=float(stats.percentileofscore(null, result, kind="mean")),
        p_value=float((1 + (null >= result).sum()) / (1 + len(null))),
        others=len(null),
        tokens=first_MQ.shape[1],
    )


def _best_other(vectors_MQ: np.ndarray) -> np.ndarray:
    """The highest similarity of each prototype with another one of the same model."""
    similarity_MM = vectors_MQ @ vectors_MQ.T
    np.fill_diagonal(similarity_MM, -np.inf)
    return similarity_MM.max(1)


def _vectors(
    first: TextGates, second: TextGates, least_count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean gates `[L * R, tokens]`, centred and of norm 1; 0 for a constant gate."""
    if first.count_V.shape != second.count_V.shape:
        raise BadInputError(
            f"vocabularies of {len(first.count_V)} and {len(second.count_V)} tokens cannot be "
            "compared; name runs with the same tokenizer"
        )
    common = (first.count_V >= least_count) & (second.count_V >= least_count)
    if common.sum() < 3:
        raise BadInputError(
            f"only {common.sum()} tokens occur {least_count} times in the validation text; raise "
            "--gate_rows"
        )
    vectors = []
    for gates in (first, second):
        vectors_MQ = gates.mean_VLR[common].reshape(common.sum(), -1).T
        vectors_MQ = vectors_MQ - vectors_MQ.mean(1, keepdims=True)
        lengths_M1 = np.linalg.norm(vectors_MQ, axis=1, keepdims=True)
        # A centred constant is rounding noise.
        varies = lengths_M1 > 1e-12
        vectors.append(np.where(varies, vectors_MQ / np.where(varies, lengths_M1, 1.0), 0.0))
    return vectors[0], vectors[1]
