"""Parts of a study: what is measured and stored at a time, and measured again if it was cut short.

The unit of a part in the stores is (model, task, component, measurement, *options), such as

    ("dense", "ioi", "heads", "curve", "counterfactual", "signed", "prompt", "0")

Rows go to one store and attributions, from which edges are ranked, to another, where a part that
ranks by them puts them; both refuse files that are damaged or of other settings, models or prompts
(`lm_jax.run.rows`).
"""

from collections.abc import Sequence
import dataclasses
from typing import get_args

import numpy as np
import pyarrow as pa

from lm_jax.model.config import DecoderConfig
from sparse_jax.circuits import curves, discover
from sparse_jax.circuits.patching import Direction
from sparse_jax.circuits.rules import RULES
from sparse_jax.circuits.runs import Batch, CircuitModel
from sparse_jax.studies.circuits.settings import COMPONENTS, CircuitConfig

# The part that has no rows, and the folder of the store that it goes to.
ATTRIBUTION, ATTRIBUTIONS = "attribution", "attributions"
# Of an attribution in the order of its array, whose shape the model and the prompts give.
VALUES = pa.schema([("value", pa.float32())])
# Time of a circuit over that of a forward pass. Readers of component edges read the changes of all
# writers: 3.2 times that of heads on SmolLM2's shape.
_TIME = {"heads": 1, "token_edges": 1, "component_edges": 3}
# Estimates that are compared with exact patching, each under all `rules.RULES`.
METHODS = {
    "heads": ("attribution",),
    "token_edges": ("attribution",),
    "component_edges": ("eap", "eap_ig"),
}


def ranked_by(config: CircuitConfig, component: str) -> tuple[str, str]:
    """Method and gradient rules that rank components of a kind; heads have exact effects."""
    return {
        "heads": ("exact", ""),
        "token_edges": ("attribution", config.rules),
        "component_edges": ("eap_ig", "exact"),
    }[component]


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a piece, which is one model on one task.

    Attributes:
      component: heads, token_edges or component_edges; "" for what concerns all kinds.
      measurement: metrics, effects, attribution, curve, transfer or figures (`piece.Measurement`).
      options: direction of effects; ablation, ranking, scope and draw of a curve.
      passes: about how many forward passes of all prompts it takes, by which time left is told.
    """

    component: str
    measurement: str
    options: tuple[str, ...] = ()
    passes: int = dataclasses.field(default=1, compare=False)

    @property
    def unit(self) -> tuple[str, ...]:
        """The key of the part in the stores, within a model and task."""
        return (self.component, self.measurement, *self.options)

    def __str__(self) -> str:
        about = ", ".join([*[self.component] * bool(self.component), self.measurement])
        details = self.options
        if self.measurement == "curve":
            ablation, ranking, scope, draw = self.options
            details = (ablation, f"{ranking} by {scope}")
            if ranking == "random":
                details = (ablation, f"random ranking {int(draw) + 1}")
        text = f"{about} ({', '.join(details)})" if details else about
        return text.replace("_", " ")


# Files of the prompt that is drawn and of the scores of component edges; it has no rows.
FIGURES = Part("", "figures")


def values_table(values: np.ndarray) -> pa.Table:
    """An attribution of any shape as a table for the store."""
    return pa.table({"value": np.asarray(values, np.float32).ravel()})


def component_mask(component: str, model: CircuitModel, batch: Batch) -> np.ndarray:
    """Which components of a kind there are, with the prompts on axis 1; no weights are read."""
    if component == "token_edges":
        return discover.visible_edges(model, batch)
    if component == "component_edges":
        return discover.component_edges(model, batch)
    shape = (model.cfg.num_layers, len(batch.clean_BT), model.cfg.num_heads)
    return np.broadcast_to(True, shape)


def by_prompt(mask_XBX: np.ndarray) -> np.ndarray:
    """Number of components in each prompt, `[B]`."""
    return mask_XBX.sum(axis=(0, *range(2, mask_XBX.ndim)))


def circuit_sizes(mask_XBX: np.ndarray, points: int) -> np.ndarray:
    """Sizes of circuits: near to even in the logarithm, and those of MIB's shares."""
    count = int(by_prompt(mask_XBX).max())
    mib = [int(share * count) for share in curves.MIB_FRACTIONS]
    return np.union1d(curves.sizes(count, points), [size for size in mib if size])


def plan(config: CircuitConfig, cfg: DecoderConfig, batch: Batch, *, transfer: bool) -> list[Part]:
    """The parts of one piece in the order of measurement: a part needs those before it.

    Args:
      config: settings of the study.
      cfg: configuration of the model.
      batch: the prompts of the task.
      transfer: whether the circuit of another wording is evaluated on this one.
    """
    parts = [Part("", "metrics", passes=4)]
    for component in COMPONENTS:
        if component not in config.components:
            continue
        mask = component_mask(component, CircuitModel({}, cfg), batch)
        taken = len(circuit_sizes(mask, config.points))
        if component == "heads":
            # A patched run begins at its layer.
            passes = cfg.num_layers * cfg.num_heads // 2 + 4 + 3 * len(RULES)
            parts += [Part(component, "effects", (way,), passes) for way in get_args(Direction)]
        else:
            steps = 1 if component == "token_edges" else config.ig_steps
            # Of the attribution that ranks them, then of all estimates.
            ranking = 3 * steps + 2
            every = 3 * len(RULES) * (steps if component == "token_edges" else 1 + steps)
            passes = config.edge_sample + 4 + every + ranking
            parts.append(Part(component, "effects", (config.direction,), passes))
        parts += [
            Part(component, "curve", (ablation, *ranking), _TIME[component] * (taken + 4))
            for ablation in config.ablations_of(component)
            for ranking in _rankings(config)
        ]
        if component == "heads" and transfer:
            parts.append(Part(component, "transfer", (), 12))
    return [*parts, FIGURES]


def first_curve(config: CircuitConfig, component: str) -> Part:
    """The curve of the first ablation with each prompt ranked by itself."""
    return Part(component, "curve", (config.ablations_of(component)[0], *_rankings(config)[0]))


def _rankings(config: CircuitConfig) -> Sequence[tuple[str, str, str]]:
    """Ranking, scope and draw of each curve."""
    return [
        ("signed", "prompt", "0"),
        ("signed", "task", "0"),
        ("absolute", "prompt", "0"),
        ("absolute", "task", "0"),
        *(("random", "prompt", str(draw)) for draw in range(config.random_draws)),
    ]
