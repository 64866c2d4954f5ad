"""Rows of the circuit study: metrics, effects and curves of one model on one task, by prompt.

A row holds one `value`; its other columns say of what:

    quantity    metric (of a prompt), effect (of patching a component), curve (metric of a circuit),
                open (components of a prompt that carry any weight, their number), place (effect of
                patching a place at a position, `place_patching`), kept (log alpha of an edge of the
                circuit that edge pruning found, of no prompt)
    component   heads, token_edges or component_edges; a name of `place_patching.PLACES`
    method      of a metric: clean or corrupt prompt; of an effect: exact, attribution (patching of
                heads and token edges), eap or eap_ig (component edges); of a place: exact, atp,
                atp_star or graddrop (`atp_star`)
    rules       of an effect that is estimated: name of its gradient rules in `rules.RULES`
    direction   of an effect: noising or denoising
    ablation    of a curve: what replaces the components outside the circuit
    ranking     of a curve: signed, absolute, random; `transferred` is that of another task, `own`
                the task's own at the same size; `pruned` is that of edge pruning's masks,
                `attributed` and `drawn` are the signed and a random one at the same size
    scope       of a curve: whether each prompt has a ranking of its own, or the task has one
    size, draw, layer, head, query, key; the position of a place is its query
    prompt            of the pair of prompts, its number; pairs may share a clean prompt
    writer, reader    of a component edge, as in `ComponentGraph`

Size 0 is the circuit of no component. Columns that do not apply are null.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
import pyarrow as pa
import pyarrow.compute as pc

from sparse_jax.circuits.discover import Curve

_LABELS = (
    *("task", "model", "quantity", "component", "method", "rules", "direction"),
    *("ablation", "ranking", "scope"),
)
_PLACES = ("size", "draw", "prompt", "layer", "head", "query", "key", "writer", "reader")
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in _LABELS),
        *((name, pa.int32()) for name in _PLACES),
        ("value", pa.float64()),
    ]
)


def rows(
    values: ArrayLike,
    axes: Mapping[str, ArrayLike],
    *,
    edges: Mapping[str, np.ndarray] | None = None,
    **labels: str,
) -> pa.Table:
    """An array as rows of `SCHEMA`.

    Args:
      values: one value a row.
      axes: coordinates along each axis of the values, in their order, by column.
      edges: coordinates of the entries of an axis "edge", by column.
      **labels: columns with one text.
    """
    array = np.asarray(values, np.float64)
    grid = np.meshgrid(*map(np.asarray, axes.values()), indexing="ij")
    places = {name: part.ravel() for name, part in zip(axes, grid, strict=True)}
    if edges is not None:
        edge = places.pop("edge")
        places |= {name: each_E[edge] for name, each_E in edges.items()}

    def column(field: pa.Field) -> pa.Array:
        if field.name == "value":
            return pa.array(array.ravel())
        if field.name in places:
            return pa.array(places[field.name], field.type)
        if field.name in labels:
            return pa.repeat(pa.scalar(labels[field.name], field.type), array.size)
        return pa.nulls(array.size, field.type)

    return pa.Table.from_arrays([column(field) for field in SCHEMA], schema=SCHEMA)


def select(table: pa.Table, **labels: Any) -> pa.Table:
    """The rows whose columns have these values."""
    for name, value in labels.items():
        table = table.filter(pc.equal(table[name], value))
    return table


def array(
    table: pa.Table, axes: Sequence[str], **labels: Any
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Selected rows as an array with these axes, and the coordinates along each.

    Raises:
      ValueError: a place of the array has no row, or several.
    """
    chosen = select(table, **labels)
    coordinates, places = {}, []
    for axis in axes:
        coordinates[axis], place = np.unique(chosen[axis].to_numpy(), return_inverse=True)
        places.append(place)
    result = np.full([len(each) for each in coordinates.values()], np.nan)
    if result.size != len(chosen):
        raise ValueError(f"{len(chosen)} rows of {labels} do not fill {result.shape} of {axes}")
    result[tuple(places)] = chosen["value"].to_numpy()
    if np.isnan(result).any() and not np.isnan(chosen["value"].to_numpy()).any():
        raise ValueError(f"rows of {labels} are double along {axes}")
    return result, coordinates


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


def read_curve(table: pa.Table, **labels: Any) -> Curve:
    """The metric of circuits in the rows of one piece; the mean over random draws."""
    metric, axes = array(table, ["draw", "size", "prompt"], quantity="curve", **labels)
    metric_KB = metric.mean(0)
    whole_B, _ = array(table, ["prompt"], quantity="metric", method="clean")
    return Curve(axes["size"][1:], metric_KB[1:], metric_KB[0], whole_B)
