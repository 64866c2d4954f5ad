"""A bias of every head or layer: `relu:p=2,b=auto_head`, `b=auto_layer`, `b=FILE.json`.

b_auto is one number for all heads of a model, though their scores differ in level and spread. Here
the 5 % rule of `calibrate` is solved on the rows of each head, or of each layer, alone: on the same
texts, at the same length, and as exactly. A command writes the result to its work folder,

    calibration_head.json, calibration_layer.json

and reads such a file where a recipe names it.

The bias of the gated delta rule (`gdn`, `recipes.delta_maps`) is how far a head looks on average.
With w_ts the softmax weight of query t on key s, on the same texts at the same length, that is

    m = sum_ts w_ts (t - s) / sum_ts w_ts,        s > 0

The first token of a text is left out: much of the weight on it is that of a sink, which a head
gives where it has nothing to read, and would count as looking far. A head that reads nothing else
has m = 0. The query heads that read one key head share its memory, and with it the decay, so the
sums are those of all of them. Of a model with gates it is what softmax reads before edges are
closed. The file is `calibration_distance.json`, and another is read where a
recipe names it, `gdn:distance=FILE.json`.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.run import processes, progress, stop
from lm_jax.run.files import write_json
from lm_jax.run.identity import difference
from lm_jax.run.results import Count, Share, load_result
from polyattn_jax.audit import measure, model_calibration
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.recipes import calibrate
from polyattn_jax.recipes.linear_state import key_readers
from polyattn_jax.recipes.row_maps import DISTANCE, Recipe

Level = Literal["head", "layer"]
LEVELS: Mapping[str, Level] = {"auto_head": "head", "auto_layer": "layer"}


@dataclasses.dataclass(frozen=True)
class BiasTable:
    """A bias of every head.

    Attributes:
      level: what the rule was solved for; all heads of a layer have one bias in "layer".
      model_sha256: digest of the model (`ModelIdentity.text`); `dtype` is that of its weights.
      budget: share of the softmax mass allowed below minus the bias.
      length: tokens of each text.
      texts: how many there are.
      rows: score rows behind the bias of each head or layer.
      passes: number of passes over the model.
      biases: b by layer and head.
      mass: average mass below minus the bias, by layer and head.
      text: digest of the text of `config.calibration_text`; empty for the shipped ones.
    """

    level: Level
    model_sha256: str
    budget: Share
    length: Count
    texts: Count
    rows: Count
    passes: Count
    biases: tuple[tuple[float, ...], ...]
    mass: tuple[tuple[Share, ...], ...]
    dtype: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True)
class DistanceTable:
    """A mean distance of every head.

    Attributes:
      model_sha256: digest of the model (`ModelIdentity.text`); `dtype` is that of its weights.
      length: tokens of each text.
      texts: how many there are.
      distances: m in tokens, by layer and head.
      mass: average mass of a row outside the first token, by layer and head.
      text: digest of the text of `config.calibration_text`; empty for the shipped ones.
    """

    model_sha256: str
    length: Count
    texts: Count
    distances: tuple[tuple[float, ...], ...]
    mass: tuple[tuple[Share, ...], ...]
    dtype: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        if any(distance < 0 for row in self.distances for distance in row):
            raise ValueError("distances must be 0 or more; measure them with --recipe=gdn")


Table = TypeVar("Table", BiasTable, DistanceTable)


def calibrated(
    audited: AuditedModel,
    folder: Path,
    recipes: Mapping[str, Recipe],
    b_auto: float | None = None,
) -> dict[str, Any]:
    """The biases that recipes ask for, by their name there, for `resolve_bias`.

    Raises:
      UsageError: a file has another number of layers or heads than the model.
      BadInputError: a file is of another model, or the folder has a calibration of other settings.
      CorruptError: a file cannot be read.
    """
    results: dict[str, Any] = {"auto": b_auto}
    for recipe in recipes.values():
        name = recipe.bias
        # A file is read for every recipe that names it, since a delta rule has files of its own.
        if not recipe.tabled or (name in results and name in (*LEVELS, DISTANCE)):
            continue
        assert isinstance(name, str)
        if name == DISTANCE:
            results[name] = np.array(distances(audited, folder).distances)
        elif name in LEVELS:
            results[name] = np.array(of_level(audited, folder, LEVELS[name]).biases)
        else:
            results[name] = read(name, audited, recipe.option)
    return results


def read(path: str | Path, audited: AuditedModel, option: str = "b") -> np.ndarray:
    """The biases `[L, N]` of a file, or distances where the option of the recipe is `DISTANCE`.

    Raises:
      UsageError: it has another number of layers or heads than the model.
      BadInputError: it is of another model, or has several distances for one key head.
      CorruptError: it cannot be read.
    """
    if option == DISTANCE:
        held = load_result(path, DistanceTable)
        numbers, what, remedy = held.distances, "distances", "measure one by --recipe=gdn"
    else:
        held = load_result(path, BiasTable)
        numbers, what, remedy = held.biases, "biases", f"calibrate one by b=auto_{held.level}"
    L, N = audited.shape
    if [len(row) for row in numbers] != [N] * L:
        raise UsageError(
            f"{path}: the model has {L} layers of {N} heads, and {what} another number; name a "
            "file of this model"
        )
    if change := difference(held.model_sha256, audited.model.identity.text, where=path):
        raise BadInputError(
            f"{path}: model_sha256 is not that of config.model: {change}; name a file of this "
            f"model, or {remedy}"
        )
    numbers_LN = np.array(numbers)
    if option == DISTANCE:
        for layers, heads in _together(audited.model.cfg):
            if np.ptp(numbers_LN[layers, heads]) > 0:
                raise BadInputError(
                    f"{path}: distances differ in heads of layer {np.min(layers)} that read one "
                    "key head, whose memory they share; give them one distance, or measure them "
                    "by --recipe=gdn"
                )
    return numbers_LN


def of_level(audited: AuditedModel, folder: Path, level: Level) -> BiasTable:
    """The calibrated biases, read from the folder if an earlier start wrote them.

    Raises:
      BadInputError: the earlier start had another model or other settings.
    """
    path = folder / f"calibration_{level}.json"
    if (stored := _stored(path, BiasTable, audited)) is not None:
        return stored
    config, cfg = audited.config, audited.model.cfg
    shape = audited.shape
    texts_UT = _texts(audited)
    sets = shape if level == "head" else (cfg.num_layers, 1)
    name, quiet = f"calibrate b by {level}", not processes.is_first()
    # Of several processes each measures all texts, and has the same result.
    with progress.track(name, 5 * len(texts_UT), unit="texts", quiet=quiet) as advance:

        def mass(thresholds: np.ndarray) -> calibrate.MassBelow:
            M = thresholds.shape[-1]
            thresholds_LNM = jnp.asarray(np.broadcast_to(thresholds, (*shape, M)))
            total, rows = 0.0, 0
            for tokens_T in texts_UT:
                if processes.share_stop():
                    stop.check("during calibration")
                measured = measure.mass_by_head(
                    audited.model.params, jnp.asarray(tokens_T[None]), thresholds_LNM, cfg=cfg
                )
                total = total + np.asarray(measured.total_M, np.float64)[:, 0]
                rows = rows + np.asarray(measured.rows).astype(np.int64)[:, 0]
                advance()
            return calibrate.MassBelow(
                np.asarray(total).reshape(*sets, -1, M).sum(-2),
                np.asarray(rows).reshape(*sets, -1).sum(-1),
            )

        solved = calibrate.calibrate_each(mass, sets, budget=config.budget, num_thresholds=512)
    biases, masses = (np.broadcast_to(x, shape).tolist() for x in (solved.bias, solved.mass))
    table = BiasTable(
        level=level,
        model_sha256=audited.model.identity.text,
        budget=config.budget,
        length=config.calibrated_at,
        texts=len(texts_UT),
        rows=int(solved.rows.max()),
        passes=solved.passes,
        biases=tuple(map(tuple, biases)),
        mass=tuple(map(tuple, masses)),
        dtype=config.dtype,
        text=model_calibration.text_sha256(config),
    )
    processes.on_first(lambda: write_json(path, table))
    return table


def distances(audited: AuditedModel, folder: Path) -> DistanceTable:
    """The measured distances, read from the folder if an earlier start wrote them.

    Raises:
      BadInputError: the earlier start had another model or other settings.
    """
    path = folder / f"calibration_{DISTANCE}.json"
    if (stored := _stored(path, DistanceTable, audited)) is not None:
        return stored
    config, cfg = audited.config, audited.model.cfg
    texts_UT = _texts(audited)
    mass_LN, distance_LN = np.zeros(audited.shape), np.zeros(audited.shape)
    name, quiet = "measure distances", not processes.is_first()
    # Of several processes each measures all texts, and has the same result.
    with progress.track(name, len(texts_UT), unit="texts", quiet=quiet) as advance:
        for tokens_T in texts_UT:
            if processes.share_stop():
                stop.check("during calibration")
            sums = measure.distances(audited.model.params, jnp.asarray(tokens_T[None]), cfg=cfg)
            mass_LN += np.asarray(sums["mass_BNT"], np.float64).sum((1, 3))
            distance_LN += np.asarray(sums["distance_BNT"], np.float64).sum((1, 3))
            advance()
    rows = texts_UT.size
    for layers, heads in _together(cfg):
        mass_LN[layers, heads] = mass_LN[layers, heads].mean()
        distance_LN[layers, heads] = distance_LN[layers, heads].mean()
    mean_LN = np.where(mass_LN > 0, distance_LN / np.where(mass_LN > 0, mass_LN, 1), 0)
    table = DistanceTable(
        model_sha256=audited.model.identity.text,
        length=config.calibrated_at,
        texts=len(texts_UT),
        distances=tuple(map(tuple, mean_LN.tolist())),
        mass=tuple(map(tuple, (mass_LN / rows).tolist())),
        dtype=config.dtype,
        text=model_calibration.text_sha256(config),
    )
    processes.on_first(lambda: write_json(path, table))
    return table


def _stored(path: Path, kind: type[Table], audited: AuditedModel) -> Table | None:
    """The table that an earlier start wrote, of the same model and settings; None without one."""
    if not processes.on_first(path.exists):
        return None
    stored = load_result(path, kind)
    model_calibration.check_source(path, stored, audited)
    return stored


def _texts(audited: AuditedModel) -> np.ndarray:
    """The calibration texts at the audited length, ids `[U, T]`."""
    texts_UT, *_ = model_calibration.calibration_tokens(audited)
    return texts_UT[:, : audited.config.calibrated_at]


def _together(cfg: DecoderConfig) -> Iterator[tuple[list[int], slice]]:
    """The layers and query heads that read each key head, those of several layers among them."""
    for own, layers in key_readers(cfg).values():
        group = own.num_heads // own.num_kv_heads
        for first in range(0, own.num_heads, group):
            yield layers, slice(first, first + group)


def digests(recipes: Mapping[str, Recipe]) -> list[str]:
    """The digest of every file that a recipe names, for the fingerprint of its results."""
    names = [r.bias for r in recipes.values() if isinstance(r.bias, str) and r.tabled]
    files = [Path(name) for name in names if name not in (*LEVELS, DISTANCE)]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()]


def plain(bias: Any) -> float | tuple[tuple[float, ...], ...]:
    """A bias as result files hold it: a number, or numbers by layer and head."""
    if np.ndim(bias) == 0:
        return float(bias)
    return tuple(map(tuple, np.asarray(bias, np.float64).tolist()))


def describe(bias: Any) -> str:
    """A bias in words: its number, or the range of those of the heads."""
    if np.ndim(bias) == 0:
        return f"{bias:.3g}"
    return f"{np.min(bias):.3g} to {np.max(bias):.3g} by head"
