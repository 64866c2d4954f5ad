"""Attribution graph of a prompt: `attribute(model, transcoder, tokens) -> Graph`.

One forward pass records what is frozen; one downward pass of cotangents for each chunk of targets
gives their rows (`linear.attribution_rows`). Positions, layers and features of targets are data:
prompts of one length compile once, but for the number of active features, which is rounded up.
"""

from collections.abc import Sequence
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax.errors import UsageError
from lm_jax.model.layers import unembedding
from lm_jax.model.precision import exact_jit, exact_products
from lm_jax.weights.load import Pretrained
from lm_jax.weights.runs import TrainedRun
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.circuits.source_model import SourceModel
from sparse_jax.gates.model import SparseModel
from sparse_jax.graphs import linear
from sparse_jax.graphs.basis import Features
from sparse_jax.graphs.graph import SCHEMA, Graph
from sparse_jax.graphs.influence import BIAS, ERROR, FEATURE, LOGIT, TOKEN
from sparse_jax.graphs.linear import Targets
from sparse_jax.graphs.replacement import Replacement, check, check_ids, record
from sparse_jax.graphs.rows import ActiveFeatures, FeatureRows, RowFiller, feature_rows

# Logit nodes: the most probable tokens until this share, at most so many (circuit-tracer).
SHARE, MOST_LOGITS = 0.95, 10

# What `circuit_model` takes, besides folders.
Model = CircuitModel | Pretrained | SparseModel | TrainedRun


def attribute(
    model: Model | str | os.PathLike[str],
    transcoder: Features,
    tokens: Sequence[int] | np.ndarray,
    *,
    targets: Sequence[int] | None = None,
    against: Sequence[int] | None = None,
    max_features: int | None = None,
) -> Graph:
    """The attribution graph of a prompt's last logits (paper, section 4.3 and App. G).

    Everything is computed in float32 with the highest precision of matrix products, whatever the
    dtype of the parameters. All positions have nodes, the first too.

    Args:
      model: a dense or sparse model, or a trained run whose mixer can be frozen
        (`lm_jax.model.frozen`); or the folder of one, or the work folder of a training that
        exported one.
      transcoder: a transcoder of the model's raw activations (`Transcoder.folded`), or its neurons
        (`neurons.Neurons`).
      tokens: ids of the prompt, `[T]`.
      targets: ids of the logit nodes; None for the most probable tokens until .95 together, at
        most 10.
      against: ids whose mean logit is taken from that of each target, so that `targets=[right],
        against=[wrong]` explains a logit difference; None for the mean over the vocabulary.
      max_features: how many features get a row, found greedily by influence; None for all. The
        others stay sources of those rows.

    Raises:
      UsageError: the model, transcoder and tokens do not go together, or no feature is active.
    """
    prompt, feature_LTF = prepare(model, transcoder, tokens, targets, against)
    replacement, features = prompt.replacement, prompt.features
    table = ActiveFeatures.of(feature_LTF)
    # Of a long prompt they are as large as all else together.
    del feature_LTF
    if max_features is not None and max_features < 1:
        raise UsageError(f"max_features = {max_features} must be at least 1, or None for all")
    with exact_products():
        rows = RowFiller(replacement, features, table)
        logits = prompt.logit_targets()
        computed = feature_rows(rows, logits, prompt.probabilities, max_features)
    return assemble(prompt, table, computed)


