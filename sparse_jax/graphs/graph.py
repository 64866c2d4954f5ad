"""Attribution graph of one prompt: nodes, edges, certificates, mediation, pruning, scores.

Nodes are rows of one table, in this order:

    feature   layer, position, feature (its index in the layer), activation
    error     layer, position
    token     position, feature (its id)
    logit     layer L, last position, feature (its id), activation (demeaned logit)
    bias      everything constant, one node

Entry [r, s] of the adjacency matrix is what source s adds to row r's reading: the pre-activation of
a feature (not times its activation), or a logit minus the mean over the vocabulary or over the
tokens that it is explained against, before a soft cap. Sources are features, errors and tokens: the
nodes before the logits. Each row and its bias sum to the reading.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import operator
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax import report
from lm_jax.errors import UsageError
from lm_jax.model.frozen.attention import FrozenAttention
from lm_jax.model.precision import exact_jit, exact_products
from lm_jax.text.tokenizer import Tokenizer
from sparse_jax.graphs import graph_document, graph_json, influence, linear, mediation, qk
from sparse_jax.graphs.basis import Features, writes
from sparse_jax.graphs.influence import (
    ERROR,
    FEATURE,
    LOGIT,
    TOKEN,
    Edges,
    Pruned,
    Scores,
)
from sparse_jax.graphs.linear import Sources, Targets
from sparse_jax.graphs.mediation import Mediation
from sparse_jax.graphs.qk import QK
from sparse_jax.graphs.replacement import Replacement
from sparse_jax.graphs.rows import ActiveFeatures, RowFiller

SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("layer", pa.int32()),
        ("position", pa.int32()),
        ("feature", pa.int32()),
        ("activation", pa.float32()),
    ]
)
SOURCE_KINDS = (FEATURE, ERROR, TOKEN)
# Open entries of patterns are gathered where this many times as many are closed.
_GATHERED = 16


@dataclasses.dataclass(frozen=True)
class GraphScores:
    """Scores of the whole graph, and of the pruned one with what it removed counted as error."""

    unpruned: Scores
    pruned: Scores


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """An attribution graph; see the head of this file.

    Attributes:
      nodes: table of `SCHEMA`.
      adjacency: float32 `[rows, sources]`.
      bias: float32 `[rows]`.
      row_nodes: index in `nodes` of each row: features with a row, then logits.
      readings: the forward pass's value of what each row reads, float32 `[rows]`.
      probabilities: probabilities of the logit nodes, by the model itself.
      directions: `[logits, D]` of the unembedding, minus its mean over the vocabulary.
      replacement: the frozen model that the graph describes.
      transcoder: the transcoder, or the neurons, whose features it has, with what is frozen of
        them.
      against: ids over which that mean is taken in place of the vocabulary; None for all of it.
    """

    nodes: pa.Table
    adjacency: np.ndarray
    bias: np.ndarray
    row_nodes: np.ndarray
    readings: np.ndarray
    probabilities: np.ndarray
    directions: np.ndarray = dataclasses.field(repr=False)
    replacement: Replacement = dataclasses.field(repr=False)
    transcoder: Features = dataclasses.field(repr=False)
    against: np.ndarray | None = None

    def __repr__(self) -> str:
        """How many nodes of each kind there are, and how many have a row."""
        counts = (f"{count:,} {kind}s" for kind, count, _ in self._counts())
        return f"Graph({', '.join(counts)}; {len(self.row_nodes):,} rows)"

    def _repr_html_(self) -> str:
        heads = ["kind", "nodes", "with a row"]
        return report.table(heads, list(self._counts()), caption="Attribution graph of a prompt.")

    def _counts(self) -> Iterator[tuple[str, int, int]]:
        kinds, with_row = self.kinds.tolist(), self.kinds[self.row_nodes].tolist()
        return ((kind, kinds.count(kind), with_row.count(kind)) for kind in (*SOURCE_KINDS, LOGIT))

    @property
    def kinds(self) -> np.ndarray:
        """Kind of each node."""
        return self._column("kind")

    @property
    def num_sources(self) -> int:
        """Columns of the adjacency matrix."""
        return self.adjacency.shape[1]

    def certificate(self) -> np.ndarray:
        """Largest error of a row per layer of its reading `[L + 1]`, logits last.

        The error is the difference between row sum plus bias and the reading of the forward pass,
        relative to the sum of the absolute entries of the row and its bias.
        """
        weight = self.adjacency.astype(np.float64)
        bias = self.bias.astype(np.float64)
        error_R = np.abs(weight.sum(1) + bias - self.readings)
        error_R = error_R / np.maximum(np.abs(weight).sum(1) + np.abs(bias), _tiny())
        largest = np.zeros(len(self.replacement.error_LTD) + 1)
        np.maximum.at(largest, self._column("layer")[self.row_nodes], error_R)
        return largest

    def mediation(self, source: int, target: int) -> np.ndarray:
        """Share of every head, query and key position in an edge, `[L, N, T, S]` (paper, Eq. 7).

        Args:
          source: index in `nodes`.
          target: index in `nodes`.
        """
        return np.asarray(next(self.mediations([(source, target)])).score_XLNTS[0])

    def mediations(
        self,
        edges: Sequence[tuple[int, int]] | np.ndarray,
        *,
        batch: int = 256,
        by_head: bool = False,
    ) -> Iterator[Mediation]:
        """Mediation of many edges, in order, in batches of this size (the last may be smaller).

        Batches with at most as many different sources together share the passes upwards from these;
        each has its own downwards from its targets. `mediation.by_source` makes both few.

        Args:
          edges: pairs of source and target, indices in `nodes`.
          batch: edges at a time; the memory holds their scores, `[batch, L, N, T, T]`, and the
            tangents and values of as many sources, `[batch, L, T, D]`.
          by_head: whether scores are summed over pairs, `[batch, L, N, 1, 1]`, as for long prompts.

        Raises:
          UsageError: a source is a logit or the bias, a target neither feature nor logit.
        """
        pairs = np.asarray(edges, np.int64).reshape(-1, 2)
        self.check_kinds(pairs[:, 0], SOURCE_KINDS, "source")
        self.check_kinds(pairs[:, 1], (FEATURE, LOGIT), "target")
        if not len(pairs):
            return
        size = min(batch, len(pairs))
        with exact_products():
            for block in mediation.batches_with_few_sources(pairs[:, 0], size):
                nodes, source_X = _fill_up(pairs[block, 0], size, size)
                sources = self.sources(nodes)
                tangents = _tangents(self.replacement, sources)
                for start in range(0, len(source_X), size):
                    at_X = source_X[start : start + size]
                    some = pairs[block][start : start + size]
                    nodes, target_X = _fill_up(some[:, 1], -(-size // 4), size)
                    missing = size - len(some)
                    mediated = _mediate_edges(
                        self.replacement,
                        *(sources, tangents, np.pad(at_X, (0, missing))),
                        *(self.targets(nodes), np.pad(target_X, (0, missing))),
                        None if by_head else self._open_pairs,
                        by_head=by_head,
                    )
                    # As numpy, whose slices are not compiled.
                    leaves = jax.tree.map(np.asarray, mediated)
                    yield jax.tree.map(operator.itemgetter(slice(len(some))), leaves)

    def qk(self, layer: int, head: int, query: int, key: int) -> QK:
        """Why a head looked there: the score by sources at the query and at the key (Fig. 8).

        Args:
          layer: layer of the head.
          head: index of the query head, where keys are shared by several heads.
          query: position.
          key: position, no later than the query.

        Raises:
          UsageError: there is no such score.
        """
        place = layer, head, query, key
        qk.check(self.replacement, *place)
        with exact_products():
            targets = _qk_targets(self.replacement, *place)
            rows, biases = self._rows.of(targets, entering=True)
        return qk.of_rows(self.replacement, place, rows, biases, self.nodes.num_rows - 1)

    @functools.cached_property
    def _open_pairs(self) -> np.ndarray | None:
        """Where attention is open, if that is rare enough to gather it (`tools.bench.graphs`)."""
        mixer = self.replacement.layers.mixer
        if not isinstance(mixer, FrozenAttention):
            return None
        pattern_LNTS = np.asarray(mixer.pattern_LNTS)
        open_L3P = mediation.open_pairs(pattern_LNTS)
        return open_L3P if _GATHERED * open_L3P[0, 0].size <= pattern_LNTS[0].size else None

    @functools.cached_property
    def _rows(self) -> RowFiller:
        count = int((self.kinds == FEATURE).sum())
        layer_X, position_X, feature_X, activation_X = (
            self._column(name)[:count] for name in ("layer", "position", "feature", "activation")
        )
        T = len(self.replacement.token_TD)
        features = ActiveFeatures(layer_X, position_X, feature_X, activation_X, T)
        return RowFiller(self.replacement, self.transcoder, features)

    def edge_weights(self, edges: Sequence[tuple[int, int]] | np.ndarray) -> np.ndarray:
        """Entries of the adjacency matrix for pairs of source and target, indices in `nodes`.

        Raises:
          UsageError: a target has no row.
        """
        pairs = np.asarray(edges, np.int64).reshape(-1, 2)
        row_of = np.full(self.nodes.num_rows, -1)
        row_of[self.row_nodes] = np.arange(len(self.row_nodes))
        without = pairs[row_of[pairs[:, 1]] < 0, 1]
        if without.size:
            raise UsageError(f"target: node {without[0]} has no row; raise max_features")
        return self.adjacency[row_of[pairs[:, 1]], pairs[:, 0]]

    def prune(self, *, node_threshold: float = 0.8, edge_threshold: float = 0.95) -> Pruned:
        """Nodes and edges that carry most of the logits' influence (`influence.prune`)."""
        return influence.prune(
            self.edges(), node_threshold=node_threshold, edge_threshold=edge_threshold
        )

    def scores(self, pruned: Pruned | None = None) -> GraphScores:
        """Replacement and completeness scores; `pruned` is from `prune`, or that of its defaults.

        Features without a row (beyond `max_features`) are left out of the unpruned scores.
        """
        edges = self.edges()
        with_row = edges.kind_S != FEATURE
        with_row[edges.node_R[edges.node_R >= 0]] = True
        kept_S = (self.prune() if pruned is None else pruned).kept_S
        return GraphScores(
            influence.scores(edges.without(with_row)), influence.scores(edges, kept_S)
        )

    def to_json(
        self,
        path: str | os.PathLike[str],
        *,
        tokenizer: Tokenizer | None = None,
        model_name: str = "model",
        node_threshold: float = 0.8,
        edge_threshold: float = 0.95,
    ) -> None:
        """Prunes the graph and writes it in the schema of Neuronpedia and circuit-tracer.

        `graph_document.document` writes more: mediation, attention scores, interventions, labels.

        Args:
          path: path of the file; its stem, of letters, digits, `-` and `_`, names the graph.
          tokenizer: the tokenizer, for the texts of tokens; without one they are ids.
          model_name: the name by which viewers group graphs.
          node_threshold: the node threshold of `prune`.
          edge_threshold: the edge threshold of `prune`.

        Raises:
          BadInputError: the stem has other characters.
          StorageError: the file cannot be written.
        """
        kinds, ids = self.kinds, self._column("feature")

        def text(i: int) -> str:
            return tokenizer.piece(i) if tokenizer else str(i)

        def texts(kind: str) -> list[str]:
            return [text(i) for i in ids[kinds == kind].tolist()]

        thresholds = {"node_threshold": node_threshold, "edge_threshold": edge_threshold}
        document = graph_document.document(
            self,
            self.prune(**thresholds),
            slug=Path(path).stem,
            model_name=model_name,
            tokens=texts(TOKEN),
            logit_tokens=[each + self.minus(text) for each in texts(LOGIT)],
            **thresholds,
        )
        graph_json.write(path, document)

    def edges(self) -> Edges:
        """The graph as pruning and scores read it."""
        is_logit_R = np.asarray(self._column("kind"))[self.row_nodes] == LOGIT
        start_R = np.zeros(len(self.row_nodes))
        start_R[is_logit_R] = self.probabilities
        kind_S = self._column("kind")[: self.num_sources]
        layer_S = self._column("layer")[: self.num_sources]
        position_S = self._column("position")[: self.num_sources]
        T = self.replacement.token_TD.shape[0]
        first_error = int((kind_S == FEATURE).sum())
        error_S = np.where(kind_S == FEATURE, first_error + layer_S * T + position_S, -1)
        return Edges(
            self.adjacency, np.where(is_logit_R, -1, self.row_nodes), start_R, kind_S, error_S
        )

    def sources(self, nodes: np.ndarray) -> Sources:
        """What nodes add to the residual stream."""
        kind, layer, position, feature, activation = (
            self._column(name)[nodes] for name in SCHEMA.names
        )
        return _sources(
            self.replacement,
            self.transcoder,
            {each: kind == each for each in SOURCE_KINDS},
            *(layer, position, feature, activation.astype(self.adjacency.dtype)),
        )

    def minus(self, text: Callable[[int], str]) -> str:
        """What follows the name of a logit: the tokens that it is explained against, if any.

        Args:
          text: text of a token.
        """
        if self.against is None:
            return ""
        return f" − {', '.join(text(i).strip() for i in self.against.tolist())}"

    def targets(self, nodes: np.ndarray) -> Targets:
        """What nodes read of the residual stream."""
        kind, layer, position, feature, _ = (self._column(name)[nodes] for name in SCHEMA.names)
        is_logit = kind == LOGIT
        first_logit = int(np.argmax(self._column("kind") == LOGIT))
        direction_XD = self.directions[np.where(is_logit, nodes - first_logit, 0)]
        places = layer, position, feature
        return _targets(self.replacement, self.transcoder, direction_XD, is_logit, *places)

    def _column(self, name: str) -> np.ndarray:
        # Where a node has no layer, feature or activation, -1.
        column = self.nodes[name]
        return (column if name == "kind" else column.fill_null(-1)).to_numpy(zero_copy_only=False)

    def check_kinds(self, nodes: np.ndarray, kinds: tuple[str, ...], role: str) -> None:
        """Raises for a node that is not of one of the kinds.

        Raises:
          UsageError: naming `role` and the node.
        """
        for node in nodes:
            if not 0 <= node < self.nodes.num_rows:
                raise UsageError(
                    f"{role}: there is no node {node}; nodes are 0..{self.nodes.num_rows - 1}"
                )
            kind = self.nodes["kind"][int(node)].as_py()
            if kind not in kinds:
                raise UsageError(f"{role}: node {node} is a {kind}; give one of {', '.join(kinds)}")


