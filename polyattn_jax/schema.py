"""What an audit writes: the columns (docs/polyattn.md says what they mean), and rows of a batch."""

from collections.abc import Sequence

import jax
import numpy as np
import pyarrow as pa

from polyattn_jax.diagnostic import RowStats, required_degree
from polyattn_jax.probe import DEGREES
from polyattn_jax.suites.batching import Batch

BIASES = ("zero", "auto")

ROWS = pa.schema(
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
        ("relative_margin", pa.float32()),
        ("active", pa.int32()),
        ("p_star", pa.float32()),
        *((f"s_{p}", pa.float32()) for p in DEGREES),
        ("sink", pa.float32()),
        ("on_answer", pa.float32()),
        ("distance", pa.int32()),
    ]
)

ANSWERS = pa.schema(
    [
        ("stage", pa.string()),
        ("cell", pa.string()),
        ("recipe", pa.string()),
        ("bias", pa.float32()),
        ("heads", pa.int32()),
        ("suite", pa.string()),
        ("length", pa.int32()),
        ("prompt", pa.string()),
        ("target", pa.int32()),
        ("predicted", pa.int32()),
        ("rank", pa.int32()),
        ("loss", pa.float32()),
        ("dead_rows", pa.int32()),
    ]
)

LOSSES = pa.schema(
    [
        ("prompt", pa.string()),
        ("copy", pa.int8()),
        ("loss", pa.float32()),
        ("correct", pa.float32()),
        ("tokens", pa.int32()),
    ]
)


def row_columns(
    suite: str,
    batch: Batch,
    windows: Sequence[int | None],
    stats: dict[str, RowStats],
    features: dict[str, jax.Array],
    biases: np.ndarray,
) -> dict[str, np.ndarray]:
    """The columns of `ROWS` for one batch; rows of kind "answer" only where a key holds one."""
    window_L = np.array([w or 0 for w in windows])
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ROWS.names}
    for target, s in stats.items():
        s = jax.tree.map(np.asarray, s)
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
            "bias_kind": np.array(BIASES)[m],
            "bias": biases[m],
            "status": s.status,
            "argmax": s.argmax,
            "answer": batch.answer_position_BQ[b, q],
            "margin": s.margin,
            "u_star": s.r_star,
            "relative_margin": s.relative_margin,
            "active": s.active,
            "p_star": required_degree(s.active, s.relative_margin),
            **{f"s_{p}": s.s_p[..., i] for i, p in enumerate(DEGREES)},
        }
        for name, feature in features.items():
            columns[name] = np.broadcast_to(np.asarray(feature)[:, None], shape)
        for name, column in columns.items():
            parts[name].append(np.asarray(column)[wanted])
    return {name: np.concatenate(column) for name, column in parts.items()}
