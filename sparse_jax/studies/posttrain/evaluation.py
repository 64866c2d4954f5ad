"""Evaluation of the dense and the sparse model on the same tokens, with deterministic gates.

Losses are paired by window, so that their difference is known far better than either. Intervals
come from resampling documents, because windows of one document are alike.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_jax import statistics
from lm_jax.model.decoder import forward
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.statistics import Interval
from lm_jax.train import losses
from lm_jax.train.evaluate import Batches, stop_between
from lm_jax.train.objective import MakeBatch, ignore_index_batch, nll
from lm_jax.weights.load import Pretrained
from sparse_jax.gates.model import SparseModel

WINDOWS_SCHEMA = pa.schema(
    {
        "document": pa.int64(),
        "tokens": pa.int64(),
        "dense_nll": pa.float64(),
        "sparse_nll": pa.float64(),
        "divergence": pa.float64(),
        "open_edges": pa.int64(),
        "pairs": pa.int64(),
    }
)


@dataclasses.dataclass(frozen=True)
class PairedEvaluation:
    """Losses and open edges of both models on the same windows.

    Attributes:
      windows: a row per window, as `WINDOWS_SCHEMA` has it; losses and KL(dense || sparse) are sums
        in nats, edges and pairs are counted over all layers and heads.
      open_LN: open edges over all windows.
      pairs_L: visible pairs of one head over all windows.
    """

    windows: pa.Table
    open_LN: np.ndarray
    pairs_L: np.ndarray

    def ratio(self, above: str, below: str) -> Interval:
        """Sum of one column over the sum of another, with its interval; n counts documents."""
        return _ratio_interval(self.windows, self._column(above), self._column(below))

    @property
    def difference(self) -> Interval:
        """Sparse minus dense loss, in nats per token, with its interval."""
        more = self._column("sparse_nll") - self._column("dense_nll")
        return _ratio_interval(self.windows, more, self._column("tokens"))

    def _column(self, name: str) -> np.ndarray:
        return self.windows[name].to_numpy()


def difference(windows: pa.Table, others: pa.Table) -> Interval:
    """Sparse loss of one table minus that of another on the same windows, with its interval."""
    if windows["document"] != others["document"] or windows["tokens"] != others["tokens"]:
        raise ValueError("the two tables hold different windows")
    more = pc.subtract(windows["sparse_nll"], others["sparse_nll"])
    return _ratio_interval(windows, more.to_numpy(), windows["tokens"].to_numpy())


def _ratio_interval(windows: pa.Table, above: np.ndarray, below: np.ndarray) -> Interval:
    return statistics.clustered_ratio(above, below, windows["document"].to_numpy())


def compare(
    dense: Pretrained,
    sparse: SparseModel,
    batches: Batches,
    mesh: jax.sharding.Mesh,
    *,
    make_batch: MakeBatch = ignore_index_batch,
    key: jax.Array | None = None,
) -> PairedEvaluation:
    """Evaluates both models, in the dtypes of their parameters, on one pass over `batches`.

    Gates open by rule, or with a key are sampled, as in training.

    Raises:
      StoppedError: a stop was requested.
    """
    step = exact_jit(
        under_mesh(functools.partial(_evaluate, dense, sparse, make_batch), mesh),
        in_shardings=(None, None, sharding.batch_sharding(mesh), None),
        out_shardings=sharding.replicated(mesh),
    )
    outputs: list[dict[str, np.ndarray]] = []
    documents = []
    for k in range(batches.per_epoch):
        batch = batches.at(k)
        tokens_BS = sharding.shard_batch(mesh, batch["tokens"])
        own_key = None if key is None else jax.random.fold_in(key, k)
        output = step(dense.params, sparse.params, tokens_BS, own_key)
        outputs.append(jax.tree.map(np.asarray, output))
        # A process reads its own share of the rows, and gets the numbers of all.
        document_B = sharding.shard_batch(mesh, batch["document"].astype(np.int32))
        documents.append(sharding.fetch(document_B))
        stop_between(k + 1, batches.per_epoch)
    document = np.concatenate(documents)
    real = document >= 0
    open_WLN, pairs_WL = (
        np.concatenate([each[name] for each in outputs])[real].astype(np.int64)
        for name in ("open_BLN", "pairs_BL")
    )
    columns = {
        name: np.concatenate([each[name] for each in outputs])[real]
        for name in ("tokens", "dense_nll", "sparse_nll", "divergence")
    }
    N = sparse.cfg.num_heads
    windows = {
        "document": document[real],
        **columns,
        "open_edges": open_WLN.sum((1, 2)),
        "pairs": N * pairs_WL.sum(1),
    }
    table = pa.table({name: pa.array(windows[name]) for name in WINDOWS_SCHEMA.names})
    return PairedEvaluation(table.cast(WINDOWS_SCHEMA), open_WLN.sum(0), pairs_WL.sum(0))


def _evaluate(
    dense: Pretrained,
    sparse: SparseModel,
    make_batch: MakeBatch,
    dense_params: Any,
    sparse_params: Any,
    tokens_BS: jax.Array,
    key: jax.Array | None,
) -> dict[str, jax.Array]:
    batch = make_batch(tokens_BS)
    gated = sparse.with_params(sparse_params).forward(
        batch.input_BT,
        mode="threshold" if key is None else "sample",
        key=key,
        valid_BT=batch.input_mask_BT,
    )
    ungated = forward(dense_params, batch.input_BT, dense.cfg, valid_BT=batch.input_mask_BT)
    kl_BT = losses.token_divergence(
        losses.Predictor(gated.hidden, sparse_params),
        losses.Predictor(ungated.hidden, dense_params),
        sparse.cfg,
    )
    return {
        "divergence": jnp.sum(jnp.where(batch.loss_mask_BT, kl_BT, 0.0), axis=1),
        "dense_nll": nll(ungated, dense_params, dense.cfg, batch),
        "sparse_nll": nll(gated, sparse_params, sparse.cfg, batch),
        "tokens": batch.loss_mask_BT.sum(1),
        "open_BLN": gated.aux["open_edges_BN"].swapaxes(0, 1),
        "pairs_BL": gated.aux["pairs_B"].T,
    }
