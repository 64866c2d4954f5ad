"""The strongest path of an attribution graph from a token of the prompt to a logit.

With N the absolute weights, each row divided by its sum (`influence`), the influence on a logit is
a sum over all paths that end in it, of the product of N along the path. Those that begin at tokens
and errors, the nodes without inputs, sum to 1 where every feature of the graph has inputs. So the
product of one path is its share of the influence on that logit.
"""

import dataclasses
import graphlib

import numpy as np

from sparse_jax.graphs.influence import FEATURE, TOKEN, Edges, normalised


@dataclasses.dataclass(frozen=True)
class StrongestPath:
    """A path to a logit.

    Attributes:
      sources: sources in the order of the path, a token first; the logit is not one of them.
      share: product of the normalised weights along the path, above 0 and at most 1.
    """

    sources: tuple[int, ...]
    share: float


def strongest(edges: Edges, row: int) -> StrongestPath | None:
    """The path with the largest product from any token through a feature to a logit.

    One pass over the features from those that read lower ones alone upwards: the best path to a
    feature is the best path to one of its sources and their edge.

    Args:
      edges: the graph, without a cycle.
      row: row of the logit.

    Returns:
      The path; if no path from a token passes a feature, the strongest edge from a token; None if
      the logit has none of either. Of equal paths, the one through the source with the lowest
      index.

    Raises:
      graphlib.CycleError: the graph has a cycle.
    """
    share_RS = normalised(edges)
    row_of = {int(node): r for r, node in enumerate(edges.node_R) if node >= 0}
    best_S = (edges.kind_S == TOKEN).astype(np.float64)
    before: dict[int, int] = {}
    inputs = {node: np.flatnonzero(share_RS[r]).tolist() for node, r in row_of.items()}
    for node in graphlib.TopologicalSorter(inputs).static_order():
        if node in row_of:
            through_S = share_RS[row_of[node]] * best_S
            before[node] = int(np.argmax(through_S))
            best_S[node] = through_S[before[node]]
    through_S = share_RS[row] * best_S
    is_feature_S = edges.kind_S == FEATURE
    if through_S[is_feature_S].any():
        through_S = np.where(is_feature_S, through_S, 0.0)
    last = int(np.argmax(through_S))
    share = float(through_S[last])
    if not share:
        return None
    path = [last]
    while path[-1] in before:
        path.append(before[path[-1]])
    return StrongestPath(tuple(reversed(path)), share)
