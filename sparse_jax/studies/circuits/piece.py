"""One model on one task: its metric, effects of its components, circuits of growing size.

It is measured in parts (`parts`), each from what is stored of those before it, so that a resumed
study has the same rows. Heads are ranked by exact patching, token edges by
attribution with the gradient rules of the config, component edges by EAP-IG, in `config.direction`.
Importance is positive where the model needs the component.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
import pyarrow as pa

from lm_jax.text.tokenizer import Tokenizer
from sparse_jax.circuits import curves, discover, patching
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.components import (
    component_attributions,
    component_effects,
    ungrouped,
)
from sparse_jax.circuits.discover import Curve
from sparse_jax.circuits.rules import RULES, find_rules
from sparse_jax.circuits.runs import Batch, CircuitModel, metric
from sparse_jax.circuits.tasks import Task
from sparse_jax.studies.circuits import parts
from sparse_jax.studies.circuits.measurements import array, head_importance, importance, rows
from sparse_jax.studies.circuits.parts import Part
from sparse_jax.studies.circuits.results import DrawnPrompt, HeadPattern, NeededEdge
from sparse_jax.studies.circuits.settings import CircuitConfig

# More of them cannot be told apart on a page.
MOST_HEADS, MOST_EDGES = 64, 600
_DIGITS = 2
# Below every importance, and above that of what is no component.
_LAST = np.finfo(np.float64).min
_CURVES = {
    "heads": discover.head_curve,
    "token_edges": discover.edge_curve,
    "component_edges": discover.component_curve,
}


@dataclasses.dataclass(frozen=True)
class SourceCircuit:
    """Heads of a circuit found on another wording of the task.

    Attributes:
      importance_LN: mean over its prompts.
      size: heads that explain the fraction there.
    """

    importance_LN: np.ndarray
    size: int


class Measurement:
    """Measures one model on one task, part by part.

    Args:
      config: settings of the study.
      names: the columns "task" and "model" of the rows.
      model: dense or sparse.
      task: prompts on which the model is measured.
      stored: function that returns the table of another part of this piece.
    """

    def __init__(
        self,
        config: CircuitConfig,
        names: dict[str, str],
        model: CircuitModel,
        task: Task,
        stored: Callable[[Part], pa.Table],
    ) -> None:
        self._config, self._names, self._model, self._task = config, names, model, task
        self._batch, self._stored = Batch.of(task), stored
        self._prompts = np.arange(len(task.examples))
        self._importance: dict[str, np.ndarray] = {}

    def measure(self, part: Part, source: SourceCircuit | None) -> pa.Table:
        """What the store keeps of a part.

        Args:
          part: a part whose prerequisites have been measured.
          source: circuit of another wording; for the part "transfer" alone.
        """
        if part.measurement == "transfer":
            assert source is not None, "the plan has this part where there is another wording"
            tables = self._transfer(source)
        elif part.measurement == parts.ATTRIBUTION:
            method, rules = parts.ranked_by(self._config, part.component)
            estimates = self._estimates(part.component, self._config.direction, method, rules)
            return parts.values_table(estimates)
        else:
            tables = _MEASUREMENTS[part.measurement](self, part)
        return pa.concat_tables(tables)

    def _rows(
        self,
        values: ArrayLike,
        axes: Mapping[str, ArrayLike],
        *,
        edges_EX: np.ndarray | None = None,
        **labels: str,
    ) -> pa.Table:
        return rows(values, axes, edges_EX=edges_EX, **self._names, **labels)

    def _metrics(self, part: Part) -> list[pa.Table]:
        """Metrics, and how many components of each kind carry any weight."""
        del part
        axes = {"prompt": self._prompts}
        both = {"clean": self._batch.clean_BT, "corrupt": self._batch.corrupt_BT}
        metrics = [
            self._rows(
                np.asarray(metric(self._model, self._batch, tokens_BT)),
                axes,
                quantity="metric",
                method=name,
            )
            for name, tokens_BT in both.items()
        ]
        counts = [
            self._rows(
                parts.by_prompt(self._opened(component)), axes, quantity="open", component=component
            )
            for component in self._config.components
        ]
        return metrics + counts

    def _mask(self, component: str) -> np.ndarray:
        return parts.component_mask(component, self._model, self._batch)

    def _opened(self, component: str) -> np.ndarray:
        """Which components of a kind carry any weight in each prompt, of those that there are."""
        edges_LBNTS = self._open_edges
        if component == "token_edges":
            return edges_LBNTS
        heads_LBN = np.any(edges_LBNTS, axis=(3, 4))
        if component == "heads":
            return heads_LBN
        writers_UB = ComponentGraph.of(self._model.cfg).open_writers(heads_LBN)
        return self._mask(component) & writers_UB[:, :, None]

    @functools.cached_property
    def _open_edges(self) -> np.ndarray:
        """Visible token edges with weight on the clean or the corrupt prompt."""
        weights = [
            np.asarray(patching.activations(self._model, self._batch, tokens).pattern_LBNTS)
            for tokens in (self._batch.clean_BT, self._batch.corrupt_BT)
        ]
        return self._mask("token_edges") & ((weights[0] > 0) | (weights[1] > 0))

    def _effects(self, part: Part) -> list[pa.Table]:
        """Exact effects and all estimates of them: of all heads, or of a sample of edges."""
        component, (direction,) = part.component, part.options
        options: dict[str, Any] = {"direction": direction, "at_once": self._config.at_once}
        axes: dict[str, ArrayLike]
        sample_EX = None
        if component == "heads":
            cfg = self._model.cfg
            axes = {"layer": np.arange(cfg.num_layers), "head": np.arange(cfg.num_heads)}
            effects = patching.head_effects(self._model, self._batch, **options)
        else:
            sample_EX = self._sample(component)
            axes = {"edge": np.arange(len(sample_EX))}
            exact: Callable[..., jax.Array] = component_effects
            if component == "token_edges":
                exact = functools.partial(patching.edge_effects, part=self._config.edge_part)
            effects = exact(self._model, self._batch, jnp.asarray(sample_EX), **options)

        def table(values: ArrayLike, **labels: str) -> pa.Table:
            return self._rows(
                np.asarray(values),
                axes | {"prompt": self._prompts},
                edges_EX=sample_EX,
                quantity="effect",
                component=component,
                direction=direction,
                **labels,
            )

        tables = [table(effects, method="exact")]
        for method, rules in itertools.product(parts.METHODS[component], RULES):
            estimates = self._estimates(component, direction, method, rules)
            if sample_EX is not None:
                first_E, *others = sample_EX.T
                estimates = estimates[first_E, :, *others]
            tables.append(table(estimates, method=method, rules=rules))
        return tables

    def _estimates(
        self,
        component: str,
        direction: Any,
        method: Any,
        rules: str,
        model: CircuitModel | None = None,
    ) -> np.ndarray:
        """Effects of all components of a kind by one method of `parts.METHODS`.

        `model` is the one of this measurement where it is None.
        """
        options: dict[str, Any] = {"direction": direction, "rules": find_rules(rules)}
        attributions: Callable[..., jax.Array] = patching.head_attributions
        if component == "token_edges":
            attributions = patching.edge_attributions
            options["part"] = self._config.edge_part
        if component == "component_edges":
            attributions = component_attributions
            options |= {"method": method, "steps": self._config.ig_steps}
        return np.asarray(attributions(model or self._model, self._batch, **options))

    def _sample(self, component: str) -> np.ndarray:
        """Edges drawn uniformly among those with weight, so that no method is favoured."""
        places = np.argwhere(self._opened(component).any(1))
        drawn = self._rng(component).permutation(len(places))[: self._config.edge_sample]
        return places[np.sort(drawn)]

    def _rng(self, *about: str) -> np.random.Generator:
        """Draws of one part, whichever parts this process measured before."""
        return np.random.default_rng([self._config.seed, *" ".join(about).encode()])

    def _stored_attribution(self, component: str) -> np.ndarray:
        table = self._stored(Part(component, parts.ATTRIBUTION))
        shape = self._mask(component).shape
        return table["value"].to_numpy().astype(np.float64).reshape(shape)

    def _stored_importance(self, component: str) -> np.ndarray:
        """Importance by which components are ranked, prompts on axis 1; -inf where there is none.

        Only that of one kind is kept.
        """
        if component not in self._importance:
            direction = self._config.direction
            if component == "heads":
                table = self._stored(Part(component, "effects", (direction,)))
                values = head_importance(table, direction).swapaxes(1, 2)
            else:
                values = importance(self._stored_attribution(component), direction)
            self._importance = {component: np.where(self._mask(component), values, -np.inf)}
        return self._importance[component]

    def _curve(self, part: Part) -> list[pa.Table]:
        """Circuits of all sizes under one ablation and ranking."""
        component = part.component
        ablation, ranking, scope, draw = part.options
        at_once = self._config.at_once
        if component == "component_edges":
            # A circuit of these holds the values of all writers.
            at_once = min(at_once, 2)
        curve = self._circuits(
            component,
            self._ranks(component, ranking, scope, draw),
            ablation,
            parts.circuit_sizes(self._mask(component), self._config.points),
            at_once,
        )
        return [self._curve_rows(curve, component, ablation, ranking, scope, int(draw))]

    def _circuits(
        self, component: str, ranks: np.ndarray, ablation: str, taken: np.ndarray, at_once: int
    ) -> Curve:
        evaluate: Callable[..., Curve] = _CURVES[component]
        draws = {} if component == "token_edges" else {"key": jax.random.key(self._config.seed)}
        return evaluate(
            self._model, self._batch, ranks, ablation, sizes=taken, at_once=at_once, **draws
        )

    def _curve_rows(
        self, curve: Curve, component: str, ablation: str, ranking: str, scope: str, draw: int = 0
    ) -> pa.Table:
        return self._rows(
            np.concatenate([curve.empty_B[None], curve.metric_KB])[None],
            {"draw": [draw], "size": np.array([0, *curve.sizes]), "prompt": self._prompts},
            quantity="curve",
            component=component,
            ablation=ablation,
            ranking=ranking,
            scope=scope,
        )

    def _ranks(self, component: str, ranking: str, scope: str, draw: str) -> np.ndarray:
        """Ranks of one ranking."""
        real = self._mask(component)
        if ranking == "random":
            order_XBX = np.where(real, self._rng(component, draw).random(real.shape), -np.inf)
        else:
            own = self._stored_importance(component)
            order_XBX = _rank_values(own, real, ranking, scope)
        return self._closed_last(component, order_XBX)

    def _closed_last(self, component: str, order_XBX: np.ndarray) -> np.ndarray:
        """Ranks by values that are -inf where there is no component.

        Components without weight come last: to have the corrupt prompt's in their place, or none,
        changes nothing, so that among those of a sparse model only open edges, and heads that have
        some, are chosen between.
        """
        last = self._mask(component) & ~self._opened(component)
        return discover.ranks(np.where(last, _LAST, order_XBX))

    def _circuit_ranks(self, component: str) -> np.ndarray:
        """Ranks of the curve that says how many components are needed."""
        _, ranking, scope, draw = parts.first_curve(self._config, component).options
        return self._ranks(component, ranking, scope, draw)

    def _transfer(self, source: SourceCircuit) -> list[pa.Table]:
        """Another wording's circuit on these prompts, and their own of that size."""
        ablation, size = self._config.ablations[0], np.array([source.size])
        tables = []
        for ranking, ranks in (
            ("transferred", self._closed_last("heads", source.importance_LN[:, None])),
            ("own", self._ranks("heads", "signed", "task", "0")),
        ):
            curve = self._circuits("heads", ranks, ablation, size, self._config.at_once)
            tables.append(self._curve_rows(curve, "heads", ablation, ranking, "task"))
        return tables

    def scores_UR(self) -> np.ndarray:
        """Mean importance of component edges of the ungrouped model, 0 where there is none.

        The stored score of a key that query heads share is the sum over these, so that such models
        are measured again with a key for each query head.
        """
        cfg, direction = self._model.cfg, self._config.direction
        if cfg.num_kv_heads < cfg.num_heads:
            method, rules = parts.ranked_by(self._config, "component_edges")
            wide = ungrouped(self._model)
            estimates = self._estimates("component_edges", direction, method, rules, wide)
            return importance(estimates.astype(np.float64), direction).mean(1)
        values_UBR = self._stored_importance("component_edges")
        return np.where(np.isfinite(values_UBR), values_UBR, 0.0).mean(1)

    def drawn(self, tokenizer: Tokenizer) -> DrawnPrompt:
        """Patterns of the needed heads and the needed token edges of the prompt that is drawn."""
        shown = min(self._config.shown, len(self._prompts) - 1)
        example, arrays = self._task.examples[shown], self._task.arrays
        ids = arrays.clean_BT[shown][arrays.valid_BT[shown]].tolist()
        pattern = patching.activations(self._model, self._batch, self._batch.clean_BT)
        weights_LNTS = np.asarray(pattern.pattern_LBNTS, np.float64)[:, shown]
        T = len(ids)
        needed = dict.fromkeys(_CURVES, 0)
        heads, edges = [], []
        if "heads" in self._config.components:
            needed["heads"] = self._needed("heads", shown)
            own = self._stored_importance("heads")[:, shown]
            ranks = self._circuit_ranks("heads")[:, shown]
            for layer, head in _first(ranks, min(needed["heads"], MOST_HEADS)):
                weights = np.clip(weights_LNTS[layer, head, :T, :T], 0, 1).round(_DIGITS)
                value = float(own[layer, head])
                heads.append(HeadPattern(layer, head, value, tuple(map(tuple, weights.tolist()))))
        if "token_edges" in self._config.components:
            needed["token_edges"] = self._needed("token_edges", shown)
            own = self._stored_importance("token_edges")[:, shown]
            ranks = self._circuit_ranks("token_edges")[:, shown]
            for layer, head, query, key in _first(ranks, min(needed["token_edges"], MOST_EDGES)):
                weight = min(float(weights_LNTS[layer, head, query, key]), 1.0)
                value = float(own[layer, head, query, key])
                edges.append(NeededEdge(layer, head, query, key, weight, value))
        return DrawnPrompt(
            **self._names,
            tokens=tuple(tokenizer.decode([one]) for one in ids),
            answer=example.answers[0],
            metric=float(self._whole_B[shown]),
            heads_needed=needed["heads"],
            edges_needed=needed["token_edges"],
            heads=tuple(heads),
            edges=tuple(edges),
        )

    @functools.cached_property
    def _whole_B(self) -> np.ndarray:
        table = self._stored(Part("", "metrics"))
        return array(table, ["prompt"], quantity="metric", method="clean")[0]

    def _needed(self, component: str, shown: int) -> int:
        """Components that explain the fraction of one prompt's metric."""
        table = self._stored(parts.first_curve(self._config, component))
        metric_KB, axes = array(table, ["size", "prompt"], quantity="curve")
        own_K1 = metric_KB[:, [shown]]
        explained = curves.explained(own_K1[1:], own_K1[0], self._whole_B[[shown]])
        taken = axes["size"][1:]
        crossing = curves.crossing(taken, explained, self._config.fraction)
        return int(np.ceil(crossing)) if np.isfinite(crossing) else int(taken[-1])


_MEASUREMENTS: Mapping[str, Callable[[Measurement, Part], list[pa.Table]]] = {
    "metrics": Measurement._metrics,
    "effects": Measurement._effects,
    "curve": Measurement._curve,
}


def _rank_values(
    importance_LBX: np.ndarray, real: np.ndarray, ranking: str, scope: str
) -> np.ndarray:
    """Values by which components are ranked, -inf where there is none.

    For a task they are means over the prompts that have the component. A ranking by the absolute
    effect takes the absolute value of that mean: an effect whose sign varies between prompts is
    not an effect of the task.
    """
    values = np.where(real, importance_LBX, 0.0)
    if scope == "task":
        values = values.sum(1, keepdims=True) / np.maximum(real.sum(1, keepdims=True), 1)
    return np.where(real, np.abs(values) if ranking == "absolute" else values, -np.inf)


def _first(ranks_LX: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """Indices of the components of the first ranks, in order."""
    order = np.argsort(ranks_LX, axis=None)[:count]
    places = np.unravel_index(order, ranks_LX.shape)
    return list(zip(*(place.tolist() for place in places), strict=True))
