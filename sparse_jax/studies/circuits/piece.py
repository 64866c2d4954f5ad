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
from typing import cast

import numpy as np
from numpy.typing import ArrayLike
import pyarrow as pa

from lm_jax.run import processes
from lm_jax.text.tokenizer import Tokenizer
from sparse_jax.circuits import atp_star, curves, discover, edge_pruning
from sparse_jax.circuits.components import ungrouped
from sparse_jax.circuits.discover import Curve
from sparse_jax.circuits.patching import Direction
from sparse_jax.circuits.place_patching import place_effects
from sparse_jax.circuits.rules import RULES
from sparse_jax.circuits.runs import Batch, CircuitModel, metric
from sparse_jax.circuits.tasks import Task
from sparse_jax.studies.circuits import parts
from sparse_jax.studies.circuits.kinds import KINDS, Kind
from sparse_jax.studies.circuits.measurements import array, importance, rows
from sparse_jax.studies.circuits.parts import Part
from sparse_jax.studies.circuits.results import DrawnPrompt, HeadPattern, NeededEdge
from sparse_jax.studies.circuits.settings import CircuitConfig

# More of them cannot be told apart on a page.
MOST_HEADS, MOST_EDGES = 64, 600
_DIGITS = 2
# Below every importance, and above that of what is no component.
_LAST = np.finfo(np.float64).min


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
        recorded = functools.cache(lambda: discover.Recorded.of(model, self._batch))
        self._recorded = recorded
        self._kinds = {name: of(config, model, self._batch, recorded) for name, of in KINDS.items()}
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
            return parts.values_table(self._ranking_estimates(self._kinds[part.component]))
        else:
            tables = _MEASUREMENTS[part.measurement](self, part)
        return pa.concat_tables(tables)

    def _rows(
        self,
        values: ArrayLike,
        axes: Mapping[str, ArrayLike],
        *,
        edges: Mapping[str, np.ndarray] | None = None,
        **labels: str,
    ) -> pa.Table:
        return rows(values, axes, edges=edges, **self._names, **labels)

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
                parts.by_prompt(self._open_components(self._kinds[name])),
                axes,
                quantity="open",
                component=name,
            )
            for name in self._config.components
        ]
        return metrics + counts

    def _open_components(self, kind: Kind) -> np.ndarray:
        """Which components of a kind carry any weight in each prompt."""
        return kind.opened(self._open_edges)

    @functools.cached_property
    def _open_edges(self) -> np.ndarray:
        """Visible token edges with weight on the clean or the corrupt prompt."""
        own = self._recorded()
        weights = [np.asarray(each.pattern_LBNTS) for each in (own.clean, own.corrupt)]
        return self._kinds["token_edges"].mask() & ((weights[0] > 0) | (weights[1] > 0))

    def _effects(self, part: Part) -> list[pa.Table]:
        """Exact effects and all estimates of them: of all heads, or of a sample of edges."""
        kind, direction = self._kinds[part.component], cast(Direction, part.options[0])
        places_EX = self._patched_places(kind)
        first_E, *others = places_EX.T

        def table(effects_EB: np.ndarray, **labels: str) -> pa.Table:
            return self._rows(
                effects_EB,
                {"edge": np.arange(len(places_EX)), "prompt": self._prompts},
                edges=dict(zip(kind.columns, places_EX.T, strict=True)),
                quantity="effect",
                component=kind.name,
                direction=direction,
                **labels,
            )

        tables = [table(kind.effects(direction, places_EX), method="exact")]
        for method, rules in itertools.product(kind.methods, RULES):
            processes.check_stop(f"before {method} of {kind.name}")
            estimates = kind.estimates(direction, method, rules)
            tables.append(table(estimates[first_E, :, *others], method=method, rules=rules))
        return tables

    def _patched_places(self, kind: Kind) -> np.ndarray:
        """Components that are patched exactly: all heads, or edges drawn at random.

        Edges are drawn uniformly among those with weight, so that no method is favoured.
        """
        if kind.all_patched:
            return np.argwhere(kind.mask().any(1))
        places = np.argwhere(self._open_components(kind).any(1))
        drawn = self._rng(kind.name).permutation(len(places))[: self._config.edge_sample]
        return places[np.sort(drawn)]

    def _ranking_estimates(self, kind: Kind) -> np.ndarray:
        """Estimates of the effects of all components, by which they are ranked."""
        method, rules = kind.ranked_by(self._config)
        return kind.estimates(self._config.direction, method, rules)

    def _rng(self, *about: str) -> np.random.Generator:
        """Draws of one part, whichever parts this process measured before."""
        return np.random.default_rng([self._config.seed, *" ".join(about).encode()])

    def _stored_importance(self, kind: Kind) -> np.ndarray:
        """Importance by which components are ranked, prompts on axis 1; -inf where there is none.

        Only that of one kind is kept.
        """
        if kind.name not in self._importance:
            values = kind.importance(self._stored(parts.ranking_part(self._config, kind)))
            self._importance = {kind.name: np.where(kind.mask(), values, -np.inf)}
        return self._importance[kind.name]

    def _curve(self, part: Part) -> list[pa.Table]:
        """Circuits of all sizes under one ablation and ranking."""
        kind = self._kinds[part.component]
        ablation, ranking, scope, draw = part.options
        sizes = parts.circuit_sizes(kind.mask(), self._config.points)
        curve = kind.curve(self._ranks(kind, ranking, scope, draw), ablation, sizes)
        return [self._curve_rows(curve, kind.name, ablation, ranking, scope, int(draw))]

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

    def _ranks(self, kind: Kind, ranking: str, scope: str, draw: str) -> np.ndarray:
        """Ranks of one ranking."""
        real = kind.mask()
        if ranking == "random":
            order_XBX = np.where(real, self._rng(kind.name, draw).random(real.shape), -np.inf)
        else:
            order_XBX = _rank_values(self._stored_importance(kind), real, ranking, scope)
        return self._rank_closed_last(kind, order_XBX)

    def _rank_closed_last(self, kind: Kind, order_XBX: np.ndarray) -> np.ndarray:
        """Ranks by values that are -inf where there is no component.

        Components without weight come last, because ablating them changes nothing. In a sparse
        model the choice is therefore among open edges, and heads that have open edges.
        """
        last = kind.mask() & ~self._open_components(kind)
        return discover.ranks(np.where(last, _LAST, order_XBX))

    def _pruned(self, part: Part) -> list[pa.Table]:
        """The circuit of edge pruning, its edges, and other circuits of its size."""
        kind, (ablation, text) = self._kinds["component_edges"], part.options
        size = int(text)
        attributed_UBR = self._stored_importance(kind)
        found = edge_pruning.prune_edges(
            self._model,
            self._batch,
            np.where(np.isfinite(attributed_UBR), attributed_UBR, 0.0).mean(1),
            count=size,
            config=edge_pruning.EdgePruningConfig(steps=self._config.pruning_steps),
            ablation=ablation,
            seed=self._config.seed,
        )
        axes = {"size": [size], "prompt": self._prompts}
        kept_E2 = np.argwhere(found.kept_UR)
        tables = [
            self._rows(
                found.log_alpha_UR[found.kept_UR][None],
                {"size": [size], "edge": np.arange(size)},
                edges=dict(zip(kind.columns, kept_E2.T, strict=True)),
                quantity="kept",
                component=kind.name,
                ablation=ablation,
                ranking="pruned",
            )
        ]
        masks_UBR = np.broadcast_to(found.log_alpha_UR[:, None], kind.mask().shape)
        for ranking, ranks in (
            ("pruned", discover.ranks(masks_UBR)),
            ("attributed", self._ranks(kind, "signed", "task", "0")),
            ("drawn", self._ranks(kind, "random", "prompt", "0")),
        ):
            curve = kind.curve(ranks, ablation, np.array([size]))
            scope = "prompt" if ranking == "drawn" else "task"
            labels = {"ablation": ablation, "ranking": ranking, "scope": scope}
            tables.append(
                self._rows(curve.metric_KB, axes, quantity="curve", component=kind.name, **labels)
            )
        return tables

    def _transfer(self, source: SourceCircuit) -> list[pa.Table]:
        """The circuit of another wording on these prompts, and their own circuit of that size."""
        heads, ablation = self._kinds["heads"], self._config.ablations[0]
        tables = []
        for ranking, ranks in (
            ("transferred", self._rank_closed_last(heads, source.importance_LN[:, None])),
            ("own", self._ranks(heads, "signed", "task", "0")),
        ):
            curve = heads.curve(ranks, ablation, np.array([source.size]))
            tables.append(self._curve_rows(curve, "heads", ablation, ranking, "task"))
        return tables

    def _places(self, part: Part) -> list[pa.Table]:
        """Effects of a place at every position of every layer, exact and estimated."""
        (direction,) = part.options
        effects = place_effects(
            self._model,
            self._batch,
            part.component,
            direction=cast(Direction, direction),
            at_once=self._config.at_once,
        )
        names = ("layer", "head", "query") if effects.ndim == 4 else ("layer", "query")
        axes = {name: np.arange(n) for name, n in zip(names, effects.shape, strict=False)}
        labels = {"quantity": "place", "component": part.component, "direction": direction}
        given = (self._model, self._batch, part.component)
        estimates = atp_star.by_method(*given, direction=cast(Direction, direction))
        return [
            self._rows(values, axes | {"prompt": self._prompts}, method=method, **labels)
            for method, values in ({"exact": effects} | estimates).items()
        ]

    def scores_UR(self) -> np.ndarray:
        """Mean importance of component edges of the ungrouped model, 0 where there is none.

        The stored score of a key that query heads share is the sum over these, so that such models
        are measured again with a key for each query head.
        """
        cfg, kind = self._model.cfg, self._kinds["component_edges"]
        if cfg.num_kv_heads < cfg.num_heads:
            wide = dataclasses.replace(kind, model=ungrouped(self._model))
            estimates = self._ranking_estimates(wide).astype(np.float64)
            return importance(estimates, self._config.direction).mean(1)
        values_UBR = self._stored_importance(kind)
        return np.where(np.isfinite(values_UBR), values_UBR, 0.0).mean(1)

    def drawn(self, tokenizer: Tokenizer) -> DrawnPrompt:
        """Patterns of the needed heads and the needed token edges of the prompt that is drawn."""
        shown = min(self._config.shown, len(self._prompts) - 1)
        example, arrays = self._task.examples[shown], self._task.arrays
        ids = arrays.clean_BT[shown][arrays.valid_BT[shown]].tolist()
        pattern_LBNTS = self._recorded().clean.pattern_LBNTS
        weights_LNTS = np.asarray(pattern_LBNTS[:, shown], np.float64)
        T = len(ids)
        heads_needed, heads = self._first("heads", shown, MOST_HEADS)
        edges_needed, edges = self._first("token_edges", shown, MOST_EDGES)
        return DrawnPrompt(
            **self._names,
            tokens=tuple(tokenizer.piece(one) for one in ids),
            answer=example.answers[0],
            metric=float(self._whole_B[shown]),
            heads_needed=heads_needed,
            edges_needed=edges_needed,
            heads=tuple(
                HeadPattern(layer, head, value, _pattern(weights_LNTS[layer, head, :T, :T]))
                for (layer, head), value in heads
            ),
            edges=tuple(
                NeededEdge(*place, weight=min(float(weights_LNTS[*place]), 1.0), importance=value)
                for place, value in edges
            ),
        )

    def _first(
        self, name: str, shown: int, most: int
    ) -> tuple[int, list[tuple[tuple[int, ...], float]]]:
        """How many components explain one prompt, and the first of them with their importance."""
        if name not in self._config.components:
            return 0, []
        kind, first = self._kinds[name], parts.first_curve(self._config, name)
        needed = self._needed(first, shown)
        values_LX = self._stored_importance(kind)[:, shown]
        _, ranking, scope, draw = first.options
        ranks_LX = self._ranks(kind, ranking, scope, draw)[:, shown]
        order = np.argsort(ranks_LX, axis=None)[: min(needed, most)]
        places = np.stack(np.unravel_index(order, ranks_LX.shape), 1).tolist()
        return needed, [((*place,), float(values_LX[*place])) for place in places]

    @functools.cached_property
    def _whole_B(self) -> np.ndarray:
        table = self._stored(Part("", "metrics"))
        return array(table, ["prompt"], quantity="metric", method="clean")[0]

    def _needed(self, curve: Part, shown: int) -> int:
        """Components that explain the fraction of one prompt's metric."""
        metric_KB, axes = array(self._stored(curve), ["size", "prompt"], quantity="curve")
        own_K1 = metric_KB[:, [shown]]
        explained = curves.explained(own_K1[1:], own_K1[0], self._whole_B[[shown]])
        return curves.needed(axes["size"][1:], explained, self._config.fraction)


_MEASUREMENTS: Mapping[str, Callable[[Measurement, Part], list[pa.Table]]] = {
    "metrics": Measurement._metrics,
    "effects": Measurement._effects,
    "curve": Measurement._curve,
    "pruned": Measurement._pruned,
    "place": Measurement._places,
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


def _pattern(weights_TS: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, np.clip(weights_TS, 0, 1).round(_DIGITS).tolist()))
