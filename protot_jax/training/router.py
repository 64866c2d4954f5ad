"""Router statistics of a ProtoT during training, for every layer at every evaluation.

The statistics that the authors' code prints for each epoch (spec row PT-45), and those of appendix
A.7.1, over every token of the validation text that the perplexity is computed on. Names are
`layer_<l>/<what>`:

    alpha, write_tau, read_tau       the scalars, alpha the mean over heads; logits are divided by
                                     |tau|
    half_life_min, _median, _max     in tokens
    write_..., read_...              gates: `gini` and `max_share` of the prototypes' shares of all
                                     tokens, `top_1` the mean largest gate, `dead` the number that
                                     never reach 0.01, `logit_std` over tokens and prototypes
    js_read_write                    Jensen-Shannon divergence of the two gates of a token, in nats
    mass                             mean D of Eq. 2, the denominator of a prototype's mean
    value_norm, prototype_norm       of the value matrix (Frobenius), and the mean of the rows of P
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from lm_jax.model import sites
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward, param_spec
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.train.evaluate import Batches
from lm_jax.train.loop import Measure
from lm_jax.train.objective import MakeBatch, next_token_batch
from protot_jax.mixers import gate_statistics
from protot_jax.mixers.prototypes import PrototypeMixer

_SCALARS = ("alpha", "write_tau", "read_tau")
_GATES = ("write", "read")
_SITES = ("mixer.write", "mixer.read", "mixer.write_logits", "mixer.read_logits")
# Sums over the gates of one batch, by name.
Sums = Mapping[str, Any]


def router_statistics(
    cfg: DecoderConfig,
    mixer: PrototypeMixer,
    batches: Batches,
    mesh: Mesh,
    make_batch: MakeBatch = next_token_batch,
) -> Measure:
    """A `measure` for `lm_jax.train.loop.Hooks`, over the inputs of one pass of `batches`.

    Each batch is reduced on the device, so that the gates of one batch at a time are in memory.
    """
    batch_sums = exact_jit(
        under_mesh(functools.partial(_sums, cfg=cfg, mixer=mixer, make_batch=make_batch), mesh),
        in_shardings=(
            sharding.param_shardings(mesh, param_spec(cfg, mixer)),
            sharding.batch_sharding(mesh),
        ),
        out_shardings=sharding.replicated(mesh),
    )

    def measure(params: ParamTree, *rest: Any) -> dict[str, float]:
        del rest
        parts = [
            batch_sums(params, sharding.shard_batch(mesh, batches.at(k)["tokens"]))
            for k in range(batches.per_epoch)
        ]
        result = _joined(sharding.fetch(parts))
        own = sharding.fetch(params["blocks"]["mixer"])
        numbers = {}
        for layer in range(cfg.num_layers):
            scalars = {name: np.mean(own[name][layer]) for name in _SCALARS}
            layer_sums = {name: x if name == "tokens" else x[layer] for name, x in result.items()}
            values = scalars | _of_layer(layer_sums, own["decay_logit"][layer])
            values["value_norm"] = np.linalg.norm(own["value"][layer])
            values["prototype_norm"] = np.linalg.norm(own["prototypes"][layer], axis=-1).mean()
            numbers |= {f"layer_{layer}/{name}": float(x) for name, x in values.items()}
        return numbers

    return measure


def _sums(
    params: ParamTree,
    tokens_BS: Any,
    *,
    cfg: DecoderConfig,
    mixer: PrototypeMixer,
    make_batch: MakeBatch,
) -> Sums:
    """Sums over the tokens of one batch, for every layer, by name."""
    batch = make_batch(tokens_BS)
    tokens_BT, valid_BT, document_BT = batch.input_BT, batch.input_mask_BT, batch.document_BT
    # Logits of a single position, because none are needed.
    first_B1 = jnp.zeros((tokens_BT.shape[0], 1), jnp.int32)
    records = forward(
        params,
        tokens_BT,
        cfg,
        mixer=mixer,
        record=dict.fromkeys(_SITES, sites.keep),
        valid_BT=valid_BT,
        document_BT=document_BT,
        logits_at=first_B1,
    ).records
    write_LBTR, read_LBTR = records["mixer.write"], records["mixer.read"]
    count = valid_BT.sum()
    sums: dict[str, Any] = {"tokens": count}
    # The gates of padding are zero.
    for name, gate_LBTR in zip(_GATES, (write_LBTR, read_LBTR), strict=True):
        sums[f"{name}_share"] = gate_LBTR.sum((1, 2))
        sums[f"{name}_largest"] = gate_LBTR.max((1, 2))
        sums[f"{name}_top_1"] = gate_LBTR.max(3).sum((1, 2))
        logits_LBTR = records[f"mixer.{name}_logits"]
        where_LBTR = jnp.broadcast_to(valid_BT[None, :, :, None], logits_LBTR.shape)
        mean_L = jnp.sum(jnp.where(where_LBTR, logits_LBTR, 0.0), (1, 2, 3))
        mean_L = mean_L / jnp.maximum(count * logits_LBTR.shape[3], 1)
        apart_LBTR = jnp.where(where_LBTR, logits_LBTR - mean_L[:, None, None, None], 0.0)
        sums[f"{name}_logit_mean"] = mean_L
        sums[f"{name}_logit_squares"] = jnp.square(apart_LBTR).sum((1, 2, 3))
    sums["js_read_write"] = jensen_shannon(write_LBTR, read_LBTR).sum((1, 2))
    decay_LR = jax.nn.sigmoid(params["blocks"]["mixer"]["decay_logit"].astype(jnp.float32))
    mass_LBTR = _masses(write_LBTR, decay_LR, document_BT)
    sums["mass"] = jnp.where(valid_BT[None, :, :, None], mass_LBTR, 0.0).sum((1, 2)).mean(1)
    return sums


def _masses(write_LBTR: jax.Array, decay_LR: jax.Array, document_BT: jax.Array | None) -> jax.Array:
    """D of Eq. 2 before every token, where the last write is discounted once."""
    if document_BT is None:
        document_BT = jnp.zeros(write_LBTR.shape[1:3], jnp.int32)
    before_BT = jnp.concatenate([document_BT[:, :1], document_BT[:, :-1]], 1)
    same_TB1 = (document_BT == before_BT).T[..., None]

    def step(mass_LBR, inputs):
        write_LBR, same_B1 = inputs
        mass_LBR = jnp.where(same_B1[None], mass_LBR, 0.0)
        return decay_LR[:, None] * (mass_LBR + write_LBR), mass_LBR

    _, mass_TLBR = jax.lax.scan(
        step, jnp.zeros_like(write_LBTR[:, :, 0]), (jnp.moveaxis(write_LBTR, 2, 0), same_TB1)
    )
    return jnp.moveaxis(mass_TLBR, 0, 2)


def _joined(parts: Sequence[Sums]) -> dict[str, np.ndarray]:
    """The sums over all batches, in float64; `logit_std` from means and squares about them."""
    stacked = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    results = {
        name: x.max(0) if name.endswith("_largest") else x.sum(0, dtype=np.float64)
        for name, x in stacked.items()
    }
    size_K1 = stacked["tokens"][:, None].astype(np.float64)
    R = results["write_share"].shape[1]
    for name in _GATES:
        mean_KL = stacked[f"{name}_logit_mean"].astype(np.float64)
        mean_L = (size_K1 * mean_KL).sum(0) / size_K1.sum()
        between_L = (R * size_K1 * (mean_KL - mean_L[None]) ** 2).sum(0)
        squares_L = results[f"{name}_logit_squares"] + between_L
        results[f"{name}_logit_std"] = np.sqrt(squares_L / (R * size_K1.sum()))
    return results


def _of_layer(result: Mapping[str, np.ndarray], decay_logit_R: np.ndarray) -> dict[str, Any]:
    half_life_R = gate_statistics.half_life(decay_logit_R)
    tokens = result["tokens"]
    values = {
        "half_life_min": half_life_R.min(),
        "half_life_median": np.median(half_life_R),
        "half_life_max": half_life_R.max(),
        "js_read_write": result["js_read_write"] / tokens,
        "mass": result["mass"] / tokens,
    }
    for name in _GATES:
        share_R = result[f"{name}_share"]
        values |= {
            f"{name}_gini": gate_statistics.gini(share_R),
            f"{name}_max_share": share_R.max() / share_R.sum(),
            f"{name}_top_1": result[f"{name}_top_1"] / tokens,
            f"{name}_dead": (result[f"{name}_largest"] < gate_statistics.ACTIVE).sum(),
            f"{name}_logit_std": result[f"{name}_logit_std"],
        }
    return values


def jensen_shannon(p: jax.Array, q: jax.Array) -> jax.Array:
    """Jensen-Shannon divergence over the last axis, in nats, at most ln 2; 0 for zero vectors.

    ln(p / m), with m the mean of both, is computed as ln(1 + (p - q) / (p + q)), which does not
    cancel where they are nearly equal.
    """
    apart = (p - q) / jnp.where(p + q > 0, p + q, 1.0)
    xlog1py = jax.scipy.special.xlog1py
    return (xlog1py(p, apart) + xlog1py(q, -apart)).sum(-1) / 2
