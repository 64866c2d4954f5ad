"""Measurements of how a model adds: exact sums, open edges, and what answer digits attend to.

The paper reads two statements off its figures: in layer 0 each digit of the answer attends to the
digits to be added, and in layer 1 to the carry, but only if it is needed. Both are counted here
over all held-out sums. "Attends" means an open edge in that layer. With p the position of an answer
digit:

    operands  the edges from p to the two operand digits of its place
    carry     an edge from p to any other position that by then holds information on a digit of the
              next lower place: the lower operands themselves, or a position with a path of open
              edges to them

The second count is wide on purpose: no position is marked as "the carry", but a carry can be known
only from these. Chance is what as many edges from p would give if they led to random positions
among those visible to p (hypergeometric).
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from lm_jax import statistics
from lm_jax.statistics import Interval
from sparse_jax.studies.addition import problems
from sparse_jax.studies.addition.attention_trace import AttentionTrace, Tracer
from sparse_jax.studies.addition.results import (
    Accuracy,
    CarryAttention,
    EdgeCounts,
    LayerAblation,
    OperandAttention,
    Place,
)

PLACES: tuple[Place, ...] = get_args(Place)
# An edge of the dense model with a weight below this is as good as closed.
NEGLIGIBLE = 0.01


def rate(hits: ArrayLike) -> Interval:
    """Share of true entries, with its Wilson interval."""
    return statistics.wilson(int(np.count_nonzero(hits)), np.size(hits))


def mean(values_P: np.ndarray, seed: int) -> Interval:
    """Mean over problems, with its bootstrap interval."""
    return statistics.cluster_interval(values_P, np.arange(len(values_P)), seed=seed)


def accuracy(trace: AttentionTrace, numbers_P: np.ndarray) -> Accuracy:
    """Share of exact sums, of all problems and by their number of carries."""
    carries_P = problems.carries(numbers_P)
    by_carries = {
        str(count): rate(trace.exact_P[carries_P == count])
        for count in np.unique(carries_P).tolist()
    }
    return Accuracy(rate(trace.exact_P), by_carries)


def edges(trace: AttentionTrace, seed: int) -> EdgeCounts:
    """Open edges of a sum: in all layers, in each, and those whose weight is not negligible."""
    heavy_LP = (trace.pattern_LPTS >= NEGLIGIBLE).sum((2, 3))
    T = trace.pattern_LPTS.shape[2]
    return EdgeCounts(
        all=mean(trace.edges_LP.sum(0), seed),
        by_layer=tuple(mean(edges_P, seed) for edges_P in trace.edges_LP),
        heavy=mean(heavy_LP.sum(0), seed),
        possible=len(trace.edges_LP) * sum(map(trace.visible, range(T))),
    )


def operands(trace: AttentionTrace, layer: int) -> tuple[OperandAttention, ...]:
    """How often the ones and the tens of the answer attend to their operands in a layer."""
    results = []
    for place, sources in enumerate(problems.OPERANDS):
        at = problems.ANSWERS[place]
        visible = trace.visible(at)
        open_PS = trace.open_LPTS[layer, :, at, :visible]
        count_P = open_PS.sum(1)
        hits_P = open_PS[:, sources]
        weight_PS = trace.pattern_LPTS[layer, :, at, :visible]
        results.append(
            OperandAttention(
                place=PLACES[place],
                layer=layer,
                both=rate(hits_P.all(1)),
                both_by_chance=float(_chance_of_all(count_P, visible, len(sources)).mean()),
                each=rate(hits_P.ravel()),
                each_by_chance=float((count_P / visible).mean()),
                reached=rate(_reached(trace.open_LPTS, sources, at)),
                edges=float(count_P.mean()),
                weight=float(weight_PS[:, sources].sum() / max(weight_PS.sum(), 1e-9)),
            )
        )
    return tuple(results)


def carry(trace: AttentionTrace, numbers_P: np.ndarray, layer: int) -> tuple[CarryAttention, ...]:
    """How often the tens and the hundreds attend to a carry in a layer, by whether there is one."""
    carried_PD = problems.carried(numbers_P)
    results = []
    for place in (1, 2):
        at = problems.ANSWERS[place]
        visible = trace.visible(at)
        informed_PS = informed(trace.open_LPTS[:layer], problems.OPERANDS[place - 1])[:, :visible]
        # What p itself holds needs no edge, and says nothing about this layer.
        informed_PS[:, at] = False
        open_PS = trace.open_LPTS[layer, :, at, :visible]
        hits_P = np.any(open_PS & informed_PS, axis=1)
        chance_P = 1 - _chance_of_none(open_PS.sum(1), visible, informed_PS.sum(1))
        for needed in (True, False):
            chosen_P = carried_PD[:, place] == needed
            if chosen_P.any():
                results.append(
                    CarryAttention(
                        place=PLACES[place],
                        layer=layer,
                        carry=needed,
                        attends=rate(hits_P[chosen_P]),
                        by_chance=float(chance_P[chosen_P].mean()),
                    )
                )
    return tuple(results)


def informed(open_LPTS: np.ndarray, sources: Sequence[int]) -> np.ndarray:
    """Positions that hold information on `sources` after some layers, bool `[P, T]`.

    A position keeps its information, and gets that of every position that it has an open edge to.
    """
    P, T = open_LPTS.shape[1:3]
    informed_PT = np.zeros((P, T), bool)
    informed_PT[:, list(sources)] = True
    for open_PTS in open_LPTS:
        informed_PT = informed_PT | (open_PTS & informed_PT[:, None]).any(2)
    return informed_PT


def ablate_layers(
    tracer: Tracer, weights: Mapping[str, Any], numbers_P: np.ndarray, layers: int
) -> tuple[LayerAblation, ...]:
    """Share of exact sums when all edges of one layer are closed, for every layer."""
    tokens_PS = problems.rows(numbers_P)
    T = problems.READ
    results = []
    for layer in range(layers):
        kept_LTS = np.ones((layers, T, T), np.float32)
        kept_LTS[layer] = 0
        closed = tracer(weights, tokens_PS, kept_LTS=kept_LTS)
        results.append(LayerAblation(layer, rate(closed.exact_P)))
    return tuple(results)


def _reached(open_LPTS: np.ndarray, sources: Sequence[int], at: int) -> np.ndarray:
    """Whether every one of `sources` has a path to the position `at`, bool `[P]`."""
    return np.all([informed(open_LPTS, (source,))[:, at] for source in sources], axis=0)


def _chance_of_all(drawn: np.ndarray, among: int, wanted: int) -> np.ndarray:
    """Probability that `drawn` of `among` items include all of `wanted` ones."""
    ways = special.comb(among - wanted, drawn - wanted)
    return np.asarray(ways / special.comb(among, drawn))


def _chance_of_none(drawn: np.ndarray, among: int, unwanted: np.ndarray) -> np.ndarray:
    """Probability that `drawn` of `among` items include none of `unwanted` ones."""
    return np.asarray(special.comb(among - unwanted, drawn) / special.comb(among, drawn))
