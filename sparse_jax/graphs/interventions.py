"""Interventions in the model against what an attribution graph predicts of them.

A source of the graph (a feature, an error, a token) is multiplied by a factor: the activation of a
feature is set to that multiple of its clean value, an error or a token is added factor - 1 times
more. The graph predicts that each target's reading shifts by factor - 1 times the entry of the
adjacency matrix. The model runs with its MLPs replaced by the transcoder and errors as they were,
in three modes:

    frozen             attention patterns, divisors of norms and all other features keep the values
                       of the clean run: the graph's prediction is exact
    attention_frozen   attention patterns keep them; norms and features respond
    free               all respond

Where features respond, effects pass through them, which a graph has in its paths and not in its
direct entries: how well entries rank effects there is a measurement, not a check. `groups` scales
several sources at once.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.edits import Add, Chain
from lm_jax.model.frozen import frozen_sites, mixer_sites, mlp_norm_sites
from lm_jax.model.layers import unembedding
from lm_jax.model.precision import exact_jit, exact_products
from lm_jax.model.sites import StatefulEdit, keep
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs.basis import Features
from sparse_jax.graphs.effects import MODES, Effects, Mode
from sparse_jax.graphs.graph import SOURCE_KINDS, Graph
from sparse_jax.graphs.influence import FEATURE, LOGIT, TOKEN
from sparse_jax.graphs.rows import rounded
from sparse_jax.transcoders.substitution import substitute
from sparse_jax.transcoders.transcoder import Transcoder


def measure(
    model: CircuitModel,
    graph: Graph,
    interventions: Sequence[tuple[int, float]],
    *,
    modes: Sequence[Mode] = MODES,
    batch: int = 16,
) -> Effects:
    """Effects of interventions on all rows of a graph, predicted and measured.

    Args:
      model: the model that the graph describes.
      graph: graph of one prompt.
      interventions: pairs of a source (index in `graph.nodes`) and a factor: 0 removes it, 2
        doubles it, the paper's steering takes -5 and -10.
      modes: modes to measure.
      batch: interventions at a time.

    Raises:
      UsageError: the model is another one, a node is no source, or a factor is not finite.
    """
    nodes = np.array([node for node, _ in interventions], np.int64)
    factors = np.array([factor for _, factor in interventions], np.float64)
    if not nodes.size:
        raise UsageError("interventions: none given; name a source and a factor")
    graph.check_kinds(nodes, SOURCE_KINDS, "interventions")
    model = checked(model, graph, factors, modes)
    is_logit = graph.kinds[graph.row_nodes] == LOGIT
    measured: dict[Mode, np.ndarray] = {}
    for mode in modes:
        runs = run_scaled(model, graph, nodes[:, None], factors, mode=mode, batch=batch)
        measured[mode] = np.concatenate([shifts(graph, run)[1:] for run in runs])
    predicted = (factors[:, None] - 1.0) * graph.adjacency.astype(np.float64)[:, nodes].T
    return Effects(nodes, factors, graph.row_nodes, is_logit, predicted, measured)


def checked(
    model: CircuitModel, graph: Graph, factors: np.ndarray, modes: Sequence[Mode]
) -> CircuitModel:
    """The model in float32, as `run_scaled` takes it.

    Raises:
      UsageError: it is not that of the graph, a mode is unknown, or a factor is not finite.
    """
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"modes: {mode!r} is not one of {', '.join(MODES)}")
    if not np.isfinite(factors).all():
        raise UsageError("interventions: a factor is not finite; 0 removes a source")
    params = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    model = dataclasses.replace(model, params=params)
    _check_model(model, graph, _tokens(graph))
    return model


def _tokens(graph: Graph) -> np.ndarray:
    return np.asarray(graph.nodes["feature"])[graph.kinds == TOKEN].astype(np.int32)


def _check_model(model: CircuitModel, graph: Graph, tokens_T: np.ndarray) -> None:
    """Raises where a clean run is not the one that the graph recorded.

    Two runs in float32 differ by their rounding: a roundoff for every addition on the longest path
    to a logit, in each, times the sum of the logit's absolute terms. A dense model and its sparse
    version, which may share embeddings, are farther apart.
    """
    cfg, replacement = model.cfg, graph.replacement
    L, T, D = replacement.error_LTD.shape
    recorded_V = np.asarray(replacement.logits_V)
    if (cfg.num_layers, cfg.hidden_size, cfg.vocab_size) != (L, D, len(recorded_V)):
        raise UsageError("model: its sizes are not those of the graph's model; give that one")
    with exact_products():
        logits_V, size_V = map(np.asarray, _clean_logits(model, jnp.asarray(tokens_T)))
    # Norms, queries, scores, softmax, values, outputs and the MLP of a layer; last norm, logits.
    additions = 4 * D + cfg.head_dim + 2 * T + cfg.num_heads * cfg.head_dim + cfg.mlp_size
    roundoff = (L * additions + 2 * D) * np.finfo(np.float32).eps / 2
    off_V = np.abs(logits_V - recorded_V)
    if not (off_V <= 2 * roundoff * size_V).all():
        raise UsageError(
            f"model: its logits on the graph's prompt are up to {off_V.max():.2g} from those of "
            "the graph's model; give the model that the graph is of"
        )


@exact_jit
def _clean_logits(model, tokens_T):
    """Logits `[V]` at the last position before a soft cap, and sums of their absolute terms."""
    hidden_D = model.forward(tokens_T[None], jnp.ones((1, len(tokens_T)), bool)).hidden[0, -1]
    w_VD = unembedding(model.params, model.cfg)
    return w_VD @ hidden_D, jnp.abs(w_VD) @ jnp.abs(hidden_D)


# Bytes for what is added to all layers of a batch of runs, and for the inputs that they record.
_MEMORY = 512 * 2**20
# Scaled sources are filled up to so many, which costs nothing beside the model.
_FEW = 64


@struct.dataclass
class Run:
    """Forward passes of which the first is the clean one.

    Attributes:
      input_LBTD: inputs of the features.
      hidden_BD: hidden state at the last position, after the last norm.
    """

    input_LBTD: jax.Array
    hidden_BD: jax.Array


def run_scaled(
    model: CircuitModel,
    graph: Graph,
    groups: Sequence[np.ndarray] | np.ndarray,
    factors: np.ndarray,
    *,
    mode: Mode,
    batch: int = 16,
) -> Iterator[Run]:
    """Runs in each of which a group of sources is multiplied by a factor, a batch at a time.

    Args:
      model: the model in float32, from `checked`.
      graph: graph of one prompt.
      groups: different sources of each intervention, indices in `graph.nodes`, one or more.
      factors: one per group.
      mode: what is frozen.
      batch: the most interventions at a time, fewer of a long prompt; each batch has a clean run
        of its own before them.
    """
    batch = max(min(batch, _MEMORY // (8 * graph.replacement.error_LTD.size)), 1)
    # Batches of about one size, so that few rows are filled up.
    batch = -(-len(groups) // -(-len(groups) // batch))
    starts = range(0, len(groups), batch)
    # Few sizes are compiled, of graphs of one length too.
    most = max(sum(map(len, groups[start : start + batch])) for start in starts)
    most = max(rounded(most), _FEW)
    tokens_T = jnp.asarray(_tokens(graph))
    for start in starts:
        some = groups[start : start + batch]
        sizes = [len(group) for group in some]
        node_X = np.concatenate(some)
        missing = most - len(node_X)
        # Filled up with the clean run times 1.
        node_X = np.pad(node_X, (0, missing), mode="edge")
        row_X = np.pad(np.repeat(np.arange(len(some)), sizes) + 1, (0, missing))
        factor_X = np.repeat(factors[start : start + batch], sizes)
        factor_X = np.pad(factor_X, (0, missing), constant_values=1.0).astype(np.float32)
        is_feature_X = graph.kinds[node_X] == FEATURE
        # The scaled activation of a feature that responds takes the place of an addition.
        added_X = np.where(is_feature_X & (mode != "frozen"), 0.0, factor_X - 1.0)
        with exact_products():
            run = _run(
                model,
                graph.transcoder,
                graph.replacement.error_LTD,
                tokens_T,
                graph.sources(node_X),
                jnp.asarray(row_X),
                jnp.asarray(added_X, jnp.float32),
                _scaled(graph, node_X, row_X, factor_X),
                mode=mode,
                size=batch + 1,
            )
        rows = len(some) + 1
        yield Run(run.input_LBTD[:, :rows], run.hidden_BD[:rows])


def logit_shifts(graph: Graph, run: Run) -> np.ndarray:
    """Shifts of the demeaned logits `[B, K]` from those of the clean run."""
    hidden_BD = np.asarray(run.hidden_BD)
    # Differences before products: what did not move is then exactly 0.
    return (hidden_BD - hidden_BD[:1]) @ graph.directions.T


def shifts(graph: Graph, run: Run) -> np.ndarray:
    """Shifts of the rows' readings `[B, R]` from those of the clean run."""
    is_feature_R = graph.kinds[graph.row_nodes] != LOGIT
    places = _places(graph, graph.row_nodes[is_feature_R])
    shift_BR = np.empty((len(run.hidden_BD), len(is_feature_R)), np.float64)
    with exact_products():
        shift_BR[:, is_feature_R] = _feature_shifts(graph.transcoder, run.input_LBTD, *places)
    shift_BR[:, ~is_feature_R] = logit_shifts(graph, run)
    return shift_BR


