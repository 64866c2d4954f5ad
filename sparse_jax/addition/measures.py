"""What the edges of a model say about how it adds, as measured shares.

The paper reads two things off its figures: in layer 0 each digit of the answer attends to the
digits to be added, and in layer 1 to the carry, only if it is needed. Both are counted here over
all held-out sums. "Attends" means an open edge in that layer. With p the place of an answer digit:

    digits   the edges from p to the two operand digits of its place
    carry    an edge from p to any other place that by then holds a digit of the next lower place:
             the lower operands themselves, and whatever has a path of open edges from them

The second is wide on purpose. No place is marked as "the carry", but whoever learns of a carry must
have it from there. Chance is what as many edges from p would give if they led to places drawn at
random, among those that p sees (hypergeometric).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from lm_jax import statistics
from lm_jax.statistics import Interval
from sparse_jax.addition import problems
from sparse_jax.addition.attention_trace import AttentionTrace, Trace

PLACES = ("ones", "tens", "hundreds")
# A dense edge below this weight is as good as closed.
SLIGHT = 0.01


def rate(hits: ArrayLike) -> dict[str, Any]:
    """A share of truths with its Wilson interval."""
    return _plain(statistics.wilson(int(np.count_nonzero(hits)), np.size(hits)))


def mean(values_P: np.ndarray, seed: int) -> dict[str, Any]:
    """A mean over problems with its bootstrap interval."""
    result = statistics.clustered_bootstrap(values_P, np.arange(len(values_P)), seed=seed)
    return _plain(result)


def interval(given: Mapping[str, Any]) -> Interval:
    """An interval as a summary holds it."""
    return Interval(**given)


def accuracy(seen: AttentionTrace, numbers_P: np.ndarray) -> dict[str, Any]:
    """The share of exact sums, of all problems and by their number of carries."""
    times_P = problems.carries(numbers_P)
    by_carries = {
        str(times): rate(seen.exact_P[times_P == times]) for times in np.unique(times_P).tolist()
    }
    return {"all": rate(seen.exact_P), "by_carries": by_carries}


def edges(seen: AttentionTrace, seed: int) -> dict[str, Any]:
    """Open edges of a sum: in all layers, in each, and those of a weight that is not slight."""
    heavy_LP = (seen.pattern_LPTS >= SLIGHT).sum((2, 3))
    T = seen.pattern_LPTS.shape[2]
    return {
        "all": mean(seen.edges_LP.sum(0), seed),
        "by_layer": [mean(edges_P, seed) for edges_P in seen.edges_LP],
        "heavy": mean(heavy_LP.sum(0), seed),
        "possible": len(seen.edges_LP) * T * (T + 1) // 2,
    }


def operands(seen: AttentionTrace, layer: int) -> list[dict[str, Any]]:
    """How often the ones and the tens of the answer attend to their digits in a layer.

    `reached` is how often both have some path of open edges to the digit, through whatever places.
    """
    results = []
    for place, sources in enumerate(problems.OPERANDS):
        at = problems.ANSWERS[place]
        open_PS = seen.open_LPTS[layer, :, at, : at + 1]
        count_P = open_PS.sum(1)
        hits_P = open_PS[:, sources]
        weight_PS = seen.pattern_LPTS[layer, :, at, : at + 1]
        results.append(
            {
                "place": PLACES[place],
                "layer": layer,
                "both": rate(hits_P.all(1)),
                "both_by_chance": float(_all_drawn(count_P, at + 1, len(sources)).mean()),
                "each": rate(hits_P.ravel()),
                "each_by_chance": float((count_P / (at + 1)).mean()),
                "reached": rate(_reached(seen.open_LPTS, sources, at)),
                "edges": float(count_P.mean()),
                "weight": float(weight_PS[:, sources].sum() / max(weight_PS.sum(), 1e-9)),
            }
        )
    return results


def carry(seen: AttentionTrace, numbers_P: np.ndarray, layer: int) -> list[dict[str, Any]]:
    """How often the tens and the hundreds attend to a carry in a layer, by whether there is one."""
    carried_PD = problems.carried(numbers_P)
    results = []
    for place in (1, 2):
        at = problems.ANSWERS[place]
        held_PS = holders(seen.open_LPTS[:layer], problems.OPERANDS[place - 1])[:, : at + 1]
        # What p itself holds needs no edge, and says nothing about this layer.
        held_PS[:, at] = False
        open_PS = seen.open_LPTS[layer, :, at, : at + 1]
        hits_P = np.any(open_PS & held_PS, axis=1)
        chance_P = 1 - _none_drawn(open_PS.sum(1), at + 1, held_PS.sum(1))
        for needed in (True, False):
            these = carried_PD[:, place] == needed
            if these.any():
                results.append(
                    {
                        "place": PLACES[place],
                        "layer": layer,
                        "carry": needed,
                        "attends": rate(hits_P[these]),
                        "by_chance": float(chance_P[these].mean()),
                    }
                )
    return results


def holders(open_LPTS: np.ndarray, sources: Sequence[int]) -> np.ndarray:
    """The places that hold something of `sources` after some layers, bool `[P, T]`.

    A place holds what it held before, and what any place holds that it has an open edge to.
    """
    P, T = open_LPTS.shape[1:3]
    held_PT = np.zeros((P, T), bool)
    held_PT[:, list(sources)] = True
    for open_PTS in open_LPTS:
        held_PT = held_PT | (open_PTS & held_PT[:, None]).any(2)
    return held_PT


def without_a_layer(
    look: Trace, weights: Mapping[str, Any], numbers_P: np.ndarray, seen: AttentionTrace
) -> list[dict[str, Any]]:
    """Exact sums when all edges of one layer are closed, for every layer: are they needed?"""
    L, _, T = seen.pattern_LPTS.shape[:3]
    tokens_PS = problems.rows(numbers_P)
    results = []
    for layer in range(L):
        kept_LTS = np.ones((L, T, T), np.float32)
        kept_LTS[layer] = 0
        closed = look(weights, tokens_PS, kept_LTS=kept_LTS)
        results.append({"layer": layer, "exact": rate(closed.exact_P)})
    return results


def _reached(open_LPTS: np.ndarray, sources: Sequence[int], at: int) -> np.ndarray:
    """Whether every one of `sources` has a path to the place `at`, bool `[P]`."""
    return np.all([holders(open_LPTS, (source,))[:, at] for source in sources], axis=0)


def _all_drawn(drawn: np.ndarray, among: int, wanted: int) -> np.ndarray:
    """The chance that `drawn` of `among` things hold all of `wanted` ones."""
    ways = special.comb(among - wanted, drawn - wanted)
    return np.asarray(ways / special.comb(among, drawn))


def _none_drawn(drawn: np.ndarray, among: int, unwanted: np.ndarray) -> np.ndarray:
    """The chance that `drawn` of `among` things hold none of `unwanted` ones."""
    return np.asarray(special.comb(among - unwanted, drawn) / special.comb(among, drawn))


def _plain(result: Interval) -> dict[str, Any]:
    return {"estimate": result.estimate, "low": result.low, "high": result.high, "n": result.n}
