"""What the heads of a hybrid do on held-out windows: S of their rows, errors, losses."""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.train import losses
from lm_jax.train.evaluate import stop_between
from lm_jax.train.objective import nll
from polyattn_jax.recipes.trained_attention import HYBRID, MATCHED
from polyattn_jax.recipes.trained_heads import ReplacedHeads
from polyattn_jax.studies.distill.results import LOGITS, LOSSES, ROWS
from polyattn_jax.studies.distill.task import Task

# Queries of a window whose rows are read.
QUERIES = 16


def measure(task: Task, objective: ReplacedHeads, params: ParamTree) -> dict[str, np.ndarray]:
    """Errors, S and losses of every held-out window, with these parameters.

    Returns arrays whose first axis is the window: `document`, `tokens`, `softmax`, `hybrid` and
    `divergence` (sums in nats, the last of KL(softmax || hybrid)), `error`, `energy` `[W, L, N]`,
    `s`, `s_softmax` `[W, L, N, Q]`, and `read` `[W, Q]`, false where a query is padding.

    Raises:
      StoppedError: a stop was requested.
    """
    queries = tuple(int(q) for q in np.arange(1, QUERIES + 1) * task.config.context // QUERIES - 1)
    queries = tuple(sorted({max(q, 1) for q in queries}))
    run = functools.partial(_of_windows, objective, queries)
    step = exact_jit(
        under_mesh(run, task.mesh),
        in_shardings=(None, None, sharding.batch_sharding(task.mesh)),
        out_shardings=sharding.replicated(task.mesh),
    )
    results, documents = [], []
    for k in range(task.validation.per_epoch):
        batch = task.validation.at(k)
        tokens_BS = sharding.shard_batch(task.mesh, batch["tokens"])
        results.append(jax.tree.map(np.asarray, step(params, task.base.params, tokens_BS)))
        documents.append(batch["document"])
        stop_between(k + 1, task.validation.per_epoch)
    document = np.concatenate(documents)
    real = document >= 0
    columns = {name: np.concatenate([r[name] for r in results])[real] for name in results[0]}
    return columns | {"document": document[real]}


def _of_windows(
    objective: ReplacedHeads,
    queries: tuple[int, ...],
    params: ParamTree,
    frozen: ParamTree,
    tokens_BS: jax.Array,
) -> dict[str, jax.Array]:
    batch = objective.make_batch(tokens_BS)
    matched = objective.run(params, frozen, batch, mixer=MATCHED, queries=queries)
    hybrid = objective.run(params, frozen, batch, mixer=HYBRID)
    of_heads = {
        name: jnp.moveaxis(matched.aux[source], 0, 1)
        for name, source in (
            ("error", "error_BN"),
            ("energy", "energy_BN"),
            ("s", "s_BNQ"),
            ("s_softmax", "s_softmax_BNQ"),
        )
    }
    model, teacher = (losses.Predictor(output.hidden, frozen) for output in (hybrid, matched))
    kl_BT = losses.token_divergence(model, teacher, objective.cfg)
    return {
        "tokens": batch.loss_mask_BT.sum(1),
        "divergence": jnp.where(batch.loss_mask_BT, kl_BT, 0.0).sum(1),
        "softmax": nll(matched, frozen, objective.cfg, batch),
        "hybrid": nll(hybrid, frozen, objective.cfg, batch),
        "read": batch.input_mask_BT[:, np.array(queries)],
        **of_heads,
    }


def head_table(
    objective: ReplacedHeads, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> pa.Table:
    """One row per head (`results.ROWS`)."""
    heads_LN = objective.heads_LN
    energy_LN = before["energy"].sum(0, dtype=np.float64)
    read_WQ = before["read"]
    signed = getattr(objective.row_map, "signed", False)
    columns: dict[str, list[Any]] = {name: [] for name in ROWS.names}

    def own(measured: Mapping[str, np.ndarray], name: str, place: tuple[int, int]) -> np.ndarray:
        return measured[name][:, place[0], place[1]][read_WQ]

    for place in np.ndindex(*heads_LN.shape):
        rows = {
            "layer": place[0],
            "head": place[1],
            "replaced": bool(heads_LN[place]),
            "rows": int(read_WQ.sum()),
            "safe_softmax": float((own(before, "s_softmax", place) < 1).mean()),
        }
        for stage, measured in (("before", before), ("after", after)):
            s = own(measured, "s", place)
            error = measured["error"].sum(0, dtype=np.float64)[place]
            rows |= {
                f"safe_{stage}": None if signed else float((s < 1).mean()),
                f"s_{stage}": np.nan if signed else float(np.median(s)),
                f"error_{stage}": error / energy_LN[place] if energy_LN[place] else np.nan,
            }
        for name, values in columns.items():
            values.append(rows[name])
    return pa.table(columns, schema=ROWS)


def loss_table(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> pa.Table:
    """One row per window (`results.LOSSES`)."""
    columns = {name: before[name] for name in ("document", "tokens", "softmax")}
    columns |= {"before": before["hybrid"], "after": after["hybrid"]}
    return pa.table({name: pa.array(columns[name]) for name in LOSSES.names}).cast(LOSSES)


def logit_table(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> pa.Table:
    """One row per window, after the first stage and after the second (`results.LOGITS`)."""
    columns = {name: first[name] for name in ("document", "tokens", "softmax")}
    for stage, measured in (("first", first), ("second", second)):
        columns |= {stage: measured["hybrid"], f"divergence_{stage}": measured["divergence"]}
    return pa.table({name: pa.array(columns[name]) for name in LOGITS.names}).cast(LOGITS)
