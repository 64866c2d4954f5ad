"""Measurements of the audit on a model: row statistics, answers under a substitution, losses.

Each function is one compiled forward pass over one batch of prompts. Rows are reduced inside the
layer: no `[L, B, N, T, S]` array is ever returned or kept; with `fused` no `[B, N, T, S]` either.
Everything that a sweep varies (recipe, bias, heads, thresholds, token ids) is traced, so each
compiles once per shape of batch. `valid_BT` is false where a token is padding, which rotations by
length (LongRoPE, dynamic NTK) do not count; None means none is.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm_jax.model import attention as lm_attention
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output
from lm_jax.model.precision import exact_jit
from lm_jax.train.losses import Predictor, token_divergence, token_nll
from polyattn_jax.recipes.calibrate import MassBelow, mass_below, mass_below_by_head
from polyattn_jax.recipes.diagnostic import RowStats
from polyattn_jax.recipes.fused import by_kernels
from polyattn_jax.recipes.head_probe import HeadProbe
from polyattn_jax.recipes.probe import DEGREES, DENSE, Probe
from polyattn_jax.recipes.row_maps import Map
from polyattn_jax.recipes.substitute import substitute
from polyattn_jax.recipes.trained_model import forward


class Diagnosis(NamedTuple):
    """The reports of `probe` on the rows of chosen queries, stacked over layers.

    Attributes:
      rows: statistics by kind of target, leaves `[L, bias, B, N, Q, ...]`.
      softmax: S of softmax by kind of target, `[L, B, N, Q]`.
      change: relative change of the head's output, `[L, bias, B, N, Q, degree]`.
      features: features of the softmax pattern, leaves `[L, B, N, Q]`.
    """

    rows: dict[str, RowStats]
    softmax: dict[str, jax.Array]
    change: jax.Array
    features: dict[str, jax.Array]


@functools.partial(exact_jit, static_argnames=("cfg", "degrees", "fused"))
def diagnose(
    params: Any,
    tokens_BT: jax.Array,
    queries_BQ: jax.Array,
    answers_BQ: jax.Array,
    biases: jax.Array,
    *,
    cfg: DecoderConfig,
    valid_BT: jax.Array | None = None,
    degrees: tuple[int | float, ...] = DEGREES,
    fused: bool = False,
) -> Diagnosis:
    """Everything about the rows of chosen queries, in one forward with softmax."""
    probe = Probe(queries_BQ, answers_BQ, biases, degrees)
    attend = by_kernels(probe) if fused else lm_attention.fused(probe, DENSE)
    last_B1 = queries_BQ[:, -1:]
    out = forward(params, tokens_BT, cfg, attend=attend, valid_BT=valid_BT, logits_at=last_B1)
    return Diagnosis(**{name: out.aux[name] for name in Diagnosis._fields})


@functools.partial(exact_jit, static_argnames=("cfg", "fused"))
def head_features(
    params: Any,
    tokens_BT: jax.Array,
    successors_BT: jax.Array,
    valid_BT: jax.Array,
    *,
    cfg: DecoderConfig,
    fused: bool = False,
) -> dict[str, jax.Array]:
    """The features of the head types, summed over the rows of each prompt, `[L, B, N]`."""
    probe = HeadProbe(successors_BT, valid_BT)
    attend = by_kernels(probe) if fused else probe
    last_B1 = jnp.full((tokens_BT.shape[0], 1), tokens_BT.shape[1] - 1)
    out = forward(params, tokens_BT, cfg, attend=attend, valid_BT=valid_BT, logits_at=last_B1)
    return out.aux


@functools.partial(exact_jit, static_argnames=("cfg", "maps", "fused"))
def evaluate(
    params: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    target_B: jax.Array,
    index: jax.Array,
    bias: jax.Array,
    heads_LN: jax.Array,
    *,
    cfg: DecoderConfig,
    maps: tuple[Map, ...],
    fused: bool = False,
) -> dict[str, jax.Array]:
    """The next token after each prompt, with `maps[index]` in the heads of the mask.

    Returns, per prompt: `predicted` (greedy token), `rank` of the target among the logits (0 is
    the prediction), `loss` (nats, of the target), `dead_rows` (over all layers, heads, queries).
    """
    judged = _judge(
        params,
        tokens_BT,
        lengths_B,
        lengths_B[:, None] - 1,
        target_B[:, None],
        substitution=(maps, index, bias, heads_LN),
        cfg=cfg,
        fused=fused,
    )
    return {name: value for name, value in judged.items() if name not in ("step", "target")}


@functools.partial(exact_jit, static_argnames=("cfg", "maps", "fused"))
def answers(
    params: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    queries_BQ: jax.Array,
    target_BQ: jax.Array,
    index: jax.Array,
    bias: jax.Array,
    heads_LN: jax.Array,
    *,
    cfg: DecoderConfig,
    maps: tuple[Map, ...],
    fused: bool = False,
) -> dict[str, jax.Array]:
    """Whether greedy decoding writes each answer, with `maps[index]` in the heads of the mask.

    Each answer but its last token is part of the tokens; its Q tokens follow the queries, and are
    -1 where none is scored. It is written if each is the most likely token after those before it,
    since decoding then has the same tokens before each step.

    Returns, per prompt: `step`, the first token of the answer that decoding does not write, the
    last if it writes them all; of that step `target`, `predicted` and `rank`, as in `evaluate`;
    `loss` (nats per token of the answer); `dead_rows`.
    """
    return _judge(
        params,
        tokens_BT,
        lengths_B,
        queries_BQ,
        target_BQ,
        substitution=(maps, index, bias, heads_LN),
        cfg=cfg,
        fused=fused,
    )


def _judge(
    params: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    queries_BQ: jax.Array,
    target_BQ: jax.Array,
    *,
    substitution: tuple[tuple[Map, ...], jax.Array, jax.Array, jax.Array],
    cfg: DecoderConfig,
    fused: bool,
) -> dict[str, jax.Array]:
    out = _substituted(
        params, tokens_BT, lengths_B, substitution, cfg=cfg, fused=fused, logits_at=queries_BQ
    )
    return {**judged(out.logits, target_BQ), "dead_rows": _dead_rows(out)}


def _substituted(
    params: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    substitution: tuple[tuple[Map, ...], jax.Array, jax.Array, jax.Array],
    *,
    cfg: DecoderConfig,
    fused: bool,
    logits_at: jax.Array | None = None,
) -> Output:
    """A forward pass over prompts of these lengths, with the arguments of `substitute`."""
    valid_BT = jnp.arange(tokens_BT.shape[1])[None, :] < lengths_B[:, None]
    attend = substitute(*substitution, valid_BT)
    if fused:
        attend = by_kernels(attend)
    return forward(params, tokens_BT, cfg, attend=attend, valid_BT=valid_BT, logits_at=logits_at)


def _dead_rows(out: Output) -> jax.Array:
    """Dead rows of each prompt, over all layers, heads and queries."""
    return out.aux["dead_rows_B"].sum(0).astype(jnp.int32)


def judged(logits_BQV: jax.Array, target_BQ: jax.Array) -> dict[str, jax.Array]:
    """What `answers` returns of the logits at its queries, but for the dead rows."""
    own_BQ1 = jnp.take_along_axis(logits_BQV, target_BQ[..., None], axis=-1)
    predicted_BQ = logits_BQV.argmax(-1).astype(jnp.int32)
    rank_BQ = (logits_BQV > own_BQ1).sum(-1).astype(jnp.int32)
    nll_BQ = jax.nn.logsumexp(logits_BQV, axis=-1) - own_BQ1[..., 0]
    scored_BQ = target_BQ >= 0
    wrong_BQ = scored_BQ & (predicted_BQ != target_BQ)
    step_B = jnp.where(wrong_BQ.any(-1), wrong_BQ.argmax(-1), wrong_BQ.shape[1] - 1)

    def at_step(values_BQ: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values_BQ, step_B[:, None], axis=1)[:, 0]

    return {
        "step": step_B.astype(jnp.int32),
        "target": at_step(target_BQ),
        "predicted": at_step(predicted_BQ),
        "rank": at_step(rank_BQ),
        "loss": jnp.where(scored_BQ, nll_BQ, 0.0).sum(-1) / scored_BQ.sum(-1),
    }


@functools.partial(exact_jit, static_argnames=("cfg", "maps", "fused"))
def text_losses(
    params: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    index: jax.Array,
    bias: jax.Array,
    heads_LN: jax.Array,
    *,
    cfg: DecoderConfig,
    maps: tuple[Map, ...],
    fused: bool = False,
) -> dict[str, jax.Array]:
    """The language-modelling loss of each text, with `maps[index]` in the heads of the mask.

    Returns, per text: `loss` (nats per token, over all tokens but the first), `dead_rows`.
    """
    substitution = maps, index, bias, heads_LN
    out = _substituted(params, tokens_BT, lengths_B, substitution, cfg=cfg, fused=fused)
    nll_BT = token_nll(Predictor(out.hidden, params), jnp.roll(tokens_BT, -1, axis=1), cfg)
    predicted_BT = jnp.arange(tokens_BT.shape[1])[None, :] < lengths_B[:, None] - 1
    return {
        "loss": jnp.where(predicted_BT, nll_BT, 0.0).sum(-1) / (lengths_B - 1),
        "dead_rows": _dead_rows(out),
    }


@functools.partial(exact_jit, static_argnames="cfg")
def hidden(params: Any, tokens_BT: jax.Array, lengths_B: jax.Array, *, cfg: DecoderConfig):
    """The last hidden states of each text with softmax, `[B, T, D]`."""
    valid_BT = jnp.arange(tokens_BT.shape[1])[None, :] < lengths_B[:, None]
    return forward(params, tokens_BT, cfg, valid_BT=valid_BT).hidden


@functools.partial(exact_jit, static_argnames=("cfg", "maps", "fused"))
def divergences(
    params: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    hidden_BTD: jax.Array,
    index: jax.Array,
    bias: jax.Array,
    heads_LN: jax.Array,
    *,
    cfg: DecoderConfig,
    maps: tuple[Map, ...],
    fused: bool = False,
) -> dict[str, jax.Array]:
    """KL of the next token from softmax to `maps[index]` in the heads of the mask.

    Args:
      params, tokens_BT, lengths_B, index, bias, heads_LN, cfg, maps, fused: arguments of
        `text_losses`.
      hidden_BTD: result of `hidden`.

    Returns, per text: `divergence`, KL(softmax || substituted), nats, the mean over its tokens.
    """
    substitution = maps, index, bias, heads_LN
    out = _substituted(params, tokens_BT, lengths_B, substitution, cfg=cfg, fused=fused)
    valid_BT = jnp.arange(tokens_BT.shape[1])[None, :] < lengths_B[:, None]
    kl_BT = token_divergence(Predictor(out.hidden, params), Predictor(hidden_BTD, params), cfg)
    return {"divergence": jnp.where(valid_BT, kl_BT, 0.0).sum(-1) / lengths_B}


@functools.partial(exact_jit, static_argnames=("cfg", "maps", "fused"))
def logits(
    params: Any,
    tokens_BT: jax.Array,
    index: jax.Array,
    bias: jax.Array,
    heads_LN: jax.Array,
    *,
    cfg: DecoderConfig,
    maps: tuple[Map, ...],
    valid_BT: jax.Array | None = None,
    fused: bool = False,
) -> jax.Array:
    """All logits `[B, T, V]`, with `maps[index]` in the heads of the mask."""
    attend = substitute(maps, index, bias, heads_LN)
    if fused:
        attend = by_kernels(attend)
    return forward(params, tokens_BT, cfg, attend=attend, valid_BT=valid_BT).logits


@functools.partial(exact_jit, static_argnames="cfg")
def losses(
    params: Any,
    tokens_BT: jax.Array,
    queries_BQ: jax.Array,
    target_BQ: jax.Array,
    *,
    cfg: DecoderConfig,
    valid_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax loss in nats and whether the greedy token is right, at each query `[B, Q]`."""
    logits_BQV = forward(params, tokens_BT, cfg, valid_BT=valid_BT, logits_at=queries_BQ).logits
    own_BQ = jnp.take_along_axis(logits_BQV, target_BQ[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BQV, axis=-1) - own_BQ, logits_BQV.argmax(-1) == target_BQ


@functools.partial(exact_jit, static_argnames=("lengths", "cfg"))
def mass(
    params: Any,
    tokens_BT: jax.Array,
    thresholds: jax.Array,
    *,
    lengths: tuple[int, ...],
    cfg: DecoderConfig,
) -> MassBelow:
    """Softmax mass below each threshold, by layer, text and length of its first tokens."""
    record = {"attn.scores": lambda s: mass_below(s, thresholds, lengths)}
    last_B1 = jnp.full((tokens_BT.shape[0], 1), tokens_BT.shape[1] - 1)
    return forward(params, tokens_BT, cfg, record=record, logits_at=last_B1).records["attn.scores"]


@functools.partial(exact_jit, static_argnames="cfg")
def mass_by_head(
    params: Any, tokens_BT: jax.Array, thresholds_LNM: jax.Array, *, cfg: DecoderConfig
) -> MassBelow:
    """Softmax mass below thresholds of each head, and score rows, by layer, text and head."""

    def with_mass(scores_BNTS: jax.Array, thresholds_NM: jax.Array):
        below = mass_below_by_head(scores_BNTS, thresholds_NM)
        return lm_attention.softmax(scores_BNTS), below._asdict()

    attend = lm_attention.PerLayer(with_mass, thresholds_LNM)
    last_B1 = jnp.full((tokens_BT.shape[0], 1), tokens_BT.shape[1] - 1)
    return MassBelow(**forward(params, tokens_BT, cfg, attend=attend, logits_at=last_B1).aux)


@functools.partial(exact_jit, static_argnames="cfg")
def distances(params: Any, tokens_BT: jax.Array, *, cfg: DecoderConfig) -> dict[str, jax.Array]:
    """What softmax reads of each row beyond the first key, `[L, B, N, T]`.

    Returns `mass_BNT`, the weight on keys but the first, and `distance_BNT`, the sum of these
    weights times the distance of key and query, in tokens.
    """

    def with_distances(scores_BNTS: jax.Array):
        pattern_BNTS = lm_attention.softmax(scores_BNTS)
        tokens_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        away_TS = tokens_T[:, None] - tokens_T[None]
        read_BNTS = jnp.where(tokens_T[None, None, None] > 0, pattern_BNTS, 0.0)
        distance_BNTS = read_BNTS * away_TS[None, None]
        return pattern_BNTS, {
            "mass_BNT": read_BNTS.sum(-1),
            "distance_BNT": distance_BNTS.sum(-1),
        }

    last_B1 = jnp.full((tokens_BT.shape[0], 1), tokens_BT.shape[1] - 1)
    return forward(params, tokens_BT, cfg, attend=with_distances, logits_at=last_B1).aux