def _tiny() -> float:
    return float(np.finfo(np.float32).tiny)


@exact_jit
def _sources(replacement, features, is_kind, layer_X, position_X, feature_X, activation_X):
    """`Sources` of nodes; `is_kind` has for each kind whether they are of it."""
    of_features = (jnp.where(is_kind[FEATURE], x, 0) for x in (layer_X, feature_X, activation_X))
    write_LXD = writes(features, *of_features)
    own_LX = (jnp.arange(len(write_LXD))[:, None] == layer_X[None]) & is_kind[ERROR][None]
    write_LXD = jnp.where(own_LX[:, :, None], replacement.error_LTD[:, position_X], write_LXD)
    token_XD = jnp.where(is_kind[TOKEN][:, None], replacement.token_TD[position_X], 0.0)
    return Sources(position_X, write_LXD.swapaxes(0, 1), token_XD)


@exact_jit
def _targets(replacement, features, direction_XD, is_logit_X, layer_X, position_X, feature_X):
    """`Targets` of nodes, of which logits have directions."""
    places = (jnp.where(is_logit_X, 0, x) for x in (layer_X, position_X, feature_X))
    of_features = linear.feature_targets(replacement, features, *places)
    of_logits = linear.logit_targets(replacement, direction_XD)

    def choose(feature: jax.Array, logit: jax.Array) -> jax.Array:
        return jnp.where(is_logit_X.reshape(-1, *[1] * (feature.ndim - 1)), logit, feature)

    return jax.tree.map(choose, of_features, of_logits)


_qk_targets = exact_jit(qk.targets)


_tangents = exact_jit(linear.tangents)
_mediate_edges = exact_jit(mediation.mediate_edges, static_argnames="by_head")


def _fill_up(ends_X: np.ndarray, least: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The different ends, the last one repeated up to one of few sizes, and each end's index.

    Sizes are `least` times powers of two, up to `most`: few are compiled.
    """
    ends, index_X = np.unique(ends_X, return_inverse=True)
    size = min(least << (-(-len(ends) // least) - 1).bit_length(), most)
    return np.pad(ends, (0, size - len(ends)), mode="edge"), index_X