@exact_jit
def _feature_shifts(features, input_LBTD, layer_X, position_X, feature_X):
    """Shifts of pre-activations `[B, X]` from those of the first run."""
    vector_XD, _ = features.readings(layer_X, position_X, feature_X)
    input_XBD = input_LBTD[layer_X, :, position_X]
    return jnp.einsum("XBD,XD->BX", input_XBD - input_XBD[:, :1], vector_XD)


def _places(graph: Graph, nodes: np.ndarray) -> tuple[jax.Array, ...]:
    """Layers, positions and indices of features."""
    table = graph.nodes.take(nodes)
    names = ("layer", "position", "feature")
    return tuple(jnp.asarray(np.asarray(table[name], np.int32)) for name in names)


@struct.dataclass
class ScaledActivations(StatefulEdit):
    """Some activations `[B, T, F]` of a layer as multiples of those of the first row.

    Attributes:
      row_X, position_X, feature_X: row, position and index of each scaled feature; an index beyond
        F belongs to another layer.
      factor_X: the multiples.
      skip_start: first tokens without features (`basis.Features.skip_start`).
    """

    row_X: jax.Array
    position_X: jax.Array
    feature_X: jax.Array
    factor_X: jax.Array
    skip_start: int = struct.field(pytree_node=False, default=0)

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        x = x.at[:, : self.skip_start].set(0.0)
        clean_X = x[0].at[self.position_X, self.feature_X].get(mode="fill", fill_value=0.0)
        at = x.at[self.row_X, self.position_X, self.feature_X]
        return at.set(self.factor_X * clean_X, mode="drop"), state