def assemble(prompt: "Prompt", table: ActiveFeatures, computed: FeatureRows) -> Graph:
    """The graph of a prompt.

    Args:
      prompt: the frozen model.
      table: the prompt's active features, the first columns of `computed`.
      computed: rows, with columns for features, errors and tokens, features in order.
    """
    replacement = prompt.replacement
    # A feature that is active has its pre-activation for its activation.
    pre_X = table.activation_X[computed.chosen]
    first_logit = computed.weights.shape[1]
    nodes = _nodes(
        table, prompt.tokens, prompt.ids, prompt.logits, *replacement.error_LTD.shape[:2]
    )
    return Graph(
        nodes=nodes,
        adjacency=computed.weights,
        bias=computed.biases,
        row_nodes=np.concatenate([computed.chosen, first_logit + np.arange(len(prompt.ids))]),
        readings=np.concatenate([pre_X, prompt.logits]),
        probabilities=prompt.probabilities,
        directions=prompt.directions,
        replacement=replacement,
        transcoder=prompt.features,
        against=prompt.against,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt of a frozen model with its logit nodes.

    Attributes:
      tokens: ids `[T]`.
      replacement: the frozen model.
      features: the features that stand for its MLPs, with what is frozen of them.
      ids: ids of the logit nodes.
      probabilities, logits: probabilities and demeaned logits of these nodes, by the model itself.
      directions: `[logits, D]` of the unembedding, minus its mean over the vocabulary.
      against: ids over which that mean and the logits' are taken in place of the vocabulary; None
        for all of it.
    """

    tokens: np.ndarray
    replacement: Replacement
    features: Features
    ids: np.ndarray
    probabilities: np.ndarray
    logits: np.ndarray
    directions: np.ndarray
    against: np.ndarray | None = None

    def logit_targets(self) -> Targets:
        """The logits as readings."""
        return _logit_targets(self.replacement, jnp.asarray(self.directions))


def circuit_model(model: Model | str | os.PathLike[str]) -> CircuitModel:
    """A model of `attribute`, read from its folder where it is one.

    Raises:
      BadInputError: there is no such model in the folder.
    """
    if isinstance(model, str | os.PathLike):
        return SourceModel.load(os.fspath(model)).model
    return model if isinstance(model, CircuitModel) else CircuitModel.of(model)


def prepare(
    model: Model | str | os.PathLike[str],
    features: Features,
    tokens: Sequence[int] | np.ndarray,
    targets: Sequence[int] | None,
    against: Sequence[int] | None = None,
) -> tuple[Prompt, jax.Array]:
    """What `attribute` starts from, and activations `[L, T, F]`, by one forward pass.

    Arguments and errors are those of `attribute`.
    """
    model, tokens = circuit_model(model), np.asarray(tokens)
    features = features.for_model(model.params, model.cfg)
    check(model, features, tokens)
    with exact_products():
        replacement, feature_LTF = _record(model, features, jnp.asarray(tokens, jnp.int32))
        probability_V = np.asarray(replacement.probability_V)
        ids = _logit_ids(probability_V, targets, model)
        against_ids = _against_ids(against, ids, model)
        directions_XD, demeaned_X = _directions(
            *(model.params, replacement, jnp.asarray(ids), model.cfg),
            None if against_ids is None else jnp.asarray(against_ids),
        )
        prompt = Prompt(
            tokens=tokens,
            replacement=replacement,
            features=features.for_prompt(replacement.input_LTD),
            ids=ids,
            probabilities=probability_V[ids],
            logits=np.asarray(demeaned_X),
            directions=np.asarray(directions_XD),
            against=against_ids,
        )
        return prompt, feature_LTF


_record = exact_jit(record)
# One program: of its operations alone, each would be compiled before a first graph.
_logit_targets = exact_jit(linear.logit_targets)


@functools.partial(exact_jit, static_argnums=3)
def _directions(params, replacement, ids_X, cfg, against_Y):
    """Rows of the unembedding minus their mean, and logits minus theirs."""
    w_VD = unembedding(params, cfg).astype(jnp.float32)
    logits_V = replacement.logits_V
    other_YD, other_Y = (x if against_Y is None else x[against_Y] for x in (w_VD, logits_V))
    return w_VD[ids_X] - other_YD.mean(0, keepdims=True), logits_V[ids_X] - other_Y.mean()


def _logit_ids(
    probability_V: np.ndarray, targets: Sequence[int] | None, model: CircuitModel
) -> np.ndarray:
    if targets is not None:
        ids = np.asarray(targets)
        if ids.ndim != 1 or not ids.size or len(np.unique(ids)) < len(ids):
            raise UsageError(f"targets: {list(targets)} must be different token ids, one at least")
        check_ids("targets", ids, model.cfg)
        return ids.astype(np.int32)
    order = np.argsort(-probability_V, kind="stable")[:MOST_LOGITS]
    count = int(np.searchsorted(np.cumsum(probability_V[order], dtype=np.float64), SHARE)) + 1
    return order[:count].astype(np.int32)


def _against_ids(
    against: Sequence[int] | None, ids: np.ndarray, model: CircuitModel
) -> np.ndarray | None:
    if against is None:
        return None
    others = np.asarray(against)
    if others.ndim != 1 or not others.size or len(np.unique(others)) < len(others):
        raise UsageError(f"against: {list(against)} must be different token ids, one at least")
    check_ids("against", others, model.cfg)
    if shared := np.intersect1d(ids, others).tolist():
        raise UsageError(
            f"against: {shared} are targets, too, and differ from themselves by 0; name others"
        )
    return others.astype(np.int32)


def _nodes(
    table: ActiveFeatures,
    tokens: np.ndarray,
    ids: np.ndarray,
    logits_X: np.ndarray,
    L: int,
    T: int,
) -> pa.Table:
    X, last = len(ids), T - 1
    parts = [
        (FEATURE, table.layer_X, table.position_X, table.feature_X, table.activation_X),
        (ERROR, np.repeat(np.arange(L), T), np.tile(np.arange(T), L), None, None),
        (TOKEN, None, np.arange(T), tokens, None),
        (LOGIT, np.full(X, L), np.full(X, last), ids, logits_X),
        (BIAS, None, None, None, None),
    ]
    tables = []
    for kind, *columns in parts:
        size = max((len(column) for column in columns if column is not None), default=1)
        arrays = [pa.array([kind] * size, pa.string())]
        for column, field in zip(columns, list(SCHEMA)[1:], strict=True):
            arrays.append(
                pa.nulls(size, field.type) if column is None else pa.array(column).cast(field.type)
            )
        tables.append(pa.Table.from_arrays(arrays, schema=SCHEMA))
    return pa.concat_tables(tables).combine_chunks()
