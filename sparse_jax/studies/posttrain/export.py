"""Files that one run of post-training exports, in addition to those of the training loop.

model/                the sparse model, as `model.load` reads it
adapter.safetensors   its adapters alone
peft/                 the same in the layout of PEFT with the gates, read like model/ over the base
edges.parquet         open edges and visible pairs by layer and head
kinds.parquet         what open edges lead to, by layer and head (`kinds`)
windows.parquet       losses of both models, edges and pairs of each window
patterns.json         attention of chosen heads before and after (`results.TextPatterns`)
result.json           the numbers (`results.RunResult`), written last: if it is there, all is
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
import pyarrow.compute as pc

from lm_jax.checkpoint.adapters import ADAPTER_FILE, save_adapters
from lm_jax.model import lora
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.run.files import write_bytes, write_json
from lm_jax.run.tables import write_table
from lm_jax.statistics import Interval
from lm_jax.weights import card as cards
from lm_jax.weights.load import Pretrained
from lm_jax.weights.save import save_pretrained
from sparse_jax.gates import model as sparse_model
from sparse_jax.gates.model import SparseModel
from sparse_jax.gates.objective import GATE_BIAS, WEIGHTS, Sparsifying
from sparse_jax.studies.posttrain.evaluation import PairedEvaluation
from sparse_jax.studies.posttrain.results import ControlResult, RunResult, TextPatterns
from sparse_jax.studies.posttrain.settings import PosttrainConfig

EXPORTED, PEFT, RESULT = "model", "peft", "result.json"
EDGES, WINDOWS, PATTERNS = "edges.parquet", "windows.parquet", "patterns.json"
KINDS = "kinds.parquet"
_OVER_DENSE, _OVER_CONTROL = "sparse minus dense loss", "sparse minus control loss"
EDGES_SCHEMA = pa.schema(
    {"layer": pa.int32(), "head": pa.int32(), "open": pa.int64(), "pairs": pa.int64()}
)


def merge(
    base: Pretrained, objective: Sparsifying, params: ParamTree, *, dtype: Any = None
) -> SparseModel:
    """The trained parameters as a model with gates, adapters merged into the frozen weights.

    The sum is computed in float32 and rounded once, to `dtype` or, if it is None, to that of the
    base.
    """
    weights, adapters = params[WEIGHTS], objective.adapters
    if adapters is not None:
        add = jax.jit(functools.partial(lora.merge, settings=adapters, dtype=dtype))
        weights = add(base.params, weights)
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
    evaluation: PairedEvaluation,
    texts: Sequence[TextPatterns],
    kinds: pa.Table,
) -> None:
    """Writes the files of a run; every process calls it, and one writes.

    Args:
      folder: folder of the run.
      config: settings of the run.
      merged: the evaluated model.
      adapters: those merged into it, or None if all weights were trained.
      result: the numbers.
      evaluation: evaluation of both models, from which the numbers come.
      texts: attention patterns.
      kinds: what open edges lead to (`kinds.edge_kinds`).
    """
    whole = dataclasses.replace(merged.base, params=sharding.fetch(merged.params))
    kept = None if adapters is None else sharding.fetch(adapters)
    card = _origin(config, whole.sha256, result.validation_tokens) | {
        "dense loss, nats per token": result.dense_loss.estimate,
        "sparse loss, nats per token": _interval_text(result.loss, ".4f"),
        _OVER_DENSE: _interval_text(result.difference, "+.4f"),
        **_bound_rows(config, result),
        "open edges": _interval_text(result.edges, ".2%"),
        "seed": f"{result.seed}, one run",
        "steps": result.steps,
        "tokens trained on": result.tokens_seen,
    }

    # The adapters lie over the base, whose tokenizer and configuration the merged model has.
    base = whole.identity.text

    def write() -> None:
        # A killed export may have left part of it.
        for part in (EXPORTED, PEFT):
            shutil.rmtree(folder / part, ignore_errors=True)
        if kept is not None:
            save_adapters(folder / ADAPTER_FILE, kept, config.adapters, base_sha256=base)
            here = Path(config.model)
            name = str(here.resolve()) if here.exists() else config.model
            over = whole, kept, config.adapters, merged.gates, card
            sparse_model.save_over(folder / PEFT, name, *over)
        write_json(folder / PATTERNS, texts)
        write_table(folder / KINDS, kinds)
        sparse_model.save(folder / EXPORTED, whole, merged.gates, card)
        record(folder, evaluation, result)

    processes.on_first(write)


def _bound_rows(config: PosttrainConfig, result: RunResult) -> dict[str, Any]:
    """The bound of a card, and what is bounded where it is not the loss."""
    if config.constraint == "divergence" and result.divergence is not None:
        return {
            "divergence from dense, nats per token": _interval_text(result.divergence, ".4f"),
            "bound of the divergence": result.target,
        }
    return {
        "target loss": result.target,
        "sparse minus target loss": f"{result.loss.estimate - result.target:+.4f}",
    }


def add_control(folder: Path, over: Interval) -> None:
    """Adds to the cards of an exported model its loss minus that of its control.

    The control may be trained after the model.
    """

    def write() -> None:
        # Adapters of before have no gates beside them, and runs without adapters none of both.
        for part in (EXPORTED, PEFT):
            if (folder / part / sparse_model.SPARSE).is_file():
                add(folder / part)

    def add(model: Path) -> None:
        rows = list(sparse_model.read_note(model)["numbers"].items())
        kept = [row for row in rows if row[0] != _OVER_CONTROL]
        place = [name for name, _ in kept].index(_OVER_DENSE) + 1
        kept.insert(place, (_OVER_CONTROL, _interval_text(over, "+.4f")))
        sparse_model.replace_numbers(model, dict(kept))

    processes.on_first(write)


def _origin(config: PosttrainConfig, sha256: str, tokens: int) -> dict[str, Any]:
    """The facts of a card on base and text."""
    return {
        "base": Path(config.model).name,
        "base sha256": sha256,
        "corpus": f"{cards.portable(config.corpus.source)}, held-out part, windows of "
        f"{config.context} tokens",
        "validation tokens": tokens,
    }


def export_control(
    folder: Path,
    config: PosttrainConfig,
    merged: SparseModel,
    evaluation: PairedEvaluation,
    result: ControlResult,
) -> None:
    """Writes the control, whose gates never close, as a dense model; otherwise as `export`."""
    whole = dataclasses.replace(merged.base, params=sharding.fetch(merged.params))
    text = cards.card(
        "The control of a model with sparse attention",
        "A dense model, trained on the same text for as many updates as the sparse one, with every "
        "gate open.",
        _origin(config, whole.sha256, pc.sum(evaluation.windows["tokens"]).as_py())
        | {
            "loss, nats per token": _interval_text(result.loss, ".4f"),
            "minus the base's": _interval_text(result.difference, "+.4f"),
            "seed": f"{result.seed}, one run",
            "steps": result.steps,
            "tokens trained on": result.tokens_seen,
        },
        'Load it with `lm_jax.load_pretrained("this folder")` or `transformers`. It inherits the '
        "licence and the limits of its base.",
    )

    def write() -> None:
        shutil.rmtree(folder / EXPORTED, ignore_errors=True)
        save_pretrained(folder / EXPORTED, whole.cfg, whole.params, whole.tokenizer)
        write_bytes(folder / EXPORTED / cards.CARD, text.encode())
        record(folder, evaluation, result)

    processes.on_first(write)


def record(folder: Path, evaluation: PairedEvaluation, result: RunResult | ControlResult) -> None:
    """Writes the tables of an evaluation, and the numbers last."""
    for name, table in ((EDGES, edges_table(evaluation)), (WINDOWS, evaluation.windows)):
        write_table(folder / name, table)
    write_json(folder / RESULT, result)


def _interval_text(interval: Interval, form: str) -> str:
    low, estimate, high = (
        format(x, form) for x in (interval.low, interval.estimate, interval.high)
    )
    return f"{estimate} (95 % interval {low} to {high}, {interval.n} documents)"


def edges_table(result: PairedEvaluation) -> pa.Table:
    """Open edges and visible pairs of each head over all windows, a row per head."""
    L, N = result.open_LN.shape
    layer, head = np.divmod(np.arange(L * N), N)
    columns = {
        "layer": layer,
        "head": head,
        "open": result.open_LN.ravel(),
        "pairs": np.repeat(result.pairs_L, N),
    }
    return pa.table(columns).cast(EDGES_SCHEMA)
