"""Cross entropy and distillation in chunks of tokens, without the logits of a whole batch.

Of hidden states h `[X, D]`, an unembedding W `[V, D]` and targets y, for each chunk of tokens:

1. z = cap(h W^T), in float32;
2. loss = logsumexp(z) - z_y, summed over the tokens that count;
3. in training, while z exists, dz = softmax(z) - onehot(y), dh = dz W and dW += dz^T h. The
   backward pass multiplies both by one number, the gradient by the loss, and recomputes no logits
   (the idea is that of Hsu et al., 2024, Liger Kernel).

The divergence from a teacher adds its own dz in the same pass. On a mesh each device cuts up its
own rows, and dW is summed over devices once, after the last chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from iaj_kernels.core import dispatch
from lm_jax.model import layers
from lm_jax.model.config import DecoderConfig
from lm_jax.model.params import ParamTree
from lm_jax.parallel.kernels import SplitAxes, split_axes

# Per device. On a CPU the arrays of a chunk are to stay in its cache.
CHUNK_TOKENS, CPU_CHUNK_TOKENS = 1_024, 256


class Predictor(NamedTuple):
    """The last hidden states of a model `[B, T, D]`, and the tree that holds its unembedding."""

    hidden_BTD: jax.Array
    params: ParamTree


class Sums(NamedTuple):
    """Float32 sums over the tokens that count; gradients pass through `minimised` alone.

    `loss` is -log p, in nats, `divergence` is 0 without a teacher, and `minimised` is
    `likelihood * loss + distill * divergence`.
    """

    minimised: jax.Array
    loss: jax.Array
    divergence: jax.Array


class _LossConfig(NamedTuple):
    cap: float | None
    distill: float
    temperature: float
    likelihood: float


class _TokenInputs(NamedTuple):
    """Inputs of the tokens of a chunk; W counts the devices that the rows are split over.

    Without a split there is no axis W: XLA's CPU products with a leading axis of 1 are slow.
    """

    target_WC: jax.Array
    loss_mask_WC: jax.Array
    teacher_WCD: jax.Array | None


@jax.named_scope("loss")
def summed(
    model: Predictor,
    target_BT: jax.Array,
    loss_mask_BT: jax.Array,
    cfg: DecoderConfig,
    *,
    teacher: Predictor | None = None,
    distill: float = 0.0,
    temperature: float = 1.0,
    likelihood: float = 1.0,
) -> Sums:
    """Cross entropy of the next tokens, and the divergence from a teacher.

    Differentiable once, by the hidden states and by the unembedding. Operands of products have
    their own dtype, sums are float32.

    Args:
      model: the model to train.
      target_BT: the target token at each position.
      loss_mask_BT: false at positions that the loss leaves out.
      cfg: configuration of the model and of the teacher.
      teacher: the teacher, whose distribution is p in the divergence T^2 KL(p || q); it has no
        gradient.
      distill: weight of the divergence in `minimised`.
      temperature: T, by which both logits are divided in the divergence.
      likelihood: weight of the cross entropy in `minimised`.
    """
    config = _LossConfig(cfg.logit_softcap, distill, temperature, likelihood)
    w_VD = layers.unembedding(model.params, cfg)
    places = split_axes({"B": target_BT.shape[0], "V": w_VD.shape[0]})
    teacher_hidden, teacher_VD = None, None
    if teacher is not None:
        teacher = lax.stop_gradient(teacher)
        teacher_hidden = teacher.hidden_BTD
        teacher_VD = _gathered(layers.unembedding(teacher.params, cfg), places)
    cut = functools.partial(_cut, places=places)
    inputs = jax.tree.map(cut, _TokenInputs(target_BT, loss_mask_BT, teacher_hidden))
    hidden_nWCD, w_VD = cut(model.hidden_BTD), _gathered(w_VD, places)
    minimised, parts = _summed(config, hidden_nWCD, w_VD, inputs, teacher_VD)
    return Sums(minimised, *lax.stop_gradient(parts))


@jax.named_scope("loss")
def token_nll(model: Predictor, target_BT: jax.Array, cfg: DecoderConfig) -> jax.Array:
    """-log p of every target, float32 `[B, T]`, in nats."""
    w_VD = layers.unembedding(model.params, cfg)
    places = split_axes({"B": target_BT.shape[0], "V": w_VD.shape[0]})
    w_VD = _gathered(w_VD, places)

    @jax.checkpoint
    def one(hidden_WCD: jax.Array, target_WC: jax.Array) -> jax.Array:
        return _log_probabilities(_logits(hidden_WCD, w_VD, cfg.logit_softcap), target_WC)[1]

    chunks = (_cut(model.hidden_BTD, places), _cut(target_BT, places))
    _, loss_nWC = lax.scan(lambda _, chunk: ((), one(*chunk)), (), chunks)
    B, T = target_BT.shape
    return _joined(loss_nWC, B * T).reshape(B, T)


@jax.named_scope("loss")
def token_divergence(model: Predictor, teacher: Predictor, cfg: DecoderConfig) -> jax.Array:
    """KL(teacher || model) of the next token at every position, float32 `[B, T]`, in nats."""
    B, T = model.hidden_BTD.shape[:2]
    w_VD, teacher_VD = (layers.unembedding(each.params, cfg) for each in (model, teacher))
    places = split_axes({"B": B, "V": w_VD.shape[0]})
    w_VD, teacher_VD = _gathered(w_VD, places), _gathered(teacher_VD, places)

    def one(hidden_WCD: jax.Array, teacher_WCD: jax.Array) -> jax.Array:
        cap = cfg.logit_softcap
        log_p_WCV = jax.nn.log_softmax(_logits(teacher_WCD, teacher_VD, cap))
        return _divergence(log_p_WCV, jax.nn.log_softmax(_logits(hidden_WCD, w_VD, cap)))

    chunks = (_cut(model.hidden_BTD, places), _cut(teacher.hidden_BTD, places))
    _, kl_nWC = lax.scan(lambda _, chunk: ((), one(*chunk)), (), chunks)
    return _joined(kl_nWC, B * T).reshape(B, T)


# Chunks


def _ways(places: SplitAxes) -> int:
    """The number of parts that the mesh splits the rows into."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    ways = 1
    for name in places.get("B", ()):
        ways *= sizes[name]
    return ways


