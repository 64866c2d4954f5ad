"""Direct logit attribution: what each component adds to a difference of two logits by itself.

With the divisors of the norms held at their values, the logits are a sum over what the components
write into the residual stream, and each one's share is its value times the gradient along the
direct path. Shares of heads, MLPs, embedding and the rest add up to the difference before a soft
cap of the logits (Elhage et al. 2021; TransformerLens, `logit_attrs`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model import layers
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward
from lm_jax.model.edits import Add, Chain, Freeze, resolve
from lm_jax.model.mixers import ATTENTION, AttentionMixer, Mixer
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep


@dataclasses.dataclass(frozen=True, repr=False)
class Attribution:
    """Shares of a logit difference, by prompt (B) and component.

    Attributes:
      total_B: the difference before a soft cap.
      embed_B: share of token and learned position embedding.
      mixer_LBN: share of each head; of each layer's mixer (N = 1) where it has no heads, or where
        heads of layers differ in width.
      mlp_LB: share of each MLP, with what a layer's own input adds (Gemma 4).
      rest_B: share of the biases of attention outputs and norms, and of what edits write elsewhere,
        such as a steering vector.
    """

    total_B: np.ndarray
    embed_B: np.ndarray
    mixer_LBN: np.ndarray
    mlp_LB: np.ndarray
    rest_B: np.ndarray

    def top(self, k: int = 10) -> list[tuple[str, float]]:
        """The k components of largest share in absolute value, the mean over prompts."""
        mixer_LN, mlp_L = self.mixer_LBN.mean(1), self.mlp_LB.mean(1)
        heads = mixer_LN.shape[1] > 1
        shares = {"embed": float(self.embed_B.mean())}
        for layer, row_N in enumerate(mixer_LN):
            for head, share in enumerate(row_N):
                shares[f"L{layer}H{head}" if heads else f"L{layer}.attn"] = float(share)
            shares[f"L{layer}.mlp"] = float(mlp_L[layer])
        return sorted(shares.items(), key=lambda item: -abs(item[1]))[:k]

    def __repr__(self) -> str:
        """The difference and the largest shares."""
        best = ", ".join(f"{name} {share:+.2f}" for name, share in self.top(5))
        return f"Attribution({float(self.total_B.mean()):+.2f} = {best}, ...)"


def direct_logit_attribution(
    params: Any,
    tokens_BT: jax.Array,
    cfg: DecoderConfig,
    at_B: jax.Array,
    answers_2: jax.Array,
    *,
    edits: Any = None,
    attend: Any = None,
    mixer: Mixer = ATTENTION,
    valid_BT: jax.Array | None = None,
) -> Attribution:
    """The shares of components in the logit of one token minus that of another.

    Args:
      params: parameters of the model.
      tokens_BT: token ids.
      cfg: configuration of the model.
      at_B: position of the logits in each row.
      answers_2: the two ids.
      edits: edits of the run, as `forward` takes them.
      attend: the row map; None is softmax.
      mixer: the token mixer of every block.
      valid_BT: whether a token is no padding; None where none is.
    """
    given = {} if attend is None else {"attend": attend}
    total_B, shares = _shares(
        params,
        tokens_BT,
        at_B,
        answers_2,
        resolve(edits, cfg),
        given,
        valid_BT,
        cfg=cfg,
        mixer=mixer,
    )
    total_B, shares = jax.device_get((total_B, shares))
    mixed_LBN = shares.pop("mixer")
    embed_B = shares.pop("embed")
    mlp_LB = sum(shares.values(), np.zeros(mixed_LBN.shape[:2], np.float32))
    rest_B = total_B - embed_B - mixed_LBN.sum((0, 2)) - mlp_LB.sum(0)
    return Attribution(total_B, embed_B, mixed_LBN, mlp_LB, rest_B)


@functools.partial(exact_jit, static_argnames=("cfg", "mixer"))
def _shares(params, tokens_BT, at_B, answers_2, edits, given, valid_BT, *, cfg, mixer):
    """The difference by row, and the shares by kind of component."""
    heads = isinstance(mixer, AttentionMixer) and len({s.cfg.head_dim for s in cfg.stacks}) == 1
    mixed = "attn.z" if heads else "attn.out"
    writers = {"embed": "embed", mixed: "mixer"}
    if cfg.mlp_size:
        writers["mlp.out"] = "mlp"
    if cfg.block_end is not None and cfg.block_end.input_size:
        writers["layer_input.out"] = "input"
    after = [name for name in cfg.norm_names if name.endswith("_post")]
    divisors = ["final.scale", *(f"{name}.scale" for name in after)]

    def run(added, record):
        changed = {}
        for site in (*writers, *divisors):
            parts = [edits[site]] if site in edits else []
            parts += [Freeze()] + ([Add(added[site])] if site in added else [])
            changed[site] = parts[0] if len(parts) == 1 else Chain(tuple(parts))
        return forward(
            params,
            tokens_BT,
            cfg,
            edits={**edits, **changed},
            record=dict.fromkeys(record, keep),
            mixer=mixer,
            valid_BT=valid_BT,
            **given,
        )

    w_VD = layers.unembedding(params, cfg)
    direction_D = jnp.subtract(*w_VD[answers_2].astype(jnp.float32))

    def difference(added):
        out = run(added, tuple(writers))
        last_BD = out.hidden[jnp.arange(len(at_B)), at_B].astype(jnp.float32)
        total_B = last_BD @ direction_D
        return total_B.sum(), (total_B, out.records)

    shapes = jax.eval_shape(lambda: run({}, tuple(writers)).records)
    zeros = {site: jnp.zeros(shape.shape, jnp.float32) for site, shape in shapes.items()}
    gradient, (total_B, values) = jax.grad(difference, has_aux=True)(zeros)
    shares = {}
    for site, kind in writers.items():
        product = values[site].astype(jnp.float32) * gradient[site]
        if kind == "embed":
            shares[kind] = product.sum((1, 2))
        elif kind == "mixer" and site == "attn.z":
            shares[kind] = product.sum((2, 4))
        else:
            summed_LB = product.sum((2, 3))
            shares[kind] = summed_LB[..., None] if kind == "mixer" else summed_LB
    return total_B, shares
