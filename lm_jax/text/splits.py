"""Which split a document is in: a hash of its text and the seed alone decide.

So the order of a source, or more documents in it, move no other document.
"""

from collections.abc import Sequence
import hashlib
import math

from lm_jax.errors import UsageError

SPLITS = ("train", "validation", "test")


def split_point(data: bytes, seed: int) -> float:
    """The number in [0, 1) that decides a document's split, a hash of its text."""
    digest = hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") / 2**64


def split_of(point: float, splits: Sequence[float]) -> str:
    """The split that holds a point of `split_point`."""
    for split, share in zip(SPLITS, splits, strict=True):
        if point < share:
            return split
        point -= share
    # Rounding of the shares may leave a sliver at the end.
    return max(zip(splits, SPLITS, strict=True))[1]


def check_shares(splits: Sequence[float]) -> None:
    """Refuses what is no three shares.

    Raises:
      UsageError: they are not three, one is negative, or their sum is not 1.
    """
    if len(splits) != len(SPLITS) or min(splits) < 0 or not math.isclose(sum(splits), 1.0):
        raise UsageError(
            f"splits = {tuple(splits)} must be three shares, of {', '.join(SPLITS)}, none "
            "negative, with sum 1"
        )


def missing_splits(splits: Sequence[float]) -> list[str]:
    """What is wrong with `config.corpus.splits` of a training that evaluates; empty if nothing."""
    if min(splits[:2]) > 0:
        return []
    return [f"config.corpus.splits = {splits} must give training and validation a share above 0"]
