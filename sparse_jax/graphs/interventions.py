"""Interventions in the model against what an attribution graph predicts of them.

A source of the graph (a feature, an error, a token) is multiplied by a factor: what it adds to the
residual stream is added factor - 1 times more. The graph predicts that each target's reading shifts
by factor - 1 times the entry of the adjacency matrix. The model runs with its MLPs replaced by the
transcoder and errors as they were, in three modes:

    frozen             attention patterns, divisors of norms and all other features are those of the
                       clean run: the graph's prediction is exact
    attention_frozen   attention patterns are; norms and features respond
    free               all respond

Where features respond, effects pass through them, which a graph has in its paths and not in its
direct entries: how well entries rank effects there is a measurement, not a check.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.edits import Add, Replace
from lm_jax.model.frozen import frozen_sites, mixer_sites, mlp_norm_sites
from lm_jax.model.layers import unembedding
from lm_jax.model.sites import keep
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs.basis import Features
from sparse_jax.graphs.effects import MODES, Effects, Mode
from sparse_jax.graphs.graph import PRECISION, SOURCE_KINDS, Graph
from sparse_jax.graphs.influence import LOGIT, TOKEN
from sparse_jax.graphs.linear import Sources
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
      model: that the graph is of.
      graph: of one prompt.
      interventions: pairs of a source (index in `graph.nodes`) and a factor: 0 removes it, 2
        doubles it, the paper's steering takes -5 and -10.
      modes: which to measure.
      batch: interventions at a time.

    Raises:
      UsageError: the model is another one, a node is no source, or a factor is not finite.
    """
    nodes = np.array([node for node, _ in interventions], np.int64)
    factors = np.array([factor for _, factor in interventions], np.float64)
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"modes: {mode!r} is not one of {', '.join(MODES)}")
    if not nodes.size:
        raise UsageError("interventions: none given; name a source and a factor")
    graph.check_kinds(nodes, SOURCE_KINDS, "interventions")
    if not np.isfinite(factors).all():
        raise UsageError("interventions: a factor is not finite; 0 removes a source")
    tokens_T = _tokens(graph)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    model = dataclasses.replace(model, params=params)
    _check_model(model, graph, tokens_T)
    is_logit = graph.kinds[graph.row_nodes] == LOGIT
    measured: dict[Mode, np.ndarray] = {}
    with jax.default_matmul_precision(PRECISION):
        for mode in modes:
            parts = []
            for start in range(0, len(nodes), batch):
                some, by = nodes[start : start + batch], factors[start : start + batch]
                # Filled up with factor 1, so that one size is compiled; the first is the clean run.
                by = np.pad(by, (1, batch - len(by)), constant_values=1.0)
                some = np.pad(some, (1, batch - len(some)), mode="edge")
                shift_BR = _shifts(model, graph, tokens_T, graph.sources(some), by - 1.0, mode)
                parts.append(shift_BR[1 : 1 + len(nodes[start : start + batch])])
            measured[mode] = np.concatenate(parts)
    predicted = (factors[:, None] - 1.0) * graph.adjacency.astype(np.float64)[:, nodes].T
    return Effects(nodes, factors, graph.row_nodes, is_logit, predicted, measured)


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
    with jax.default_matmul_precision(PRECISION):
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


@jax.jit
def _clean_logits(model, tokens_T):
    """Logits `[V]` at the last position before a soft cap, and sums of their absolute terms."""
    hidden_D = model.forward(tokens_T[None], jnp.ones((1, len(tokens_T)), bool)).hidden[0, -1]
    w_VD = unembedding(model.params, model.cfg)
    return w_VD @ hidden_D, jnp.abs(w_VD) @ jnp.abs(hidden_D)


