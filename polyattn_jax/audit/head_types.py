"""Types of heads by their softmax patterns over whole prompts: sink, induction, local, diffuse.

After "When Does Polynomial Attention Concentrate?", Appendix H: one forward pass on 80 induction
prompts records four features of each head, here averages over all query rows of a prompt and then
over prompts,

    sink        weight on the first position
    induction   weight on the key after the earlier occurrence of the query's token, the "planted
                position", over the rows whose token occurred before (the second half of a prompt)
    distance    from the query to the key of greatest weight, in tokens
    entropy     of the row, in nats; reported, and used by no threshold

The thresholds are `head_type`. Nothing of the size of a pattern leaves a layer.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from polyattn_jax.audit.columns import Columns
from polyattn_jax.audit.results import HeadTypes

PROMPTS = 80  # as many as in the paper, where there are so many
FEATURES = ("sink", "induction", "distance", "entropy")
TYPES = ("sink", "induction", "local", "diffuse")
UNKNOWN = "unknown"  # without induction prompts there are no features


def successors(tokens: Sequence[int]) -> np.ndarray:
    """The place after the latest earlier occurrence of each token, -1 where it is new."""
    places: dict[int, int] = {}
    results = []
    for place, token in enumerate(tokens):
        results.append(places.get(token, -1))
        places[token] = place + 1
    return np.array(results, np.int32)


def averages(features: Columns | None, shape: tuple[int, int]) -> Columns:
    """The features of each head, layers first, averaged over prompts; `prompts` counts them.

    NaN where there are no prompts, or `features` is None.
    """
    L, N = shape
    if features is None or not len(features["layer"]):
        absent = {name: np.full(L * N, np.nan) for name in FEATURES}
        return absent | {"prompts": np.zeros(L * N, int)}
    flat = features["layer"].astype(int) * N + features["head"]
    count = np.bincount(flat, minlength=L * N)
    means = {
        name: np.bincount(flat, features[name].astype(np.float64), L * N) / count
        for name in FEATURES
    }
    return means | {"prompts": count}


def head_type(features: Mapping[str, float]) -> str:
    """sink > 0.3; induction > 0.5; local: distance < 8 and induction < 0.1; else diffuse.

    Unknown where the features are NaN.
    """
    if np.isnan(features["induction"]):
        return UNKNOWN
    if features["sink"] > 0.3:
        return "sink"
    if features["induction"] > 0.5:
        return "induction"
    if features["distance"] < 8 and features["induction"] < 0.1:
        return "local"
    return "diffuse"


def composition(by_head: Columns, top_heads: int) -> HeadTypes:
    """Number of heads of each type, in all and among the top and the bottom K.

    K is `top_heads`, or half of the heads where those are fewer than 2 K: no head is in both.
    """
    total = len(by_head["type"])
    size = min(top_heads, total // 2)
    groups = {
        "all": by_head["rank"] >= 0,
        "top": by_head["rank"] < size,
        "bottom": by_head["rank"] >= total - size,
    }
    counts = {
        name: {kind: int(np.sum(group & (by_head["type"] == kind))) for kind in TYPES}
        for name, group in groups.items()
    }
    return HeadTypes(size, **counts)
