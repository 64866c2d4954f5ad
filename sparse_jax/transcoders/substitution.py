"""The model with its MLPs replaced by a transcoder, and how far its predictions then move.

The features of a layer are computed from the input that its MLP has in the replaced run, so errors
of one layer reach the next. Tokens that training left out (`inputs`) keep their MLPs.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import StatefulEdit
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.transcoders.inputs import OUTPUT
from sparse_jax.transcoders.transcoder import Transcoder, activated


@struct.dataclass
class Agreement:
    """Sums over the tokens of a batch that count.

    Attributes:
      tokens: number of tokens.
      divergence: KL of the model's next-token distribution from the replaced one's, in nats.
      agreeing: tokens with the same most likely next token.
    """

    tokens: jax.Array
    divergence: jax.Array
    agreeing: jax.Array


@struct.dataclass
class _State:
    """What features so far write into each layer, and the next layer.

    After L layers there is room for what a window would have beyond the last, so that a layer's
    writes are one slice. W_skip of a layer is in what is written there from its input on.
    """

    outputs_LBTD: jax.Array
    layer: jax.Array


@struct.dataclass
class _Start(StatefulEdit):
    """The edit at the embedding: sets what is there before any feature writes."""

    num_layers: int = struct.field(pytree_node=False)
    beyond: int = struct.field(pytree_node=False, default=0)
    written_LBTD: jax.Array | None = None
    embedding_BTD: jax.Array | None = None

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, _State]:
        del state
        written_LBTD = jnp.zeros((self.num_layers, *x.shape), jnp.float32)
        if self.written_LBTD is not None:
            written_LBTD = written_LBTD + self.written_LBTD
        written_LBTD = jnp.pad(written_LBTD, [(0, self.beyond), (0, 0), (0, 0), (0, 0)])
        if self.embedding_BTD is not None:
            x = x + self.embedding_BTD
        return x, _State(written_LBTD, jnp.zeros((), jnp.int32))


@struct.dataclass
class _Encode(StatefulEdit):
    """The edit at an MLP's input: adds what its layer's features write; leaves are of one layer."""

    encoder_FD: jax.Array
    bias_F: jax.Array
    theta_F: jax.Array
    decoder_WFD: jax.Array
    skip_DD: jax.Array | None
    activations: StatefulEdit | None
    activated: Callable[[jax.Array, jax.Array], jax.Array] = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        pre_BTF = jnp.einsum("BTD,FD->BTF", x.astype(jnp.float32), self.encoder_FD)
        pre_BTF += self.bias_F[None, None]
        z_BTF = self.activated(pre_BTF, self.theta_F[None, None])
        if self.activations is not None:
            z_BTF, _ = self.activations(z_BTF, None)
        written_WBTD = jnp.einsum("BTF,WFD->WBTD", z_BTF, self.decoder_WFD)
        if self.skip_DD is not None:
            skipped_BTD = jnp.einsum("BTD,ED->BTE", x.astype(jnp.float32), self.skip_DD)
            written_WBTD = written_WBTD.at[0].add(skipped_BTD)
        before, at = state.outputs_LBTD, state.layer
        window_WBTD = jax.lax.dynamic_slice_in_dim(before, at, len(written_WBTD)) + written_WBTD
        after = jax.lax.dynamic_update_slice_in_dim(before, window_WBTD, at, 0)
        return x, _State(after, at)


@struct.dataclass
class _Write(StatefulEdit):
    """The edit at an MLP's output: what all features wrote there, where the token is replaced."""

    bias_D: jax.Array
    replaced_BT1: jax.Array

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        y_BTD = state.outputs_LBTD[state.layer] + self.bias_D[None, None]
        y_BTD = jnp.where(self.replaced_BT1, y_BTD.astype(x.dtype), x)
        return y_BTD, _State(state.outputs_LBTD, state.layer + 1)


def substitute(
    transcoder: Transcoder,
    replaced_BT: jax.Array,
    *,
    written_LBTD: jax.Array | None = None,
    embedding_BTD: jax.Array | None = None,
    activations: StatefulEdit | None = None,
) -> Mapping[str, Any]:
    """Edits that replace the MLPs by a transcoder of raw activations.

    Args:
      transcoder: a transcoder of the model that is run.
      replaced_BT: true for the tokens whose MLPs are replaced.
      written_LBTD: what else is written into each layer, such as errors; None for nothing.
      embedding_BTD: vectors added to the embedding; None for nothing.
      activations: edit of the features' activations `[B, T, F]`, whose leaves have a leading L.
    """
    cfg, p = transcoder.cfg, transcoder.params
    L, F, D = cfg.num_layers, cfg.features, cfg.hidden_size
    zero_FD = jnp.zeros((F, D), jnp.float32)
    W = min(cfg.window or L, L)
    decoders = [
        jnp.stack(
            [
                transcoder.decoder(source, target) if target < L else zero_FD
                for target in range(source, source + W)
            ]
        )
        for source in range(L)
    ]
    everywhere = jnp.broadcast_to(replaced_BT[None, :, :, None], (L, *replaced_BT.shape, 1))
    return {
        "embed": _Start(L, W - 1, written_LBTD, embedding_BTD),
        transcoder.site: _Encode(
            p["encoder"],
            p["encoder_bias"],
            transcoder.theta_LF,
            jnp.stack(decoders),
            transcoder.skip_LDD,
            activations,
            functools.partial(activated, cfg),
        ),
        OUTPUT: _Write(p["decoder_bias"], everywhere),
    }


@exact_jit
def agreement(
    model: CircuitModel,
    transcoder: Transcoder,
    tokens_BT: jax.Array,
    valid_BT: jax.Array,
    replaced_BT: jax.Array,
) -> Agreement:
    """Next-token distributions of the model and of the replaced one, at the replaced tokens.

    Args:
      model: a dense or sparse model.
      transcoder: a transcoder of raw activations.
      tokens_BT: ids.
      valid_BT: false where a token is padding.
      replaced_BT: true for the tokens whose MLPs are replaced (`substitute`).
    """
    whole_BTV = model.forward(tokens_BT, valid_BT).logits
    edits = substitute(transcoder, replaced_BT)
    replaced_BTV = model.forward(tokens_BT, valid_BT, edits=edits).logits
    log_p, log_q = jax.nn.log_softmax(whole_BTV), jax.nn.log_softmax(replaced_BTV)
    divergence_BT = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
    same_BT = whole_BTV.argmax(-1) == replaced_BTV.argmax(-1)
    kept_BT = valid_BT & replaced_BT
    return Agreement(
        kept_BT.sum(),
        jnp.sum(jnp.where(kept_BT, divergence_BT, 0.0)),
        jnp.sum(same_BT & kept_BT),
    )
