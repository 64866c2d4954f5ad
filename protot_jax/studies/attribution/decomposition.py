"""Exact parts of a logit by layer, prototype and pair of positions.

Held at their values on one prompt: gates, divisors of norms, outputs of MLPs. A logit (minus the
mean over the vocabulary, before a soft cap) is then a linear function of what tokens, MLPs and
biases write into the residual stream, and prototype r of layer l a matrix M_r of positions
(`protot_jax.mixers.frozen`). With x_l the stream at the input of block l and c_l the derivative of
the logit by the output of the mixer of layer l, there are three accounts of the logit:

    sources   tokens [k], MLP outputs [l, k], constants: all paths that begin there
    through   a(l, r, q, k) = M_r[q, k] . values_l(x_l)[k] . U c_l[q]: all paths through that entry,
              which is the logit minus the logit of the frozen model without the entry
    direct    what entry [r, T - 1, k] of layer l adds to the last position, read there by the logit
              without a further mixer; and tokens, MLP outputs and constants of the last position

Each sums to the logit: `sources` and `direct` as a whole, `through` in each layer, with the paths
past its mixer and those that begin above it,

    sum over r, q, k of a(l, r, q, k)  +  bypass_l  +  later_l  =  logit

The sum of `through` over layers counts a path through two prototypes twice. One pass upwards gives
x, one downwards c; nothing is differentiated.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward
from lm_jax.model.frozen import FrozenLayers, centre, freeze_layers, frozen_sites, norm_factor
from lm_jax.model.layers import unembedding
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit, exact_products
from lm_jax.model.sites import keep
from protot_jax.training.saved_run import TrainedModel


@struct.dataclass
class FrozenRun:
    """One prompt of T tokens in a model whose gates, divisors and MLP outputs are held; float32.

    Attributes:
      layers: linear maps of the mixers.
      token_TD: embeddings.
      mlp_LTD: outputs of the MLPs.
      constant_LTD: what mixers add because of biases alone.
      final_TD, final_bias_D: factor at each position, and bias, of the last norm.
      unembedding_VD: weights that give the logits.
      logits_V: logits of the forward pass at the last position, before a soft cap.
      probability_V: probability of each next token.
    """

    layers: FrozenLayers
    token_TD: jax.Array
    mlp_LTD: jax.Array
    constant_LTD: jax.Array
    final_TD: jax.Array
    final_bias_D: jax.Array
    unembedding_VD: jax.Array
    logits_V: jax.Array
    probability_V: jax.Array


@struct.dataclass
class Decomposition:
    """Parts of X logits; see the head of this file.

    Attributes:
      logit_X: logits of the forward pass, minus their mean over the vocabulary.
      token_XT, mlp_XLT, constant_X: `sources`.
      through_XLNTS, bypass_XL, later_XL: `through`.
      direct_XLNS, direct_token_X, direct_mlp_XL, direct_constant_X: `direct`.
    """

    logit_X: Any
    token_XT: Any
    mlp_XLT: Any
    constant_X: Any
    through_XLNTS: Any
    bypass_XL: Any
    later_XL: Any
    direct_XLNS: Any
    direct_token_X: Any
    direct_mlp_XL: Any
    direct_constant_X: Any

    def accounts(self) -> dict[str, np.ndarray]:
        """The sums that are to be the logit: sources `[X]`, direct `[X]`, layers `[X, L]`."""
        return {name: _total(parts) for name, parts in self._parts().items()}

    def certificate(self) -> dict[str, np.ndarray]:
        """Errors of the sums against the logit of the forward pass, by account.

        They are relative to the sum of absolute parts; those of layers to the largest of them.
        """
        sizes = {name: _total(parts, np.abs) for name, parts in self._parts().items()}
        sizes["layers"] = sizes["layers"].max(1, keepdims=True)
        logit_X = np.asarray(self.logit_X, np.float64)
        return {
            name: np.abs(total - (logit_X[:, None] if total.ndim > 1 else logit_X)) / sizes[name]
            for name, total in self.accounts().items()
        }

    def over_count(self) -> np.ndarray:
        """Sum of `through` over all layers as a multiple of the logit `[X]`."""
        total_X = np.asarray(self.through_XLNTS, np.float64).sum((1, 2, 3, 4))
        return total_X / np.asarray(self.logit_X, np.float64)

    def _parts(self) -> dict[str, list[Any]]:
        direct = (self.direct_XLNS, self.direct_mlp_XL, self.direct_token_X, self.direct_constant_X)
        return {
            "sources": [(x, 1) for x in (self.token_XT, self.mlp_XLT, self.constant_X)],
            "direct": [(x, 1) for x in direct],
            "layers": [(self.through_XLNTS, 2), (self.bypass_XL, 2), (self.later_XL, 2)],
        }


def _total(parts: list[Any], of: Any = np.asarray) -> np.ndarray:
    """Sum in float64 over all but the first axes of arrays, each given with their number."""
    wide = [(of(np.asarray(array, np.float64)), kept) for array, kept in parts]
    return np.sum([array.sum(tuple(range(kept, array.ndim))) for array, kept in wide], axis=0)


def attribute(
    model: TrainedModel, tokens: np.ndarray | list[int], *, targets: np.ndarray | list[int]
) -> Decomposition:
    """Parts of the next-token logits of a prompt, in float32.

    The array of `through` holds X L N T T numbers.

    Args:
      model: a model with prototypes.
      tokens: ids of the prompt.
      targets: ids of the logits.

    Raises:
      UsageError: the model has no prototypes, or the ids cannot be used.
    """
    _ = model.prototypes
    run = frozen_run(model, tokens)
    check_ids("targets", targets, model.cfg)
    with exact_products():
        return jax.device_get(_decompose(run, jnp.asarray(targets, jnp.int32)))


def frozen_run(model: TrainedModel, tokens: np.ndarray | list[int]) -> FrozenRun:
    """What a forward pass on a prompt holds.

    Raises:
      UsageError: no tokens, more than the context, an id outside the vocabulary, or a mixer that is
        not linear with its gates held.
    """
    check_ids("tokens", tokens, model.cfg)
    check_length(tokens, model.cfg)
    with exact_products():
        tokens_T = jnp.asarray(tokens, jnp.int32)
        return _freeze(model.params, tokens_T, model.cfg, model.mixer)


def check_ids(name: str, ids: np.ndarray | list[int], cfg: DecoderConfig) -> None:
    """Checks ids `[X]`.

    Raises:
      UsageError: there is none, or one is outside the vocabulary.
    """
    if np.ndim(ids) != 1 or not len(ids):
        raise UsageError(f"{name}: shape {np.shape(ids)}; give a list of one or more token ids")
    for token in ids:
        if not 0 <= int(token) < cfg.vocab_size:
            raise UsageError(
                f"{name}: id {int(token)} is outside the vocabulary 0..{cfg.vocab_size - 1}; "
                "tokenize with the tokenizer of this model"
            )


def check_length(tokens: np.ndarray | list[int], cfg: DecoderConfig) -> None:
    """Checks that a prompt is not longer than what the model was trained on.

    Raises:
      UsageError: it is.
    """
    if len(tokens) > cfg.max_length:
        raise UsageError(
            f"prompt: {len(tokens)} tokens are more than the training context of "
            f"{cfg.max_length}; shorten it"
        )


def freeze(params: ParamTree, tokens_T: jax.Array, cfg: DecoderConfig, mixer: Mixer) -> FrozenRun:
    """The frozen model of a prompt, from one forward pass in float32."""
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    names = (*frozen_sites(cfg, mixer), "embed", *(("mlp.out",) if cfg.mlp_size else ()))
    output = forward(params, tokens_T[None], cfg, mixer=mixer, record=dict.fromkeys(names, keep))
    outside = ("embed", "final.scale")
    records = {name: x[0] if name in outside else x[:, 0] for name, x in output.records.items()}
    layers = freeze_layers(params, records, cfg, mixer)
    final_TD, final_bias_D = norm_factor(params.get("final"), records["final.scale"], cfg)
    constant_LTD = layers.constants()
    return FrozenRun(
        layers=layers,
        token_TD=records["embed"],
        mlp_LTD=records.get("mlp.out", jnp.zeros_like(constant_LTD)),
        constant_LTD=constant_LTD,
        final_TD=final_TD,
        final_bias_D=final_bias_D,
        unembedding_VD=unembedding(params, cfg),
        logits_V=unembedding(params, cfg) @ output.hidden[0, -1],
        probability_V=jax.nn.softmax(output.logits[0, -1]),
    )


def decompose(run: FrozenRun, target_X: jax.Array) -> Decomposition:
    """Parts of the logits of tokens."""
    direction_XD = run.unembedding_VD[target_X] - run.unembedding_VD.mean(0, keepdims=True)
    X, (T, D) = len(target_X), run.token_TD.shape
    final_XD = centre(direction_XD * run.final_TD[-1:], run.layers.centred)
    at_end_XTD = jnp.zeros((X, T, D), final_XD.dtype).at[:, -1].set(final_XD)

    def down(c_XTD, each):
        layer, x_TD, mlp_TD, constant_TD = each
        value_S = layer.values(x_TD[None])
        value_XS = jnp.broadcast_to(value_S, (X, *value_S.shape[1:]))
        u_XT = layer.cotangents(c_XTD)
        direct_XNTS = layer.mixer.shares(value_XS, layer.cotangents(at_end_XTD))
        mlp_XT = jnp.einsum("XTD,TD->XT", c_XTD, mlp_TD)
        constant_X = jnp.einsum("XTD,TD->X", c_XTD, constant_TD)
        parts = {
            "mlp_XLT": mlp_XT,
            "through_XLNTS": layer.mixer.shares(value_XS, u_XT),
            "bypass_XL": jnp.einsum("XTD,TD->X", c_XTD, x_TD),
            "direct_XLNS": direct_XNTS[:, :, -1],
            "direct_mlp_XL": final_XD @ mlp_TD[-1],
        }
        written = constant_X, mlp_XT.sum(1) + constant_X, final_XD @ constant_TD[-1]
        return c_XTD + layer.transpose(c_XTD), (parts, written)

    each = run.layers, block_inputs(run), run.mlp_LTD, run.constant_LTD
    c_XTD, (parts, written) = jax.lax.scan(down, at_end_XTD, each, reverse=True)
    constant_LX, written_LX, direct_LX = written
    bias_X = direction_XD @ run.final_bias_D
    return Decomposition(
        logit_X=run.logits_V[target_X] - run.logits_V.mean(),
        token_XT=jnp.einsum("XTD,TD->XT", c_XTD, run.token_TD),
        constant_X=constant_LX.sum(0) + bias_X,
        later_XL=jax.lax.cumsum(written_LX, axis=0, reverse=True).T + bias_X[:, None],
        direct_token_X=final_XD @ run.token_TD[-1],
        direct_constant_X=direct_LX.sum(0) + bias_X,
        **{name: jnp.swapaxes(part, 0, 1) for name, part in parts.items()},
    )


def block_inputs(run: FrozenRun) -> jax.Array:
    """The residual stream at the input of each block `[L, T, D]`, by the linear maps."""

    def up(x_TD, each):
        layer, mlp_TD, constant_TD = each
        return x_TD + layer.apply(x_TD[None])[0] + mlp_TD + constant_TD, x_TD

    return jax.lax.scan(up, run.token_TD, (run.layers, run.mlp_LTD, run.constant_LTD))[1]


def direct_by_position(run: FrozenRun, target_T: jax.Array) -> jax.Array:
    """The entries of `direct` at every position, each for a logit of its own, `[L, N, T, S]`.

    Entry [l, r, q, k] is what prototype r of layer l carries from position k to position q, as
    the logit of `target_T[q]` there reads it without a further mixer.
    """
    direction_TD = run.unembedding_VD[target_T] - run.unembedding_VD.mean(0, keepdims=True)
    c_1TD = centre(direction_TD * run.final_TD, run.layers.centred)[None]

    def of_layer(_, each):
        layer, x_TD = each
        return None, layer.mixer.shares(layer.values(x_TD[None]), layer.cotangents(c_1TD))[0]

    return jax.lax.scan(of_layer, None, (run.layers, block_inputs(run)))[1]


_freeze = exact_jit(freeze, static_argnums=(2, 3))
_decompose = exact_jit(decompose)
