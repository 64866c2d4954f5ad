"""Parquet tables of an audit: columns (meaning: docs/polyattn/files.md), rows of a batch.

The final tables, unlike the shards they come from, have the model's name as their first column, so
that the files of two models can be concatenated, and the provenance of the run in their metadata
(`lm_jax.run.tables`).
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
import pyarrow as pa

from polyattn_jax.audit import head_types
from polyattn_jax.audit.measure import Diagnosis
from polyattn_jax.recipes.diagnostic import required_degree
from polyattn_jax.recipes.probe import DEGREES
from polyattn_jax.suites.batching import Batch

BIASES = ("zero", "auto")  # of every audit; recipes may add their own


def rows_schema(degrees: Sequence[int | float] = DEGREES) -> pa.Schema:
    """The columns of the row shards, with an S_p and a change for each degree."""
    return pa.schema(
        [
            ("suite", pa.string()),
            ("length", pa.int32()),
            ("prompt", pa.string()),
            ("query", pa.int32()),
            ("layer", pa.int16()),
            ("head", pa.int16()),
            ("window", pa.int32()),
            ("target", pa.string()),
            ("bias_kind", pa.string()),
            ("bias", pa.float32()),
            ("status", pa.int8()),
            ("argmax", pa.int32()),
            ("answer", pa.int32()),
            ("margin", pa.float32()),
            ("u_star", pa.float32()),
            ("r_star", pa.float32()),
            ("relative_margin", pa.float32()),
            ("active", pa.int32()),
            ("p_star", pa.float32()),
            *((f"s_{p}", pa.float32()) for p in degrees),
            ("s_softmax", pa.float32()),
            *((f"change_{p}", pa.float32()) for p in degrees),
            ("sink", pa.float32()),
            ("on_answer", pa.float32()),
            ("distance", pa.int32()),
        ]
    )


ROWS = rows_schema()

# Of each prompt or text under one condition (`stages.condition_columns`).
_CONDITION = (
    ("stage", pa.string()),
    ("cell", pa.string()),
    ("recipe", pa.string()),
    ("bias", pa.float32()),
    ("heads", pa.int32()),
    ("suite", pa.string()),
    ("length", pa.int32()),
    ("prompt", pa.string()),
)

ANSWERS = pa.schema(
    [
        *_CONDITION,
        ("target", pa.int32()),
        ("predicted", pa.int32()),
        ("rank", pa.int32()),
        ("loss", pa.float32()),
        ("dead_rows", pa.int32()),
    ]
)

# Of `suite_answers.parquet`: `step` is the token of the answer that is judged, from 0; `failure` is
# empty where the answer is right, else the name of the needle that was copied, or "other".
SUITE_ANSWERS = pa.schema([*ANSWERS, ("step", pa.int16()), ("failure", pa.string())])

LOSSES = pa.schema(
    [
        ("prompt", pa.string()),
        ("copy", pa.int8()),
        ("loss", pa.float32()),
        ("correct", pa.float32()),
        ("tokens", pa.int32()),
    ]
)
TEXT_LOSSES = pa.schema(
    [
        *_CONDITION,
        ("loss", pa.float32()),
        ("dead_rows", pa.int32()),
    ]
)

# Of rankings (`ranking`): KL of the next token from softmax, nats, the mean over a text.
DIVERGENCES = pa.schema(
    [
        *_CONDITION,
        ("divergence", pa.float32()),
    ]
)

# Of recipes that have an S of their own (`recipe_rows`).
RECIPE_ROWS = pa.schema(
    [
        ("suite", pa.string()),
        ("length", pa.int32()),
        ("prompt", pa.string()),
        ("query", pa.int32()),
        ("layer", pa.int16()),
        ("head", pa.int16()),
        ("window", pa.int32()),
        ("recipe", pa.string()),
        ("status", pa.int8()),
        ("target", pa.int32()),
        ("argmax", pa.int32()),
        ("margin", pa.float32()),
        ("active", pa.int32()),
        ("s_own", pa.float32()),
        ("s_softmax", pa.float32()),
        ("change", pa.float32()),
    ]
)

FEATURES = pa.schema(
    [
        ("prompt", pa.string()),
        ("layer", pa.int16()),
        ("head", pa.int16()),
        *((name, pa.float32()) for name in head_types.FEATURES),
    ]
)


def with_model(table: pa.Table, model: str) -> pa.Table:
    """The table with the column `model` before the others."""
    return table.add_column(0, "model", pa.repeat(model, table.num_rows))


def row_columns(
    suite: str,
    batch: Batch,
    windows: Sequence[int | None],
    diagnosis: Diagnosis,
    biases: Mapping[str, float],
    degrees: Sequence[int | float] = DEGREES,
) -> dict[str, np.ndarray]:
    """The columns of `rows_schema` for one batch; rows of kind "answer" only where a key holds one.

    Args:
      suite: name of the suite.
      batch: the prompts.
      windows: window of each layer, None for none.
      diagnosis: diagnosis of the batch.
      biases: those of the diagnosis, in its order, by the kind of bias.
      degrees: those of the diagnosis, in its order.
    """
    window_L = np.array([w or 0 for w in windows])
    parts: dict[str, list[np.ndarray]] = {name: [] for name in rows_schema(degrees).names}
    diagnosis = jax.tree.map(np.asarray, diagnosis)
    for target, s in diagnosis.rows.items():
        shape = s.active.shape  # L, bias, B, N, Q
        layer, m, b, n, q = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij")
        wanted = batch.valid_B[b]
        if target == "answer":
            wanted = wanted & (batch.answer_position_BQ[b, q] >= 0)
        columns = {
            "suite": np.full(shape, suite),
            "length": batch.lengths_B[b],
            "prompt": np.array(batch.ids)[b],
            "query": batch.query_positions_BQ[b, q],
            "layer": layer,
            "head": n,
            "window": window_L[layer],
            "target": np.full(shape, target),
            "bias_kind": np.array(list(biases))[m],
            "bias": np.array(list(biases.values()), np.float32)[m],
            "status": s.status,
            "argmax": s.argmax,
            "answer": batch.answer_position_BQ[b, q],
            "margin": s.margin,
            "u_star": s.u_star,
            "r_star": s.r_star,
            "relative_margin": s.relative_margin,
            "active": s.active,
            "p_star": required_degree(s.active, s.relative_margin),
            **{f"s_{p}": s.s_p[..., i] for i, p in enumerate(degrees)},
        }
        once = {"s_softmax": diagnosis.softmax[target], **diagnosis.features}
        columns |= {name: np.broadcast_to(x[:, None], shape) for name, x in once.items()}
        columns |= {f"change_{p}": diagnosis.change[..., i] for i, p in enumerate(degrees)}
        for name, column in columns.items():
            parts[name].append(np.asarray(column)[wanted])
    return {name: np.concatenate(column) for name, column in parts.items()}
