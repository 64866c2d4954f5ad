"""Edge pruning: a circuit of component edges found by gradient descent on masks.

After Bhaskar et al. 2024. Every edge has a hard-concrete mask (Louizos et al. 2018) in [0, 1]; a
reader reads the mask times the writer's value plus the rest times its ablated value. Trained is

    KL(model || circuit) + l1 (s - t) + l2 (s - t)^2

where s is the expected share of open masks, t the share to reach, lowered linearly from the start,
and l1 and l2 follow the gradient upwards, so that s comes to t. The KL divergence is of next-token
distributions at the position of the answer. Masks start from the ranking of an attribution, such as
EAP-IG, and the edges of highest parameter are the circuit: exactly as many as asked for.
"""

import dataclasses
import functools
import math
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.special import ndtri

from lm_jax.errors import UsageError
from lm_jax.run.settings import Bound, PositiveFloat, PositiveInt, Settings
from sparse_jax.circuits.component_ablation import ablate_edges
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.discover import component_values
from sparse_jax.circuits.runs import Batch, CircuitModel

# Stretch of the concrete distribution and its temperature (Louizos et al. 2018).
LOW, HIGH, TEMPERATURE = -0.1, 1.1, 2.0 / 3.0


@dataclasses.dataclass(frozen=True)
class EdgePruningConfig(Settings):
    """Settings of the optimisation.

    Attributes:
      steps: number of updates.
      learning_rate: learning rate of Adam, for masks.
      multiplier_rate: learning rate of Adam, for l1 and l2.
      ramp: share of the steps in which t falls to its end.
      start, spread: log alpha of the median edge at the start, and of one standard deviation of the
        ranking; a spread of 0 starts all edges alike.

    Raises:
      UsageError: a field that cannot be used.
    """

    where: ClassVar[str] = "edge pruning: "

    steps: PositiveInt = 400
    learning_rate: PositiveFloat = 0.1
    multiplier_rate: PositiveFloat = 0.1
    ramp: Annotated[float, Bound("in (0, 1]", lambda value: 0 < value <= 1)] = 0.7
    start: float = 2.0
    spread: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class PrunedEdges:
    """The circuit and how the optimisation went.

    Attributes:
      log_alpha_UR: parameters of the masks; -inf where there is no edge. A ranking for
        `discover.component_curve`.
      kept_UR: the edges of highest parameter, as many as asked for.
      kl: KL divergence from the model with sampled masks, by step, in nats.
      share: expected share of open masks, by step.
    """

    log_alpha_UR: np.ndarray
    kept_UR: np.ndarray
    kl: np.ndarray
    share: np.ndarray


# What the updates change: "log_alpha" (axes UR) and "multipliers", l1 and l2, which go upwards.
_Trained = dict[str, jax.Array]


def mask_of(log_alpha: jax.Array, uniform: jax.Array) -> jax.Array:
    """Hard-concrete masks in [0, 1] of uniform draws in (0, 1)."""
    noise = jnp.log(uniform) - jnp.log1p(-uniform)
    stretched = jax.nn.sigmoid((noise + log_alpha) / TEMPERATURE) * (HIGH - LOW) + LOW
    return jnp.clip(stretched, 0.0, 1.0)


def probability_open(log_alpha: jax.Array) -> jax.Array:
    """Probability that a mask is above 0."""
    return jax.nn.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


def prune_edges(
    model: CircuitModel,
    batch: Batch,
    importance_UR: np.ndarray,
    *,
    count: int,
    config: EdgePruningConfig | None = None,
    ablation: str = "counterfactual",
    seed: int = 0,
) -> PrunedEdges:
    """Finds the circuit of `count` component edges that best keeps the model's predictions.

    The memory holds a backward pass with the values of all writers saved in each layer, 4 L B T U D
    bytes.

    Args:
      model: a dense or sparse model.
      batch: the prompts; all are used in every step.
      importance_UR: any ranking, by which masks start, the highest first; -inf or anything where
        there is no edge. For example `-component_attributions(...).mean(1)`.
      count: edges of the circuit.
      config: settings; None takes the defaults.
      ablation: one of `ablation.Ablation`, but "resample".
      seed: seed of the noise of masks.

    Raises:
      UsageError: `count` is not between 1 and the number of edges.
    """
    config = config or EdgePruningConfig()
    graph = ComponentGraph.of(model.cfg)
    if not 1 <= count <= graph.num_edges:
        raise UsageError(f"count = {count} must be between 1 and {graph.num_edges}, all edges")
    values = component_values(model, batch, ablation)
    first_UR = jnp.asarray(_first(graph, np.asarray(importance_UR), config))
    trained, kl, share = _train(
        model, batch, values, first_UR, count / graph.num_edges, jax.random.key(seed), config
    )
    log_alpha = np.where(graph.mask_UR, np.asarray(trained["log_alpha"], np.float64), -np.inf)
    kept = np.zeros(graph.mask_UR.shape, bool)
    kept.ravel()[np.argsort(-log_alpha, axis=None, kind="stable")[:count]] = True
    return PrunedEdges(log_alpha, kept, np.asarray(kl), np.asarray(share))


