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

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.attention import softmax
from polyattn_jax.columns import Columns
from polyattn_jax.results import HeadTypes

PROMPTS = 80  # as many as in the paper, where there are so many
FEATURES = ("sink", "induction", "distance", "entropy")
TYPES = ("sink", "induction", "local", "diffuse")
UNKNOWN = "unknown"  # without induction prompts there are no features


@struct.dataclass
class HeadProbe:
    """Softmax as an attend that also sums the features over the rows of each prompt.

    `successors_BT` holds for each query the key after the earlier occurrence of its token, -1
    where there is none or the query is padding; `valid_BT` says which queries are no padding.
    """

    successors_BT: jax.Array
    valid_BT: jax.Array

    def __call__(self, scores_BNTS: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        pattern_BNTS = softmax(scores_BNTS)
        queries_T = jnp.arange(scores_BNTS.shape[2], dtype=jnp.int32)
        return pattern_BNTS, self.sums(pattern_BNTS, queries_T, jnp.ones_like(queries_T, bool))

    def sums(
        self, pattern_BNTS: jax.Array, queries_T: jax.Array, counted_T: jax.Array
    ) -> dict[str, jax.Array]:
        """The features `[B, N]` summed over the counted rows of the queries at `queries_T`."""
        S = pattern_BNTS.shape[-1]
        valid_B1T = self.valid_BT[:, queries_T][:, None] & counted_T[None, None]
        planted_B1T = self.successors_BT[:, queries_T][:, None]
        on_planted_B1TS = planted_B1T[..., None] == jnp.arange(S, dtype=jnp.int32)[None, None, None]
        logs_BNTS = jnp.log(jnp.where(pattern_BNTS > 0, pattern_BNTS, 1.0))
        away_BNT = queries_T[None, None] - pattern_BNTS.argmax(-1)
        by_row = {
            "sink": pattern_BNTS[..., 0],
            "induction": jnp.where(on_planted_B1TS, pattern_BNTS, 0.0).sum(-1),
            "distance": away_BNT.astype(pattern_BNTS.dtype),
            "entropy": -(pattern_BNTS * logs_BNTS).sum(-1),
        }
        return {name: jnp.where(valid_B1T, x, 0.0).sum(-1) for name, x in by_row.items()}


def successors(tokens: Sequence[int]) -> np.ndarray:
    """For each token the place after its latest earlier occurrence, -1 where it is new."""
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
