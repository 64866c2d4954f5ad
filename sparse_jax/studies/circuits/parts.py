"""Parts of a study: what is measured and stored at a time, and measured again if it was cut short.

The unit of a part in the stores is (model, task, component, measurement, *options), such as

    ("dense", "ioi", "heads", "curve", "counterfactual", "signed", "prompt", "0")

Rows go to one store and attributions, from which edges are ranked, to another, where a part that
ranks by them puts them; both refuse files that are damaged or of other settings, models or prompts
(`lm_jax.run.rows`).
"""

from collections.abc import Sequence
import dataclasses

import numpy as np
import pyarrow as pa

from lm_jax.model.config import DecoderConfig
from sparse_jax.circuits import curves
from sparse_jax.circuits.place_patching import heads_of
from sparse_jax.circuits.runs import Batch, CircuitModel
from sparse_jax.studies.circuits.kinds import KINDS, Kind
from sparse_jax.studies.circuits.settings import CircuitConfig

# The part that has no rows, and the folder of the store that it goes to.
ATTRIBUTION, ATTRIBUTIONS = "attribution", "attributions"
# Of an attribution in the order of its array, whose shape the model and the prompts give.
VALUES = pa.schema([("value", pa.float32())])


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a piece, which is one model on one task.

    Attributes:
      component: heads, token_edges or component_edges; "" for what concerns all kinds.
      measurement: metrics, effects, attribution, curve, pruned, transfer, place or figures
        (`piece.Measurement`).
      options: direction of effects and places; ablation, ranking, scope and draw of a curve;
        ablation and size of a circuit of edge pruning.
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
    for name, kind_of in KINDS.items():
        if name not in config.components:
            continue
        kind = kind_of(config, CircuitModel({}, cfg), batch)
        parts += [
            Part(name, "effects", (direction,), kind.effect_passes())
            for direction in kind.directions
        ]
        passes = kind.circuit_passes * (len(circuit_sizes(kind.mask(), config.points)) + 4)
        parts += [
            Part(name, "curve", (ablation, *ranking), passes)
            for ablation in config.ablations_of(name)
            for ranking in _rankings(config)
        ]
        if name == "heads" and transfer:
            parts.append(Part(name, "transfer", (), 12))
        if name == "component_edges":
            parts += pruned_parts(config)
    for place in config.patch:
        heads = heads_of(cfg, place) or 1
        # A patched run begins at its layer.
        passes = cfg.num_layers * heads * batch.clean_BT.shape[1] // 2 + 3
        # Estimates: a backward pass each, and one for every layer.
        passes += 3 * (cfg.num_layers + 2)
        parts.append(Part(place, "place", (config.direction,), passes))
    return [*parts, FIGURES]


def pruned_parts(config: CircuitConfig) -> list[Part]:
    """The parts of the circuits that edge pruning finds, by size."""
    passes = 3 * KINDS["component_edges"].circuit_passes * config.pruning_steps
    return [
        Part("component_edges", "pruned", (config.ablations[0], str(size)), passes)
        for size in config.pruned
    ]


def ranking_part(config: CircuitConfig, kind: Kind) -> Part:
    """The part by whose effects components of a kind are ranked."""
    if kind.all_patched:
        return Part(kind.name, "effects", (config.direction,))
    return Part(kind.name, ATTRIBUTION)


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
