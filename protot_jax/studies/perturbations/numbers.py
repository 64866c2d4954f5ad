"""The numbers of a slice: how many pairs, from where, and how far apart their texts are."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from protot_jax.studies.perturbations.results import Slice
from protot_jax.studies.perturbations.screening import REASONS
from protot_jax.studies.robustness import sentences
from protot_jax.studies.robustness.results import SkippedSlice
from protot_jax.studies.robustness.sentences import Pair
from protot_jax.studies.robustness.similarity import Encoder, similarities

# The source of pairs that are of no corpus.
BUILT = "built"
_NO_MORE = "the corpora and the built sentences have no more"


def of_slice(
    name: str,
    pairs: Sequence[Pair],
    wanted: int,
    rejected: Mapping[str, int],
    encoder: Encoder | None,
) -> Slice:
    """The record of a slice.

    Args:
      name: name of the slice.
      pairs: pairs of the slice.
      wanted: number of pairs that it was to have.
      rejected: number of candidates that were left out, by reason.
      encoder: encoder of the similarity; None leaves it out.
    """
    both = [(pair.text, pair.perturbed) for pair in pairs]
    cosines = similarities(encoder, both) if encoder and both else None
    distances = [sentences.edit_distance(*each) for each in both]
    return Slice(
        name=name,
        pairs=len(pairs),
        unique_pairs=len({(a.casefold(), b.casefold()) for a, b in both}),
        texts=len({text for text, _ in both}),
        built=sum(pair.source == BUILT for pair in pairs),
        frames=len({pair.frame for pair in pairs if pair.frame}),
        splits=dict(sorted(Counter(pair.split for pair in pairs if pair.split).items())),
        rejected={reason: rejected[reason] for reason in REASONS if rejected.get(reason)},
        similarity=None if cosines is None else float(cosines.mean()),
        distance=float(np.mean(distances)) if distances else None,
        missing=_NO_MORE if len(pairs) < wanted else "",
    )


def of_skipped(one: SkippedSlice) -> Slice:
    """The record of a slice whose data are missing."""
    return Slice(one.name, 0, 0, 0, 0, 0, {}, {}, None, None, one.reason)
