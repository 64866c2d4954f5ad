"""Head sets of the group ablation, and whether the ranking of heads is decisive.

After "When Does Polynomial Attention Concentrate?", section 5.4 and Appendices I and V. Heads are
ranked by their median S_2, and for each size K softmax is replaced in the K highest (top), the K
lowest (bottom) and in sets drawn at random from all layers, with the paper's seeds 0, 1, 2, ... The
ranking is decisive at K if the top set is strictly worse than every random one. The flag is no
test; but the top set of an uninformative ranking is the worst of d + 1 sets with a chance of
1 / (d + 1), so the flag is set only from 19 draws on, where this is 5 % at one K.

Appendix AE replaces the heads at both ends of the ranking one at a time (`singles`).

`head_sets.parquet` lists the heads of every set; `read` gives them back as masks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.errors import BadInputError
from lm_jax.statistics import Interval
from polyattn_jax.audit.results import ConditionResult, Decisiveness

FEWEST_DRAWS = 19
# The stage of heads that are replaced one at a time.
SINGLE = "single heads"

HEAD_SETS = pa.schema(
    [
        ("cell", pa.string()),
        ("group", pa.string()),
        ("size", pa.int32()),
        ("seed", pa.int32()),
        ("layer", pa.int16()),
        ("head", pa.int16()),
    ]
)

_CELL = re.compile(r"(top|bottom|random)-(\d+)(?:-(\d+))?")
_SINGLE = re.compile(r"single-(\d+)-(\d+)")


def draw(ranking: np.ndarray, sizes: Sequence[int], draws: int) -> dict[str, np.ndarray]:
    """The head sets by the name of their cell.

    Args:
      ranking: flat head numbers, highest S_p first.
      sizes: K; one beyond half of the heads means half of them, so that the top and the bottom set
        have no head in common.
      draws: random sets of each size; set `random-K-s` is the first K of a permutation with seed s.
    """
    total, sets = len(ranking), {}
    for size in sorted({min(size, total // 2) for size in sizes} - {0}):
        sets[f"top-{size}"] = ranking[:size]
        sets[f"bottom-{size}"] = ranking[total - size :]
        for seed in range(draws):
            chosen = np.random.RandomState(seed).permutation(total)[:size]
            sets[f"random-{size}-{seed}"] = chosen
    return sets


def singles(ranking: np.ndarray, count: int, width: int) -> dict[str, np.ndarray]:
    """The first and the last `count` heads, each alone, by the name of its cell.

    The name of layer l, head h is `single-l-h`; `width` is the number of heads of a layer.
    """
    chosen = dict.fromkeys([*ranking[:count].tolist(), *ranking[::-1][:count].tolist()])
    return {f"single-{one // width}-{one % width}": np.array([one]) for one in chosen}


def layer_and_head(cell: str) -> tuple[int, int]:
    """Layer and head of a cell of `singles`."""
    member = _SINGLE.fullmatch(cell)
    if member is None:
        raise ValueError(f"{cell!r} is no single head")
    return int(member[1]), int(member[2])


def mask(flat: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Flat head numbers as a boolean `[L, N]`."""
    heads = np.zeros(shape[0] * shape[1], bool)
    heads[flat] = True
    return heads.reshape(shape)


def table(sets: Mapping[str, np.ndarray], shape: tuple[int, int]) -> pa.Table:
    """One row per set and head; `seed` is null but for random sets."""
    columns: dict[str, list[Any]] = {name: [] for name in HEAD_SETS.names}
    for cell, flat in sets.items():
        group, size, seed = ("single", 1, None) if _SINGLE.fullmatch(cell) else _parsed(cell)
        for number in np.sort(flat):
            row = (cell, group, size, seed, number // shape[1], number % shape[1])
            for name, value in zip(columns, row, strict=True):
                columns[name].append(value)
    return pa.table(columns, schema=HEAD_SETS)


def read(path: Path, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """The sets of a `head_sets.parquet` as masks `[L, N]`, by the cell of `answers.parquet`.

    Raises:
      BadInputError: if a model of this shape does not have a head.
    """
    rows = pq.read_table(path, columns=["cell", "layer", "head"]).to_pydict()
    layer, head = np.array(rows["layer"], int), np.array(rows["head"], int)
    if layer.size and (layer.max() >= shape[0] or head.max() >= shape[1]):
        raise BadInputError(
            f"{path}: names layer {layer.max()} and head {head.max()}, but the model has "
            f"{shape[0]} layers of {shape[1]} heads; read the file of the same model"
        )
    cell = np.array(rows["cell"])
    return {
        name: mask((layer * shape[1] + head)[cell == name], shape)
        for name in dict.fromkeys(rows["cell"])
    }


def groups(ablation: Sequence[ConditionResult]) -> dict[str, dict[int, list[ConditionResult]]]:
    """The conditions of an ablation by kind of head set, then by its size K, ascending."""
    results: dict[str, dict[int, list[ConditionResult]]] = {"top": {}, "bottom": {}, "random": {}}
    for entry in ablation:
        if _CELL.fullmatch(entry.cell):
            group, size, _ = _parsed(entry.cell)
            results[group].setdefault(size, []).append(entry)
    return {kind: dict(sorted(cells.items())) for kind, cells in results.items()}


def decisiveness(ablation: Sequence[ConditionResult]) -> tuple[Decisiveness, ...]:
    """Prompts that the top, bottom and random sets of each size K leave right; the paper's flag."""
    by_group, results = groups(ablation), []
    for size, (top,) in by_group["top"].items():
        (bottom,) = by_group["bottom"][size]
        drawn = tuple(right(entry.accuracy) for entry in by_group["random"].get(size, []))
        beaten = sum(right(top.accuracy) < count for count in drawn)
        results.append(
            Decisiveness(
                size=size,
                n=top.accuracy.n,
                top=right(top.accuracy),
                bottom=right(bottom.accuracy),
                random=drawn,
                beaten=beaten,
                decisive=beaten == len(drawn) if len(drawn) >= FEWEST_DRAWS else None,
            )
        )
    return tuple(results)


def right(accuracy: Interval) -> int:
    """Number of prompts that are right, from an accuracy."""
    return round(accuracy.estimate * accuracy.n)


def _parsed(cell: str) -> tuple[str, int, int | None]:
    member = _CELL.fullmatch(cell)
    if member is None:
        raise ValueError(f"{cell!r} is no head set")
    return member[1], int(member[2]), None if member[3] is None else int(member[3])
