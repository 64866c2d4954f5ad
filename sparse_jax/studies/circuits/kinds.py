"""Kinds of component that circuits consist of: heads, token edges and component edges.

A kind says which components a model has, how their effects are measured and estimated, and how
circuits of them are evaluated. Its arrays have the prompts on axis 1: `[L, B, N]` for heads,
`[L, B, N, T, S]` for token edges, `[U, B, R]` for component edges.
"""

import abc
from collections.abc import Callable
import dataclasses
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from sparse_jax.circuits import components, discover, patching
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.discover import Curve
from sparse_jax.circuits.patching import Direction
from sparse_jax.circuits.rules import RULES, find_rules
from sparse_jax.circuits.runs import Batch, CircuitModel
from sparse_jax.studies.circuits.measurements import head_importance, importance
from sparse_jax.studies.circuits.settings import CircuitConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Kind(abc.ABC):
    """One kind of component of a model on the prompts of a task.

    Attributes:
      name: name of the kind in settings and results.
      columns: columns of the rows that name a component.
      methods: estimates that are compared with exact patching, each under all `rules.RULES`.
      all_patched: whether every component is patched exactly, which ranks them; of other kinds a
        sample is patched, and an attribution ranks all.
      circuit_passes: time of a circuit over that of a forward pass.
      recorded: function that returns attention on both prompts, the same for kinds that need it.
    """

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    methods: ClassVar[tuple[str, ...]] = ("attribution",)
    all_patched: ClassVar[bool] = False
    circuit_passes: ClassVar[int] = 1
    _exact: ClassVar[Callable[..., jax.Array]]
    _attribute: ClassVar[Callable[..., jax.Array]]
    _evaluate: ClassVar[Callable[..., Curve]]

    config: CircuitConfig
    model: CircuitModel
    batch: Batch
    recorded: Callable[[], discover.Recorded] | None = None

    @staticmethod
    @abc.abstractmethod
    def ranked_by(config: CircuitConfig) -> tuple[str, str]:
        """Method and gradient rules that rank the components."""

    @abc.abstractmethod
    def mask(self) -> np.ndarray:
        """Which components there are; no weights are read."""

    @abc.abstractmethod
    def opened(self, edges_LBNTS: np.ndarray) -> np.ndarray:
        """Which components carry any weight, from the token edges that do."""

    def effects(self, direction: Direction, places_EX: np.ndarray) -> np.ndarray:
        """Exact effects of the components at some places, `[E, B]`."""
        options = {"direction": direction, "at_once": self.config.at_once} | self._patch
        return np.asarray(self._exact(self.model, self.batch, jnp.asarray(places_EX), **options))

    def estimates(self, direction: Direction, method: str, rules: str) -> np.ndarray:
        """Effects of all components by one of `methods`."""
        del method
        options = {"direction": direction, "rules": find_rules(rules)} | self._patch
        return np.asarray(self._attribute(self.model, self.batch, **options))

    def curve(self, ranks: np.ndarray, ablation: str, sizes: np.ndarray) -> Curve:
        """The metric of circuits of these sizes."""
        options = {"key": jax.random.key(self.config.seed), "at_once": self._circuits_at_once}
        options |= self._recorded
        return self._evaluate(self.model, self.batch, ranks, ablation, sizes=sizes, **options)

    def importance(self, stored: pa.Table) -> np.ndarray:
        """Importance of all components, from the stored part that ranks them."""
        values = stored["value"].to_numpy().astype(np.float64).reshape(self.mask().shape)
        return importance(values, self.config.direction)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Directions in which exact effects are measured."""
        return (self.config.direction,)

    def effect_passes(self) -> int:
        """About how many forward passes the effects in one direction and all estimates take."""
        # The attribution that ranks them, then all estimates.
        ranking = 3 * self._steps + 2
        every = 3 * len(RULES) * (self._steps + len(self.methods) - 1)
        return self.config.edge_sample + 4 + every + ranking

    @property
    def _patch(self) -> dict[str, Any]:
        """Options of patches that other kinds do not have."""
        return {}

    @property
    def _recorded(self) -> dict[str, Any]:
        """Options of circuits of which attention is recorded."""
        return {"recorded": None if self.recorded is None else self.recorded()}

    @property
    def _circuits_at_once(self) -> int:
        return self.config.at_once

    @property
    def _steps(self) -> int:
        """Backward passes of the attribution that ranks."""
        return 1


class Heads(Kind):
    """Attention heads, ranked by exact patching of each."""

    name = "heads"
    columns = ("layer", "head")
    all_patched = True
    _exact = staticmethod(patching.head_effects)
    _attribute = staticmethod(patching.head_attributions)
    _evaluate = staticmethod(discover.head_curve)

    @staticmethod
    def ranked_by(config: CircuitConfig) -> tuple[str, str]:
        del config
        return "exact", ""

    def mask(self) -> np.ndarray:
        cfg = self.model.cfg
        return np.broadcast_to(True, (cfg.num_layers, len(self.batch.clean_BT), cfg.num_heads))

    def opened(self, edges_LBNTS: np.ndarray) -> np.ndarray:
        return np.any(edges_LBNTS, axis=(3, 4))

    def effects(self, direction: Direction, places_EX: np.ndarray) -> np.ndarray:
        options = {"direction": direction, "at_once": self.config.at_once}
        return np.asarray(self._exact(self.model, self.batch, **options))[*places_EX.T]

    def estimates(self, direction: Direction, method: str, rules: str) -> np.ndarray:
        return super().estimates(direction, method, rules).swapaxes(1, 2)

    def importance(self, stored: pa.Table) -> np.ndarray:
        return head_importance(stored, self.config.direction).swapaxes(1, 2)

    @property
    def directions(self) -> tuple[Direction, ...]:
        return get_args(Direction)

    def effect_passes(self) -> int:
        cfg = self.model.cfg
        # A patched run begins at its layer.
        return cfg.num_layers * cfg.num_heads // 2 + 4 + 3 * len(RULES)


class TokenEdges(Kind):
    """Edges from a key to the query that reads it, each in one head."""

    name = "token_edges"
    columns = ("layer", "head", "query", "key")
    _exact = staticmethod(patching.edge_effects)
    _attribute = staticmethod(patching.edge_attributions)
    _evaluate = staticmethod(discover.edge_curve)

    @staticmethod
    def ranked_by(config: CircuitConfig) -> tuple[str, str]:
        return "attribution", config.rules

    def mask(self) -> np.ndarray:
        return discover.visible_edges(self.model, self.batch)

    def opened(self, edges_LBNTS: np.ndarray) -> np.ndarray:
        return edges_LBNTS

    def curve(self, ranks: np.ndarray, ablation: str, sizes: np.ndarray) -> Curve:
        # No ablation of token edges is random.
        options = {"sizes": sizes, "at_once": self.config.at_once} | self._recorded
        return self._evaluate(self.model, self.batch, ranks, ablation, **options)

    @property
    def _patch(self) -> dict[str, Any]:
        return {"part": self.config.edge_part}


class ComponentEdges(Kind):
    """Edges from a writer to the residual stream to a reader of it."""

    name = "component_edges"
    columns = ("writer", "reader")
    methods = ("eap", "eap_ig")
    # Readers read the changes of all writers: 3.2 times the time of heads on SmolLM2's shape.
    circuit_passes = 3
    _exact = staticmethod(components.component_effects)
    _attribute = staticmethod(components.component_attributions)
    _evaluate = staticmethod(discover.component_curve)

    @staticmethod
    def ranked_by(config: CircuitConfig) -> tuple[str, str]:
        del config
        return "eap_ig", "exact"

    def mask(self) -> np.ndarray:
        return discover.component_edges(self.model, self.batch)

    def opened(self, edges_LBNTS: np.ndarray) -> np.ndarray:
        heads_LBN = np.any(edges_LBNTS, axis=(3, 4))
        writers_UB = ComponentGraph.of(self.model.cfg).open_writers(heads_LBN)
        return self.mask() & writers_UB[:, :, None]

    def estimates(self, direction: Direction, method: str, rules: str) -> np.ndarray:
        options = {"method": method, "steps": self._steps, "rules": find_rules(rules)}
        return np.asarray(self._attribute(self.model, self.batch, direction=direction, **options))

    @property
    def _recorded(self) -> dict[str, Any]:
        return {}

    @property
    def _circuits_at_once(self) -> int:
        # A circuit holds the values of all writers.
        return min(self.config.at_once, 2)

    @property
    def _steps(self) -> int:
        return self.config.ig_steps


# In the order of measurement.
KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Heads, TokenEdges, ComponentEdges)}
