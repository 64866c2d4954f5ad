"""One model on one task: its metric, effects of its components, circuits of growing size.

The piece is what is done or not done when a study is resumed. Heads are ranked by exact patching,
token edges by attribution with the gradient rules of the config, component edges by EAP-IG, in
`config.direction`. Importance is positive where the model needs the component.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
import pyarrow as pa

from lm_jax.text.tokenizer import Tokenizer
from sparse_jax.circuits import curves, discover, patching
from sparse_jax.circuits.components import component_attributions, component_effects
from sparse_jax.circuits.config import CircuitConfig
from sparse_jax.circuits.discover import Curve
from sparse_jax.circuits.measurements import array, rows
from sparse_jax.circuits.patching import Direction
from sparse_jax.circuits.results import DrawnPrompt, HeadPattern, NeededEdge
from sparse_jax.circuits.rules import find_rules
from sparse_jax.circuits.runs import Batch, CircuitModel, metric
from sparse_jax.circuits.tasks import Task

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
class Piece:
    """Rows of one model on one task, and its circuits of the prompt that is drawn.

    `scores_UR` are mean importances of component edges, None where these were not asked for.
    """

    rows: pa.Table
    drawn: DrawnPrompt
    scores_UR: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class SourceCircuit:
    """Heads of a circuit found on another wording of the task.

    Attributes:
      importance_LN: mean over its prompts.
      size: heads that explain the fraction there.
    """

    importance_LN: np.ndarray
    size: int


def importance(effects: np.ndarray, direction: str) -> np.ndarray:
    """Effects with the sign that is positive where the model needs the component."""
    return -effects if direction == "noising" else effects


def head_importance(table: pa.Table, direction: str, **labels: str) -> np.ndarray:
    """Exact importance of heads in the rows of one piece, `[L, N, B]`."""
    effects, _ = array(
        table,
        ("layer", "head", "prompt"),
        quantity="effect",
        component="heads",
        method="exact",
        direction=direction,
        **labels,
    )
    return importance(effects, direction)


class Measurement:
    """Measures one model on one task.

    Args:
      config: of the study.
      names: the columns "task" and "model" of the rows.
      model: dense or sparse.
      task: its prompts.
    """

    def __init__(
        self, config: CircuitConfig, names: dict[str, str], model: CircuitModel, task: Task
    ) -> None:
        self._config, self._names, self._model, self._task = config, names, model, task
        self._batch, self._rules = Batch.of(task), find_rules(config.rules)
        self._prompts = np.arange(len(task.examples))
        self._tables: list[pa.Table] = []
        # Of random rankings and random token edges.
        self._rng = np.random.default_rng(config.seed)
        self._key = jax.random.key(config.seed)

    def run(self, tokenizer: Tokenizer, source: SourceCircuit | None) -> Piece:
        """All measurements.

        Args:
          tokenizer: of the model.
          source: the circuit of another wording to evaluate on this one, if any.
        """
        whole_B = self._metrics()
        heads_LBN = edges_LBNTS = scores_UR = None
        head_size = edge_size = 0
        shown = min(self._config.shown, len(self._prompts) - 1)
        if "heads" in self._config.components:
            heads_LBN = self._head_effects()
            own = self._curves("heads", heads_LBN)
            head_size = self._needed(own, whole_B, shown)
            if source is not None:
                self._transfer(heads_LBN, source)
        if "token_edges" in self._config.components:
            edges_LBNTS = self._edge_effects("token_edges")
            own = self._curves("token_edges", edges_LBNTS)
            edge_size = self._needed(own, whole_B, shown)
        if "component_edges" in self._config.components:
            importance_UBR = self._edge_effects("component_edges")
            self._curves("component_edges", importance_UBR)
            scores_UR = np.where(np.isfinite(importance_UBR), importance_UBR, 0.0).mean(1)
        drawn = self._drawn(
            tokenizer, shown, whole_B[shown], heads_LBN, head_size, edges_LBNTS, edge_size
        )
        return Piece(pa.concat_tables(self._tables), drawn, scores_UR)

    def _add(
        self,
        values: np.ndarray,
        axes: Mapping[str, ArrayLike],
        *,
        edges_EX: np.ndarray | None = None,
        **labels: str,
    ) -> None:
        self._tables.append(rows(values, axes, edges_EX=edges_EX, **self._names, **labels))

    def _metrics(self) -> np.ndarray:
        both = {"clean": self._batch.clean_BT, "corrupt": self._batch.corrupt_BT}
        results = {
            name: np.asarray(metric(self._model, self._batch, tokens_BT))
            for name, tokens_BT in both.items()
        }
        for name, metric_B in results.items():
            self._add(metric_B, {"prompt": self._prompts}, quantity="metric", method=name)
        return results["clean"]

    def _head_effects(self) -> np.ndarray:
        """Adds the rows of all effects; importance by exact patching, `[L, B, N]`."""
        cfg = self._model.cfg
        axes = {
            "layer": np.arange(cfg.num_layers),
            "head": np.arange(cfg.num_heads),
            "prompt": self._prompts,
        }
        chosen = np.empty(0)
        for direction in get_args(Direction):
            exact = patching.head_effects(
                self._model, self._batch, direction=direction, at_once=self._config.at_once
            )
            estimates = patching.head_attributions(
                self._model, self._batch, direction=direction, rules=self._rules
            )
            for method, effects in (("exact", exact), ("attribution", estimates)):
                labels = {"component": "heads", "method": method, "direction": direction}
                self._add(np.asarray(effects), axes, quantity="effect", **labels)
            if direction == self._config.direction:
                chosen = importance(np.asarray(exact, np.float64), direction)
        return chosen.swapaxes(1, 2)

    def _edge_effects(self, component: str) -> np.ndarray:
        """Adds the rows of a sample; importance by attribution, prompts on axis 1, masked -inf."""
        config, pair = self._config, (self._model, self._batch)
        exact: Callable[..., jax.Array]
        if component == "token_edges":
            real = discover.visible_edges(*pair)
            exact, opened = patching.edge_effects, self._open(real)
            found = patching.edge_attributions(*pair, direction=config.direction, rules=self._rules)
        else:
            real = opened = discover.component_edges(*pair)
            exact = component_effects
            found = component_attributions(*pair, steps=config.ig_steps, direction=config.direction)
        estimates_XBX = np.asarray(found, np.float64)
        sample_EX = self._sample(estimates_XBX, opened)
        first_E, *others = sample_EX.T
        sides = {
            "exact": exact(
                *pair, jnp.asarray(sample_EX), direction=config.direction, at_once=config.at_once
            ),
            "attribution": estimates_XBX[first_E, :, *others],
        }
        for method, effects_EB in sides.items():
            self._add(
                np.asarray(effects_EB),
                {"edge": np.arange(len(sample_EX)), "prompt": self._prompts},
                edges_EX=sample_EX,
                quantity="effect",
                component=component,
                method=method,
                direction=config.direction,
            )
        return np.where(real, importance(estimates_XBX, config.direction), -np.inf)

    def _sample(self, effects_XBX: np.ndarray, opened_XBX: np.ndarray) -> np.ndarray:
        """Places of edges, without the prompt: those of highest attribution, others at random."""
        opened = opened_XBX.any(1)
        places_EX = np.argwhere(opened)
        size = np.abs(effects_XBX).mean(1)[opened]
        order = np.argsort(-size, kind="stable")
        half = self._config.edge_sample // 2
        others = self._rng.permutation(order[half:])[: self._config.edge_sample - half]
        return places_EX[np.concatenate([order[:half], others])]

    def _open(self, visible_LBNTS: np.ndarray) -> np.ndarray:
        """Visible edges with weight on the clean or the corrupt prompt."""
        weights = [
            np.asarray(patching.activations(self._model, self._batch, tokens).pattern_LBNTS)
            for tokens in (self._batch.clean_BT, self._batch.corrupt_BT)
        ]
        return visible_LBNTS & ((weights[0] > 0) | (weights[1] > 0))

    def _curves(self, component: str, importance_LBX: np.ndarray) -> Curve:
        """Adds the rows of all curves; that of the first ablation, each prompt ranked by itself."""
        config, own = self._config, None
        real = np.isfinite(importance_LBX)
        count = int(real.sum(axis=(0, *range(2, real.ndim))).max())
        taken = sizes(count, config.points)
        evaluate: Callable[..., Curve] = _CURVES[component]
        options = {} if component == "token_edges" else {"key": self._key}
        count_open = self._open(real) if component == "token_edges" else real
        # A circuit of component edges holds the values of all writers.
        side_by_side = min(config.at_once, 2) if component == "component_edges" else config.at_once
        self._add(
            count_open.sum(axis=(0, *range(2, real.ndim))),
            {"prompt": self._prompts},
            quantity="open",
            component=component,
        )
        for ablation in config.ablations_of(component):
            for ranking, scope, draw, ranks in self._rankings(importance_LBX, real, count_open):
                curve = evaluate(
                    self._model,
                    self._batch,
                    ranks,
                    ablation,
                    sizes=taken,
                    at_once=side_by_side,
                    **options,
                )
                self._add(
                    np.concatenate([curve.empty_B[None], curve.metric_KB])[None],
                    {"draw": [draw], "size": np.array([0, *taken]), "prompt": self._prompts},
                    quantity="curve",
                    component=component,
                    ablation=ablation,
                    ranking=ranking,
                    scope=scope,
                )
                if own is None:
                    own = curve
        assert own is not None, "the config has an ablation for each component"
        return own

    def _rankings(
        self, importance_LBX: np.ndarray, real: np.ndarray, opened: np.ndarray
    ) -> Iterator[tuple[str, str, int, np.ndarray]]:
        """Ranking, scope, draw, and ranks; the first is that of each prompt by itself.

        Components without weight come last: they change nothing, so that among those of a sparse
        model only open edges are chosen between.
        """

        def ranks(order_LBX: np.ndarray) -> np.ndarray:
            return discover.ranks(np.where(opened | ~real, order_LBX, _LAST))

        yield "signed", "prompt", 0, ranks(importance_LBX)
        for ranking in ("signed", "absolute"):
            yield ranking, "task", 0, ranks(_pooled(importance_LBX, real, ranking))
        for draw in range(self._config.random_draws):
            order = np.where(real, self._rng.random(real.shape), -np.inf)
            yield "random", "prompt", draw, ranks(order)

    def _transfer(self, heads_LBN: np.ndarray, source: SourceCircuit) -> None:
        """Adds the rows of another wording's circuit on these prompts, and of their own."""
        shared = np.broadcast_to(source.importance_LN[:, None], heads_LBN.shape)
        for ranking, values in (("transferred", shared), ("own", heads_LBN)):
            curve = discover.head_curve(
                self._model,
                self._batch,
                discover.ranks(values, whole_task=True),
                self._config.ablations[0],
                sizes=[source.size],
                key=self._key,
            )
            self._add(
                np.concatenate([curve.empty_B[None], curve.metric_KB])[None],
                {"draw": [0], "size": np.array([0, source.size]), "prompt": self._prompts},
                quantity="curve",
                component="heads",
                ranking=ranking,
                ablation=self._config.ablations[0],
                scope="task",
            )

    def _needed(self, curve: Curve, whole_B: np.ndarray, shown: int) -> int:
        """Components that explain the fraction of one prompt's metric."""
        explained = curves.explained(
            curve.metric_KB[:, [shown]], curve.empty_B[[shown]], whole_B[[shown]]
        )
        crossing = curves.crossing(curve.sizes, explained, self._config.fraction)
        return int(np.ceil(crossing)) if np.isfinite(crossing) else int(curve.sizes[-1])

    def _drawn(
        self,
        tokenizer: Tokenizer,
        shown: int,
        metric: float,
        heads_LBN: np.ndarray | None,
        head_size: int,
        edges_LBNTS: np.ndarray | None,
        edge_size: int,
    ) -> DrawnPrompt:
        example, arrays = self._task.examples[shown], self._task.arrays
        ids = arrays.clean_BT[shown][arrays.valid_BT[shown]].tolist()
        pattern = patching.activations(self._model, self._batch, self._batch.clean_BT)
        weights_LNTS = np.asarray(pattern.pattern_LBNTS, np.float64)[:, shown]
        T = len(ids)
        heads, edges = [], []
        if heads_LBN is not None:
            for layer, head in _best(heads_LBN[:, shown], min(head_size, MOST_HEADS)):
                weights = np.clip(weights_LNTS[layer, head, :T, :T], 0, 1).round(_DIGITS)
                value = float(heads_LBN[layer, shown, head])
                heads.append(HeadPattern(layer, head, value, tuple(map(tuple, weights.tolist()))))
        if edges_LBNTS is not None:
            own = edges_LBNTS[:, shown]
            for layer, head, query, key in _best(own, min(edge_size, MOST_EDGES)):
                weight = min(float(weights_LNTS[layer, head, query, key]), 1.0)
                value = float(own[layer, head, query, key])
                edges.append(NeededEdge(layer, head, query, key, weight, value))
        return DrawnPrompt(
            **self._names,
            tokens=tuple(tokenizer.decode([one]) for one in ids),
            answer=example.answers[0],
            metric=float(metric),
            heads_needed=head_size,
            edges_needed=edge_size,
            heads=tuple(heads),
            edges=tuple(edges),
        )


def sizes(count: int, points: int) -> np.ndarray:
    """Sizes of circuits: near to even in the logarithm, and those of MIB's shares."""
    mib = [int(share * count) for share in curves.MIB_FRACTIONS]
    return np.union1d(curves.sizes(count, points), [size for size in mib if size])


def _pooled(importance_LBX: np.ndarray, real: np.ndarray, ranking: str) -> np.ndarray:
    """Means over the prompts in which a component is, -inf in the others.

    A ranking by the absolute value is by that of the mean.
    """
    total = np.where(real, importance_LBX, 0.0).sum(1, keepdims=True)
    mean = total / np.maximum(real.sum(1, keepdims=True), 1)
    return np.where(real, np.abs(mean) if ranking == "absolute" else mean, -np.inf)


def _best(importance_LX: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """Indices of the components of highest importance, in order."""
    order = np.argsort(-importance_LX, axis=None, kind="stable")[:count]
    places = np.unravel_index(order, importance_LX.shape)
    return list(zip(*(place.tolist() for place in places), strict=True))