def _scaled(
    graph: Graph, node_X: np.ndarray, row_X: np.ndarray, factor_X: np.ndarray
) -> ScaledActivations:
    """The edit of all layers, leaves with a leading L, that scales the features among nodes."""
    table = graph.nodes.take(node_X)
    layer_X, position_X, feature_X = (
        table[name].fill_null(-1).to_numpy() for name in ("layer", "position", "feature")
    )
    L = len(graph.replacement.error_LTD)
    own_LX = (np.arange(L)[:, None] == layer_X) & (graph.kinds[node_X] == FEATURE)
    feature_LX = np.where(own_LX, feature_X, np.iinfo(np.int32).max)
    leaves = (row_X, position_X, feature_LX, factor_X)
    arrays = (jnp.asarray(np.broadcast_to(leaf, own_LX.shape)) for leaf in leaves)
    return ScaledActivations(*arrays, skip_start=graph.transcoder.skip_start)


@functools.partial(exact_jit, static_argnames=("mode", "size"))
def _run(model, features, error_LTD, tokens_T, sources, row_X, added_X, scaled, *, mode, size):
    """Runs `size` rows, with sources added `added_X` times more to their rows, or scaled."""
    L, T, D = error_LTD.shape
    write_LXD = sources.write_XLD.swapaxes(0, 1) * added_X[None, :, None]
    embedding_XD = sources.embedding_XD * added_X[:, None]
    at = row_X, sources.position_X
    added_LBTD = jnp.zeros((L, size, T, D), jnp.float32).at[:, *at].add(write_LXD)
    embedding_BTD = jnp.zeros((size, T, D), jnp.float32).at[at].add(embedding_XD)
    frozen = {
        # Scores are not computed from, where patterns are frozen: per-head norms need not be.
        "frozen": (*frozen_sites(model.cfg, model.mixer), *mlp_norm_sites(model.cfg)),
        "attention_frozen": mixer_sites(model.mixer),
        "free": (),
    }[mode]
    tokens_BT = jnp.broadcast_to(tokens_T, (size, T))
    valid_BT = jnp.ones_like(tokens_BT, bool)
    edits: dict[str, Any] = dict.fromkeys(frozen, _LikeFirst())
    if mode == "frozen":
        edits |= {"mlp.out": Chain((_LikeFirst(), Add(added_LBTD))), "embed": Add(embedding_BTD)}
        if (skip_LDD := features.skip_LDD) is not None:
            # MLP outputs respond through W_skip alone.
            edits |= {
                "embed": _StartSkip(embedding_BTD),
                features.site: _ReadSkip(skip_LDD),
                "mlp.out": _WriteSkip(added_LBTD),
            }
    else:
        edits |= responding(features, error_LTD, added_LBTD, embedding_BTD, scaled)
    run = model.forward(tokens_BT, valid_BT, edits=edits, record={features.site: keep})
    return Run(run.records[features.site], run.hidden[:, -1])


