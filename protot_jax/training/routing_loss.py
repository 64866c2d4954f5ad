"""Training losses on the gates of prototypes: their entropy, and how equally they are used.

Options that the released code has and keeps off. With the write and read gates g of a layer, means
over the tokens that the loss of the text counts, over layers and over the two gates,

    entropy    mean over tokens and heads of -sum_r g_r ln g_r, in nats; a positive weight sharpens
    balance    divergence KL(mean of g || uniform) of a head, in nats; a positive weight evens out

Both are at most ln(R / N) for N heads. The balance is that of a micro-batch: with accumulation it
is the mean over micro-batches, weighted by their tokens.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.sites import keep
from lm_jax.train import losses
from lm_jax.train.objective import LanguageModelling, Numbers, read_batch
from protot_jax.mixers.prototypes import PrototypeMixer

_SITES = ("mixer.write", "mixer.read")


def adds_routing_loss(mixer: Mixer) -> bool:
    """Whether a mixer has prototypes, and a weight of a loss on their gates."""
    return isinstance(mixer, PrototypeMixer) and bool(mixer.entropy_weight or mixer.balance_weight)


@dataclasses.dataclass(frozen=True)
class RoutedLanguageModelling(LanguageModelling):
    """`LanguageModelling` plus the losses on gates, with the weights of its `PrototypeMixer`.

    `loss` in the metrics, and evaluations, are of the text alone.
    """

    columns: tuple[str, ...] = ("gate_entropy", "gate_balance")

    def loss_terms(
        self,
        params: ParamTree,
        frozen: Any,
        aux_state: Any,
        tokens_BS: jax.Array,
        normalizers: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        del frozen, aux_state
        mixer = self.mixer
        assert isinstance(mixer, PrototypeMixer)
        params, batch = self._low(params), self.make_batch(tokens_BS)
        output = read_batch(
            params,
            batch,
            self.cfg,
            mixer,
            dropout=self.dropout,
            rng=rng,
            record=dict.fromkeys(_SITES, keep),
        )
        model = losses.Predictor(output.hidden, params)
        sums = losses.summed(model, batch.target_BT, batch.loss_mask_BT, self.cfg)
        loss = sums.minimised / normalizers["tokens"]
        share = jnp.sum(batch.loss_mask_BT) / normalizers["tokens"]
        gates_GLBTR = jnp.stack([output.records[site] for site in _SITES])
        parts = gate_losses(gates_GLBTR, batch.loss_mask_BT, mixer.heads)
        entropy, balance = (share * part for part in parts)
        minimised = loss + mixer.entropy_weight * entropy + mixer.balance_weight * balance
        return minimised, {"loss": loss, "gate_entropy": entropy, "gate_balance": balance}


def gate_losses(
    gates_XBTR: jax.Array, counted_BT: jax.Array, heads: int
) -> tuple[jax.Array, jax.Array]:
    """Mean entropy and divergence from equal use, in nats, of gates with any leading axes X.

    Tokens that are not counted are left out; without any, both are 0.
    """
    R = gates_XBTR.shape[-1] // heads
    gates_XBTNR = gates_XBTR.reshape(*gates_XBTR.shape[:-1], heads, R)
    counted_BT11 = counted_BT[:, :, None, None]
    counted_XBTNR = jnp.broadcast_to(
        counted_BT11.reshape((1,) * (gates_XBTNR.ndim - 4) + counted_BT11.shape), gates_XBTNR.shape
    )
    count = jnp.maximum(jnp.sum(counted_BT), 1)
    gates_XBTNR = jnp.where(counted_XBTNR, gates_XBTNR, 0.0)
    entropy_XBTN = _entropy(gates_XBTNR)
    over = entropy_XBTN.size / counted_BT.size
    mean_XNR = jnp.sum(gates_XBTNR, axis=(-4, -3)) / count
    divergence = math.log(R) - jnp.mean(_entropy(mean_XNR))
    # Without tokens all means are 0, and no distribution.
    some = jnp.any(counted_BT)
    return jnp.sum(entropy_XBTN) / (over * count), jnp.where(some, divergence, 0.0)


def _entropy(gates_XR: jax.Array) -> jax.Array:
    """-sum g ln g over the last axis; zero gates add nothing, to the gradient either."""
    positive_XR = gates_XR > 0
    logs_XR = jnp.log(jnp.where(positive_XR, gates_XR, 1.0))
    return -jnp.sum(gates_XR * logs_XR, axis=-1)
