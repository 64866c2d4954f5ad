"""What one post-training leaves in its folder, beside what the training loop writes.

model/                the sparse model, as `model.load` reads it
adapter.safetensors   its adapters by themselves
edges.parquet         open edges and visible pairs by layer and head
windows.parquet       losses of both models, edges and pairs of each window
patterns.json         attention of chosen heads before and after
result.json           the numbers, written last: where it is, the rest is whole
"""

from collections.abc import Sequence
import dataclasses
import functools
from pathlib import Path
import shutil
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.checkpoint.adapters import ADAPTER_FILE, save_adapters
from lm_jax.model import lora
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.run.files import replace_file, write_json
from lm_jax.statistics import Interval
from lm_jax.weights.load import Pretrained
from lm_jax.weights.save import save_pretrained
from sparse_jax import model as sparse_model
from sparse_jax.config import PosttrainConfig
from sparse_jax.evaluation import Compared
from sparse_jax.model import SparseModel
from sparse_jax.objective import GATE_BIAS, WEIGHTS, Sparsifying
from sparse_jax.patterns import Shown
from sparse_jax.summary import ControlResult, RunResult

EXPORTED, RESULT = "model", "result.json"
EDGES, WINDOWS, PATTERNS = "edges.parquet", "windows.parquet", "patterns.json"
EDGES_SCHEMA = pa.schema(
    {"layer": pa.int32(), "head": pa.int32(), "open": pa.int64(), "pairs": pa.int64()}
)


def merge(
    base: Pretrained, objective: Sparsifying, params: ParamTree, *, dtype: Any = None
) -> SparseModel:
    """What was trained as a model with gates, adapters added to the weights they were over.

    The sum is made in float32 and rounded once, to `dtype` or, without one, to that of the base.
    """
    weights, adapters = params[WEIGHTS], objective.adapters
    if adapters is not None:
        added = jax.jit(functools.partial(lora.merge, settings=adapters, dtype=dtype))
        weights = added(base.params, weights)
    gates = sparse_model.constant_gates(
        base.cfg, objective.bias, raw_gate=objective.raw_gate, renormalise=objective.renormalise
    )
    if GATE_BIAS in params:
        gates = dataclasses.replace(gates, bias_LN=sharding.fetch(params[GATE_BIAS]))
    return SparseModel(dataclasses.replace(base, params=weights), gates, {})


def export(
    folder: Path,
    config: PosttrainConfig,
    merged: SparseModel,
    adapters: ParamTree | None,
    result: RunResult,
    findings: Compared,
    shown: Sequence[Shown],
) -> None:
    """Writes all of it; every process calls it, and one writes.

    Args:
      folder: of the run.
      config: of the run.
      merged: the model as it was evaluated.
      adapters: those in it, or None if all weights were trained.
      result: the numbers.
      findings: the evaluation behind them.
      shown: the patterns.
    """
    whole = dataclasses.replace(merged.base, params=sharding.fetch(merged.params))
    own = None if adapters is None else sharding.fetch(adapters)
    card = {
        "base": Path(config.model).name,
        "base sha256": whole.sha256,
        "corpus": f"{config.corpus.source}, held-out part, windows of {config.context} tokens",
        "validation tokens": result.validation_tokens,
        "dense loss, nats per token": result.dense_loss.estimate,
        "sparse minus dense loss": _with_ends(result.difference, "+.4f"),
        "target loss": result.target,
        "open edges": _with_ends(result.edges, ".2%"),
        "seed": f"{result.seed}, one run",
        "steps": result.steps,
        "tokens trained on": result.tokens_seen,
    }

    def write() -> None:
        # What a killed export left.
        shutil.rmtree(folder / EXPORTED, ignore_errors=True)
        if own is not None:
            save_adapters(folder / ADAPTER_FILE, own, config.adapters, base_sha256=whole.sha256)
        write_json(folder / PATTERNS, shown)
        sparse_model.save(folder / EXPORTED, whole, merged.gates, card)
        record(folder, findings, result)

    processes.on_first(write)


def export_control(
    folder: Path, merged: SparseModel, findings: Compared, result: ControlResult
) -> None:
    """Writes the control, whose gates never close, as the dense model that it is; as `export`."""
    whole = dataclasses.replace(merged.base, params=sharding.fetch(merged.params))

    def write() -> None:
        shutil.rmtree(folder / EXPORTED, ignore_errors=True)
        save_pretrained(folder / EXPORTED, whole.cfg, whole.params, whole.tokenizer)
        record(folder, findings, result)

    processes.on_first(write)


def record(folder: Path, findings: Compared, result: RunResult | ControlResult) -> None:
    """Writes an evaluation, and last of all the numbers."""
    for name, table in ((EDGES, edges_table(findings)), (WINDOWS, findings.windows)):
        with replace_file(folder / name) as file:
            pq.write_table(table, file)
    write_json(folder / RESULT, result)


def _with_ends(interval: Interval, form: str) -> str:
    low, estimate, high = (
        format(x, form) for x in (interval.low, interval.estimate, interval.high)
    )
    return f"{estimate} (95 % interval {low} to {high}, {interval.n} documents)"


def edges_table(result: Compared) -> pa.Table:
    """A row per head: how many of its edges were open over all windows, of how many."""
    L, N = result.open_LN.shape
    layer, head = np.divmod(np.arange(L * N), N)
    columns = {
        "layer": layer,
        "head": head,
        "open": result.open_LN.ravel(),
        "pairs": np.repeat(result.pairs_L, N),
    }
    return pa.table(columns).cast(EDGES_SCHEMA)