def _cut(x_BT: jax.Array, places: SplitAxes) -> jax.Array:
    """`[chunks, W, C, ...]` from `[B, T, ...]`; zeros fill the last chunk, W is left out for 1."""
    ways = _ways(places)
    x_WX = x_BT.reshape(ways, -1, *x_BT.shape[2:])
    tokens = x_WX.shape[1]
    on_cpu = dispatch.target().platform == "cpu"
    longest = min(CHUNK_TOKENS, CPU_CHUNK_TOKENS) if on_cpu else CHUNK_TOKENS
    count = max(-(-tokens // longest), 1)
    size = -(-tokens // count)
    pads = [(0, 0)] * x_WX.ndim
    pads[1] = (0, count * size - tokens)
    x_WnC = jnp.pad(x_WX, pads).reshape(ways, count, size, *x_BT.shape[2:])
    if ways == 1:
        return x_WnC[0]
    return _placed(x_WnC.swapaxes(0, 1), places, None, "B")


def _joined(x_nWC: jax.Array, tokens: int) -> jax.Array:
    """`[B T]` from chunks."""
    if x_nWC.ndim == 2:
        return x_nWC.reshape(-1)[:tokens]
    ways = x_nWC.shape[1]
    return x_nWC.swapaxes(0, 1).reshape(ways, -1)[:, : tokens // ways].reshape(tokens)


def _gathered(w_VD: jax.Array, places: SplitAxes) -> jax.Array:
    """The weights whole along D, so that chunks need not gather them."""
    return _placed(w_VD, places, "V", None)


def _placed(x: jax.Array, places: SplitAxes, *letters: str | None) -> jax.Array:
    """`x` split along the axes with a letter, on a mesh that splits anything."""
    if not places:
        return x
    spec = PartitionSpec(*(places.get(letter) if letter else None for letter in letters))
    return lax.with_sharding_constraint(x, spec)


# The passes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(
    config: _LossConfig,
    hidden_nWCD: jax.Array,
    w_VD: jax.Array,
    inputs: _TokenInputs,
    teacher_VD: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def one(_: None, chunk: tuple[jax.Array, _TokenInputs]) -> tuple[None, Any]:
        hidden_WCD, inputs = chunk
        return None, _one_chunk(config, hidden_WCD, w_VD, inputs, teacher_VD)[0]

    return _totals(config, inputs, lax.scan(one, None, (hidden_nWCD, inputs))[1])


def _totals(config: _LossConfig, inputs: _TokenInputs, parts: Any) -> Any:
    loss, divergence = (jnp.sum(jnp.where(inputs.loss_mask_WC, x, 0.0)) for x in parts)
    return config.likelihood * loss + config.distill * divergence, (loss, divergence)


def _forward(config: _LossConfig, *arguments: Any) -> tuple[Any, Any]:
    """The sums, and the gradients of the minimised sum: by W only if its gradient is needed."""
    needs_d_w = arguments[1].perturbed
    hidden_nWCD, w_VD, inputs, teacher_VD = jax.tree.map(
        lambda leaf: leaf.value, arguments, is_leaf=lambda x: isinstance(x, CustomVJPPrimal)
    )

    def one(d_w_WDV: Any, chunk: tuple[jax.Array, _TokenInputs]) -> tuple[Any, Any]:
        hidden_WCD, inputs = chunk
        parts, d_logits_WCV = _one_chunk(config, hidden_WCD, w_VD, inputs, teacher_VD)
        d_logits_WCV = d_logits_WCV.astype(w_VD.dtype)
        d_hidden_WCD = _product("...V,VD->...D", d_logits_WCV, w_VD).astype(hidden_WCD.dtype)
        if needs_d_w:
            d_w_WDV += _product("...CD,...CV->...DV", hidden_WCD, d_logits_WCV)
        return d_w_WDV, (parts, d_hidden_WCD)

    shape = (*hidden_nWCD.shape[1:-2], *w_VD.shape[::-1])
    zeros = jnp.zeros(shape, jnp.float32) if needs_d_w else None
    d_w_WDV, (parts, d_hidden_nWCD) = lax.scan(one, zeros, (hidden_nWCD, inputs))
    return _totals(config, inputs, parts), (d_hidden_nWCD, d_w_WDV, w_VD)


def _backward(config: _LossConfig, gradients: Any, cotangents: Any) -> tuple[Any, ...]:
    del config
    d_hidden_nWCD, d_w_WDV, w_VD = gradients
    # The parts have no cotangent: they are for reading alone.
    by = cotangents[0]
    d_hidden = (by * d_hidden_nWCD.astype(jnp.float32)).astype(d_hidden_nWCD.dtype)
    if d_w_WDV is not None and d_w_WDV.ndim == 3:
        d_w_WDV = d_w_WDV.sum(0)
    d_w_VD = None if d_w_WDV is None else (by * d_w_WDV.T).astype(w_VD.dtype)
    return d_hidden, d_w_VD, None, None


_summed.defvjp(_forward, _backward, symbolic_zeros=True)


def _one_chunk(
    config: _LossConfig,
    hidden_WCD: jax.Array,
    w_VD: jax.Array,
    inputs: _TokenInputs,
    teacher_VD: jax.Array | None,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Cross entropy and divergence `[W, C]` of a chunk; d minimised / d (h W^T), `[W, C, V]`."""
    cap = config.cap
    logits_WCV = _logits(hidden_WCD, w_VD, cap)
    log_q_WCV, loss_WC = _log_probabilities(logits_WCV, inputs.target_WC)
    divergence_WC = jnp.zeros_like(loss_WC)
    d_WCV: jax.Array | float = 0.0
    if config.likelihood:
        hot_WCV = jax.nn.one_hot(inputs.target_WC, w_VD.shape[0], dtype=jnp.float32)
        d_WCV = config.likelihood * (jnp.exp(log_q_WCV) - hot_WCV)
    if inputs.teacher_WCD is not None and teacher_VD is not None:
        T = config.temperature
        log_p_WCV = jax.nn.log_softmax(_logits(inputs.teacher_WCD, teacher_VD, cap) / T)
        # One normalised array serves both terms, at the usual temperature.
        log_q_WCV = log_q_WCV if T == 1.0 else jax.nn.log_softmax(logits_WCV / T)
        divergence_WC = T**2 * _divergence(log_p_WCV, log_q_WCV)
        d_WCV += config.distill * T * (jnp.exp(log_q_WCV) - jnp.exp(log_p_WCV))
    d_WCV = jnp.where(inputs.loss_mask_WC[..., None], d_WCV, 0.0)
    if cap is not None:
        d_WCV *= 1.0 - jnp.square(logits_WCV / cap)
    return (loss_WC, divergence_WC), d_WCV


def _log_probabilities(logits_WCV: jax.Array, target_WC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log probabilities of all tokens, and -log p of the targets `[W, C]`."""
    log_q_WCV = jax.nn.log_softmax(logits_WCV)
    return log_q_WCV, -jnp.take_along_axis(log_q_WCV, target_WC[..., None], axis=-1)[..., 0]


def _divergence(log_p_WCV: jax.Array, log_q_WCV: jax.Array) -> jax.Array:
    """KL(p || q) `[W, C]` of two arrays of log probabilities, in nats."""
    return jnp.sum(jnp.exp(log_p_WCV) * (log_p_WCV - log_q_WCV), axis=-1)


@jax.named_scope("logits")
def _logits(hidden_WCD: jax.Array, w_VD: jax.Array, cap: float | None) -> jax.Array:
    return layers.softcap(_product("...D,VD->...V", hidden_WCD, w_VD), cap)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
