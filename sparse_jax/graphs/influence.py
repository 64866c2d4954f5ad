"""Influence of nodes on the logits of an attribution graph, pruning by it, and scores.

With N = |A|, each row divided by its sum (biases apart), and p the probabilities of the logits,

    I = p N + p N N + ...                                        influence of each node
    replacement   I of tokens / (I of tokens + I of errors)
    completeness  sum over nodes of (1 - share of errors in the node's row) (I + p) / sum of (I + p)

as circuit-tracer defines them. Completeness is over all nodes, where tokens and errors, which have
no inputs, are complete; or over nodes with inputs alone. Scores of a pruned graph first move what
removed features contribute to the error at the same layer and position.
"""

from collections.abc import Iterator
import dataclasses

import numpy as np

from lm_jax.errors import UsageError

# Kinds of nodes: sources, then the others.
FEATURE, ERROR, TOKEN = "feature", "error", "token"
LOGIT, BIAS = "logit", "bias"
LEAST_SUM = 1e-10
# Weights at a time in float64: of long rows one.
_AT_ONCE = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Edges:
    """The adjacency matrix of a graph with what pruning must know of its nodes.

    Attributes:
      weight_RS: attribution to each row of each source.
      node_R: the row's node as a source; -1 for logits.
      start_R: probability of logits, 0 for features.
      kind_S: kind of each source.
      error_S: the error at each feature's layer and position; -1 for other sources.
    """

    weight_RS: np.ndarray
    node_R: np.ndarray
    start_R: np.ndarray
    kind_S: np.ndarray
    error_S: np.ndarray

    def without(self, kept_S: np.ndarray) -> "Edges":
        """The edges without the sources that are not kept, and without their rows."""
        kept_R = (self.node_R < 0) | kept_S[self.node_R]
        kept_RS = kept_R[:, None] & kept_S[None]
        return dataclasses.replace(self, weight_RS=np.where(kept_RS, self.weight_RS, 0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class Pruned:
    """What is kept of a graph.

    Attributes:
      kept_S: sources; tokens always.
      kept_RS: edges.
      influence_S: influence of each source, before pruning.
      share_S: cumulative share of influence of all sources that have at least as much.
      score_RS: the logits' influence that passes each edge between kept nodes.
    """

    kept_S: np.ndarray
    kept_RS: np.ndarray
    influence_S: np.ndarray
    share_S: np.ndarray
    score_RS: np.ndarray


@dataclasses.dataclass(frozen=True)
class Scores:
    """How much of a graph features explain; definitions in the head of this file.

    Attributes:
      replacement: share of tokens in the influence of tokens and errors.
      completeness: completeness over all nodes.
      completeness_with_inputs: completeness over features and logits.
    """

    replacement: float
    completeness: float
    completeness_with_inputs: float


def normalised(edges: Edges) -> np.ndarray:
    """N: absolute weights, each row divided by its sum."""
    size_RS = np.abs(np.asarray(edges.weight_RS, np.float64))
    return size_RS / np.maximum(size_RS.sum(1, keepdims=True), LEAST_SUM)


def influence(edges: Edges, size_R: np.ndarray | None = None) -> np.ndarray:
    """I of every source `[S]`; N is not formed, of which large graphs have gigabytes.

    Args:
      edges: the graph.
      size_R: `row_sizes` of its weights, where they are known.
    """
    size_R = row_sizes(edges.weight_RS) if size_R is None else size_R
    is_node_R = edges.node_R >= 0
    between_RR = np.abs(np.asarray(edges.weight_RS[:, edges.node_R[is_node_R]], np.float64))
    between_RR /= size_R[:, None]
    share_R = through_rows(between_RR, is_node_R, edges.start_R) / size_R
    total_S = np.zeros(edges.weight_RS.shape[1])
    for at, part_RS in _sizes(edges.weight_RS):
        total_S += share_R[at] @ part_RS
    return total_S


def through_rows(between_RX: np.ndarray, is_node_R: np.ndarray, start_R: np.ndarray) -> np.ndarray:
    """What of the logits' probabilities passes through each row `[R]`: I + p.

    Args:
      between_RX: N of the rows' own nodes as sources, in the order of those rows.
      is_node_R: mask of those rows; the others are logits.
      start_R: probability of logits, 0 for features.

    Raises:
      UsageError: the graph has a cycle.
    """
    weight_R = start_R.astype(np.float64)
    through_R = weight_R.copy()
    # A path has at most one row per layer, and the matrix no cycle: as many steps end it.
    for _ in range(len(weight_R) + 1):
        step_R = np.zeros_like(weight_R)
        step_R[is_node_R] = weight_R @ between_RX
        if not step_R.any():
            return through_R
        through_R += step_R
        weight_R = step_R
    raise UsageError("adjacency: the graph has a cycle; features must read lower layers alone")


def row_sizes(weight_RS: np.ndarray) -> np.ndarray:
    """Sum of absolute weights of each row, which N divides by."""
    size_R = np.zeros(len(weight_RS))
    for at, part_RS in _sizes(weight_RS):
        size_R[at] = np.maximum(part_RS.sum(1), LEAST_SUM)
    return size_R


def _sizes(weight_RS: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Absolute weights, some rows at a time, in float64."""
    rows = max(_AT_ONCE // max(weight_RS.shape[1], 1), 1)
    for start in range(0, len(weight_RS), rows):
        at = slice(start, start + rows)
        yield at, np.abs(weight_RS[at], dtype=np.float64)


def prune(edges: Edges, *, node_threshold: float = 0.8, edge_threshold: float = 0.95) -> Pruned:
    """The nodes and edges that carry most of the influence.

    Args:
      edges: the graph.
      node_threshold: share of the influence of all sources that kept ones have together; 1 keeps
        all.
      edge_threshold: share of the edges' scores; the paper's is .95, circuit-tracer's .98.

    Raises:
      UsageError: a threshold is not within (0, 1].
    """
    for name, value in (("node_threshold", node_threshold), ("edge_threshold", edge_threshold)):
        if not 0 < value <= 1:
            raise UsageError(f"{name} = {value} is not above 0 and at most 1; 0.8 is usual")
    influence_S = influence(edges)
    kept_S, share_S = largest(influence_S, node_threshold)
    kept_S |= edges.kind_S == TOKEN
    pruned = edges.without(kept_S)
    score_RS = edge_scores(pruned)
    kept_RS, _ = largest(score_RS.reshape(-1), edge_threshold)
    kept_RS = kept_RS.reshape(score_RS.shape)
    is_feature_S, is_error_S = edges.kind_S == FEATURE, edges.kind_S == ERROR
    while True:
        # A node without edges explains nothing; its removal may leave others without.
        kept_R = (edges.node_R < 0) | kept_S[edges.node_R]
        kept_RS &= kept_R[:, None] & kept_S[None]
        read_S = kept_RS.any(0)
        reads_S = np.zeros_like(read_S)
        reads_S[edges.node_R[(edges.node_R >= 0) & kept_RS.any(1)]] = True
        bare_S = (is_feature_S & ~(read_S & reads_S)) | (is_error_S & ~read_S)
        if not (kept_S & bare_S).any():
            break
        kept_S = kept_S & ~bare_S
    return Pruned(kept_S, kept_RS, influence_S, share_S, score_RS)


def edge_scores(edges: Edges) -> np.ndarray:
    """How much of the logits' influence passes through each edge, `[R, S]`."""
    return normalised(edges) * _through(edges, influence(edges))[:, None]


def _through(edges: Edges, influence_S: np.ndarray) -> np.ndarray:
    """I + p of every row: what of the logits passes through its node."""
    return np.where(edges.node_R < 0, edges.start_R, influence_S[edges.node_R])


def largest(value_X: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The fewest entries that have this share of the sum, and each entry's cumulative share."""
    # Most entries of a pruned graph are 0: none of them is needed, and sorting them takes long.
    some_X = np.flatnonzero(value_X)
    if share < 1 and 0 < len(some_X) < len(value_X):
        kept_X, share_X = np.zeros(len(value_X), bool), np.ones(len(value_X))
        kept_X[some_X], share_X[some_X] = largest(value_X[some_X], share)
        return kept_X, share_X
    order_X = np.argsort(-value_X, kind="stable")
    cumulative_X = np.cumsum(value_X[order_X])
    if len(cumulative_X) and cumulative_X[-1] > 0:
        cumulative_X /= cumulative_X[-1]
    share_X = np.empty_like(cumulative_X)
    share_X[order_X] = cumulative_X
    # Of share 1, rounding of the sum must not drop the last.
    count = len(value_X) if share == 1 else int(np.searchsorted(cumulative_X, share)) + 1
    kept_X = np.zeros(len(value_X), bool)
    kept_X[order_X[:count]] = True
    return kept_X, share_X


def highest(value_X: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest values, highest first, of equal ones the first before others.

    As a stable sort of the indices has them, which takes ten times as long as one of the values.
    """
    if 0 < count < len(value_X):
        some_X = np.flatnonzero(value_X >= np.partition(value_X, -count)[-count])
    else:
        some_X = np.arange(len(value_X))
    return some_X[np.argsort(-value_X[some_X], kind="stable")][:count]


def scores(edges: Edges, kept_S: np.ndarray | None = None) -> Scores:
    """Scores of a graph, or of what pruning kept of it.

    Args:
      edges: the graph.
      kept_S: sources that are kept; what other features contribute counts as error. Errors and
        tokens are never removed here.
    """
    if kept_S is not None:
        edges = _move_to_errors(edges, kept_S)
    influence_S = influence(edges)
    is_error_S, is_token_S = edges.kind_S == ERROR, edges.kind_S == TOKEN
    tokens, errors = influence_S[is_token_S].sum(), influence_S[is_error_S].sum()
    through_R = _through(edges, influence_S)
    from_errors_R = np.abs(edges.weight_RS[:, is_error_S], dtype=np.float64).sum(1)
    complete_R = 1.0 - from_errors_R / row_sizes(edges.weight_RS)
    inputs, all_nodes = through_R.sum(), influence_S.sum() + edges.start_R.sum()
    explained = (complete_R * through_R).sum()
    # Nodes without a row have nothing from errors.
    without_row = all_nodes - inputs
    return Scores(
        float(tokens / (tokens + errors)),
        float((explained + without_row) / all_nodes),
        float(explained / inputs),
    )


def _move_to_errors(edges: Edges, kept_S: np.ndarray) -> Edges:
    """The edges with each removed feature's column added to the error at its layer and position."""
    moved_S = (edges.kind_S == FEATURE) & ~kept_S
    weight_RS = np.array(edges.weight_RS, np.float64)
    for error in np.unique(edges.error_S[moved_S]):
        weight_RS[:, error] += weight_RS[:, moved_S & (edges.error_S == error)].sum(1)
    weight_RS[:, moved_S] = 0.0
    return dataclasses.replace(edges, weight_RS=weight_RS).without(~moved_S)
