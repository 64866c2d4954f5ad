"""Alignment of a perturbed sentence's tokens with those of the original.

Tokens are aligned by the longest matching blocks (Ratcliff and Obershelp, `difflib`). Tokens of
such blocks are outside of the changed spans. A changed span of equally many tokens on both sides is
aligned token by token as well, for holding its routing; in a span of other length no token of one
is that of the other, and none is aligned.
"""

from collections.abc import Sequence
import difflib
from typing import NamedTuple

import numpy as np


class Alignment(NamedTuple):
    """Where the tokens of a perturbed sentence are in the original; -1 for nowhere.

    Attributes:
      held_T: aligned tokens, those of changed spans of equal length included.
      compared_T: aligned tokens outside of changed spans that come after the first change. Before
        it the two sentences are the same, and so are the predictions.
    """

    held_T: np.ndarray
    compared_T: np.ndarray


def align(original: Sequence[int], perturbed: Sequence[int]) -> Alignment:
    """Aligns the ids of a perturbed sentence, `[T]`, with those of the original."""
    held_T = np.full(len(perturbed), -1)
    compared_T = np.full(len(perturbed), -1)
    matcher = difflib.SequenceMatcher(None, original, perturbed, autojunk=False)
    changed = False
    for kind, start, stop, first, last in matcher.get_opcodes():
        if kind == "equal":
            held_T[first:last] = np.arange(start, stop)
            if changed:
                compared_T[first:last] = np.arange(start, stop)
            continue
        changed = True
        if stop - start == last - first:
            held_T[first:last] = np.arange(start, stop)
    return Alignment(held_T, compared_T)