def _first(
    graph: ComponentGraph, importance_UR: np.ndarray, config: EdgePruningConfig
) -> np.ndarray:
    """log alpha at the start: normal scores of the ranking of edges."""
    edges = importance_UR[graph.mask_UR]
    place = np.empty(len(edges))
    place[np.argsort(edges, kind="stable")] = np.arange(len(edges))
    first = np.zeros(graph.mask_UR.shape, np.float32)
    first[graph.mask_UR] = config.start + config.spread * ndtri((place + 0.5) / len(edges))
    return first


@functools.partial(jax.jit, static_argnames="config")
def _train(
    model: CircuitModel,
    batch: Batch,
    values_UBTD: jax.Array,
    first_UR: jax.Array,
    share: jax.Array | float,
    key: jax.Array,
    config: EdgePruningConfig,
) -> tuple[_Trained, jax.Array, jax.Array]:
    graph = ComponentGraph.of(model.cfg)
    mask_UR = jnp.asarray(graph.mask_UR)
    whole_BV = _log_probabilities(model, batch, {})
    B = len(batch.clean_BT)

    def loss(trained: _Trained, step: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        log_alpha_UR = trained["log_alpha"]
        tiny = float(jnp.finfo(jnp.float32).tiny)
        uniform_UBR = jax.random.uniform(
            jax.random.fold_in(key, step), (len(mask_UR), B, mask_UR.shape[1]), minval=tiny
        )
        open_UBR = mask_of(log_alpha_UR[:, None], uniform_UBR)
        circuit_BV = _log_probabilities(
            model, batch, ablate_edges(model, 1.0 - open_UBR, values_UBTD)
        )
        kl = (jnp.exp(whole_BV) * (whole_BV - circuit_BV)).sum(-1).mean()
        opened = jnp.where(mask_UR, probability_open(log_alpha_UR), 0.0).sum() / graph.num_edges
        progress = jnp.minimum((step + 1) / (config.ramp * config.steps), 1.0)
        excess = opened - (1.0 - progress * (1.0 - share))
        l1, l2 = trained["multipliers"]
        return kl + l1 * excess + l2 * excess**2, (kl, opened)

    optimizer = optax.partition(
        {
            "down": optax.adam(config.learning_rate),
            "up": optax.chain(optax.adam(config.multiplier_rate), optax.scale(-1.0)),
        },
        {"log_alpha": "down", "multipliers": "up"},
    )

    def update(
        carry: tuple[_Trained, optax.OptState], step: jax.Array
    ) -> tuple[tuple[_Trained, optax.OptState], tuple[jax.Array, jax.Array]]:
        trained, state = carry
        gradient, measured = jax.grad(loss, has_aux=True)(trained, step)
        updates, state = optimizer.update(gradient, state, trained)
        return (jax.tree.map(jnp.add, trained, updates), state), measured

    trained = {"log_alpha": first_UR, "multipliers": jnp.zeros(2)}
    carry = (trained, optimizer.init(trained))
    (trained, _), (kl, opened) = jax.lax.scan(update, carry, jnp.arange(config.steps))
    return trained, kl, opened


def _log_probabilities(model: CircuitModel, batch: Batch, edits: dict) -> jax.Array:
    """Log-probabilities of the next token at the position of the answer, `[B, V]`."""
    output = model.forward(
        batch.clean_BT, batch.valid_BT, edits=edits, logits_at=batch.at_B2[:, :1]
    )
    return jax.nn.log_softmax(output.logits[:, 0])