def _shifts(
    model: CircuitModel,
    graph: Graph,
    tokens_T: np.ndarray,
    sources: Sources,
    strength_B: np.ndarray,
    mode: Mode,
) -> np.ndarray:
    """Shifts of the rows' readings `[B, R]` from those of the first of B interventions."""
    is_feature_R = graph.kinds[graph.row_nodes] != LOGIT
    table = graph.nodes.take(graph.row_nodes[is_feature_R])
    layer, position, feature = (
        jnp.asarray(np.asarray(table[name], np.int32)) for name in ("layer", "position", "feature")
    )
    input_LBTD, hidden_BD = _run(
        model,
        graph.transcoder,
        graph.replacement.error_LTD,
        jnp.asarray(tokens_T),
        sources,
        jnp.asarray(strength_B, jnp.float32),
        mode=mode,
    )
    vector_XD, _ = graph.transcoder.readings(layer, position, feature)
    input_XBD = np.asarray(input_LBTD[layer, :, position])
    hidden_BD = np.asarray(hidden_BD)
    shift_BR = np.empty((len(strength_B), len(is_feature_R)), np.float64)
    # Differences before products: what did not move is then exactly 0.
    shift_BR[:, is_feature_R] = np.einsum(
        "XBD,XD->BX", input_XBD - input_XBD[:, :1], np.asarray(vector_XD)
    )
    shift_BR[:, ~is_feature_R] = (hidden_BD - hidden_BD[:1]) @ graph.directions.T
    return shift_BR


@functools.partial(jax.jit, static_argnames="mode")
def _run(model, features, error_LTD, tokens_T, sources, strength_B, *, mode):
    """Inputs of MLPs `[L, B, T, D]` and the last hidden state `[B, D]` of B interventions."""
    at_BT1 = (sources.position_X[:, None] == jnp.arange(len(tokens_T))[None])[:, :, None]
    at_BT1 = at_BT1 * strength_B[:, None, None]
    added_LBTD = sources.write_XLD.swapaxes(0, 1)[:, :, None] * at_BT1[None]
    embedding_BTD = sources.embedding_XD[:, None] * at_BT1
    frozen = {
        # Scores are not computed from, where patterns are frozen: per-head norms need not be.
        "frozen": (*frozen_sites(model.cfg, model.mixer), *mlp_norm_sites(model.cfg)),
        "attention_frozen": mixer_sites(model.mixer),
        "free": (),
    }[mode]
    tokens_BT = jnp.broadcast_to(tokens_T, (len(strength_B), len(tokens_T)))
    valid_BT = jnp.ones_like(tokens_BT, bool)
    record = dict.fromkeys([*frozen, "mlp.out"], keep)
    clean = model.forward(tokens_BT[:1], valid_BT[:1], record=record).records
    edits: dict[str, Any] = {name: _replaced(clean[name]) for name in frozen}
    if mode == "frozen":
        edits |= {"mlp.out": _replaced(clean["mlp.out"] + added_LBTD), "embed": Add(embedding_BTD)}
    else:
        edits |= responding(features, error_LTD, added_LBTD, embedding_BTD)
    run = model.forward(tokens_BT, valid_BT, edits=edits, record={"mlp.in": keep})
    return run.records["mlp.in"], run.hidden[:, -1]


def _replaced(value: jax.Array) -> Replace:
    return Replace(value, jnp.ones([value.shape[0]] + [1] * (value.ndim - 1), bool))


@functools.singledispatch
def responding(
    features: Features, error_LTD: jax.Array, added_LBTD: jax.Array, embedding_BTD: jax.Array
) -> Mapping[str, Any]:
    """Edits by which MLPs are their features, which respond, plus errors and what is added.

    Args:
      features: of the model's MLPs.
      error_LTD: MLP outputs of the clean run minus what its features reconstruct.
      added_LBTD: to the outputs of MLPs.
      embedding_BTD: added to the embedding.
    """
    raise NotImplementedError(f"{type(features).__name__} has no forward pass of its own")


@responding.register
def _(
    features: Transcoder, error_LTD: jax.Array, added_LBTD: jax.Array, embedding_BTD: jax.Array
) -> Mapping[str, Any]:
    return substitute(
        features,
        jnp.ones(embedding_BTD.shape[:2], bool),
        written_LBTD=added_LBTD + error_LTD[:, None],
        embedding_BTD=embedding_BTD,
    )