@struct.dataclass
class _LikeFirst:
    """All rows of a batch as the first, the clean run."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:1], x.shape)


@struct.dataclass
class _StartSkip(StatefulEdit):
    """The edit at the embedding: additions, and room for what W_skip of a layer adds."""

    added_BTD: jax.Array

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        del state
        return x + self.added_BTD, jnp.zeros_like(x)


@struct.dataclass
class _ReadSkip(StatefulEdit):
    """The edit at the features' input: what W_skip makes of its difference from the clean run."""

    skip_DD: jax.Array

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        del state
        return x, jnp.einsum("BTD,ED->BTE", x - x[:1], self.skip_DD)


@struct.dataclass
class _WriteSkip(StatefulEdit):
    """The edit at MLP outputs: those of the clean run, what is added, and what W_skip adds."""

    added_BTD: jax.Array

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return x[:1] + self.added_BTD + state, state


@functools.singledispatch
def responding(
    features: Features,
    error_LTD: jax.Array,
    added_LBTD: jax.Array,
    embedding_BTD: jax.Array,
    scaled: ScaledActivations,
) -> Mapping[str, Any]:
    """Edits that replace MLPs by features that respond, plus errors and what is added.

    Args:
      features: features of the model's MLPs.
      error_LTD: MLP outputs of the clean run minus what its features reconstruct.
      added_LBTD: vectors added to the outputs of MLPs.
      embedding_BTD: vectors added to the embedding.
      scaled: multiples that some of the features' activations are set to; leaves have a leading L.
    """
    raise NotImplementedError(f"{type(features).__name__} has no forward pass of its own")


@responding.register
def _(
    features: Transcoder,
    error_LTD: jax.Array,
    added_LBTD: jax.Array,
    embedding_BTD: jax.Array,
    scaled: ScaledActivations,
) -> Mapping[str, Any]:
    return substitute(
        features,
        jnp.ones(embedding_BTD.shape[:2], bool),
        written_LBTD=added_LBTD + error_LTD[:, None],
        embedding_BTD=embedding_BTD,
        activations=scaled,
    )
