"""Which heads carry a readout of the Jacobian lens, and through which edges.

A readout u . J_l h asks how far a direction h in the output of block l becomes the direction u in
that of the last block, on average over prompts and tokens (`jacobian_lens`). In every layer m above
l it is a sum, with the true derivative,

    u . J_l h = bypass_m + sum over heads n of share_mn

of what passes the attention of that layer by and what passes each of its heads. A head's share is a
sum over its edges from a key to a query: by the values that it moves, and by the weights that h
changes. Gates of a sparse model are held: a closed edge has no share, and what h changes of its
score counts with the open edges, whose softmax has it in its divisor. How a share is divided among
edges depends on where values have their zero; its sum does not.

    found = split(model, prompts, layer=12, stream_D=h, readout_D=u)
    found.head_LN, found.bypass_L, found.total

One pass upwards from h and one downwards from u give it for all layers.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.inspect import jacobian_lens
from lm_jax.inspect.jacobian_lens import SKIPPED, Subject
from lm_jax.model.edits import Add
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep

# The share of a readout for which edges are counted.
SHARE = 0.9


@dataclasses.dataclass(frozen=True, eq=False)
class ReadoutSplit:
    """A readout by heads; means over the prompts.

    Attributes:
      total: the readout, u . J h.
      head_LN: what passes each head; 0 up to the layer of h, whose block is over.
      bypass_L: what passes the attention of each layer by; the readout itself up to that layer.
      error_LN: standard error of `head_LN` over the prompts; NaN of one prompt.
      prompts: number of prompts.
      edges: mean number of edges from a key to a query that carry `SHARE` of the sum of their
        absolute shares, the largest first.
    """

    total: float
    head_LN: np.ndarray
    bypass_L: np.ndarray
    error_LN: np.ndarray
    prompts: int
    edges: float

    def certificate(self) -> np.ndarray:
        """How far heads and bypass of each layer are from the readout `[L]`, of their sizes."""
        size_L = np.abs(self.head_LN).sum(1) + np.abs(self.bypass_L)
        off_L = np.abs(self.head_LN.sum(1) + self.bypass_L - self.total)
        return off_L / np.where(size_L > 0, size_L, 1.0)


def split(
    model: Subject,
    prompts: Iterable[Sequence[int]],
    *,
    layer: int,
    stream_D: np.ndarray | jax.Array,
    readout_D: np.ndarray | jax.Array,
    length: int = 128,
    skipped: int = SKIPPED,
) -> ReadoutSplit:
    """The split of a readout over the prompts of a lens; too short ones are left out.

    Args:
      model: a model of attention, as `jacobian_lens.fit` takes it.
      prompts: token ids of each prompt.
      layer: number of the block whose output h is of; not the last.
      stream_D: direction h in that output.
      readout_D: direction u in the output of the last block, such as a row of the unembedding
        times the weights of the last norm.
      length: number of tokens that are read of a prompt.
      skipped: first tokens of a prompt that are left out.

    Raises:
      UsageError: there is no such block below the last, a direction has another width, the model
        has gates that are not held, or no prompt is long enough.
    """
    cfg = model.cfg
    if not 0 <= layer < cfg.num_layers - 1:
        raise UsageError(f"layer = {layer} is outside 0..{cfg.num_layers - 2}, the last left out")
    for name, given in (("stream_D", stream_D), ("readout_D", readout_D)):
        if np.shape(given) != (cfg.hidden_size,):
            raise UsageError(f"{name} has shape {np.shape(given)}; expected ({cfg.hidden_size},)")
    jacobian_lens.check_length(cfg, length, skipped)
    own = jacobian_lens.runs(model)
    totals, heads, bypasses, edges = [], [], [], []
    for ids in prompts:
        if len(ids) < skipped + 2:
            continue
        count = min(len(ids), length)
        tokens_1T = np.zeros((1, length), np.int32)
        tokens_1T[0, :count] = ids[:count]
        found = _split(
            *(own, tokens_1T, count, layer),
            *(jnp.asarray(stream_D, jnp.float32), jnp.asarray(readout_D, jnp.float32)),
            skipped=skipped,
        )
        share_LNTS = np.asarray(found.share_LNTS, np.float64)
        totals.append(float(found.total))
        heads.append(share_LNTS.sum((2, 3)))
        bypasses.append(np.asarray(found.bypass_L, np.float64))
        edges.append(_carrying(np.abs(share_LNTS).ravel()))
    if not totals:
        raise UsageError(f"prompts: none has {skipped + 2} tokens or more; give longer ones")
    return ReadoutSplit(
        total=float(np.mean(totals)),
        head_LN=np.mean(heads, 0),
        error_LN=_standard_error(np.stack(heads)),
        bypass_L=np.mean(bypasses, 0),
        prompts=len(totals),
        edges=float(np.mean(edges)),
    )


def _standard_error(value_PLN: np.ndarray) -> np.ndarray:
    P = len(value_PLN)
    if P < 2:
        return np.full(value_PLN.shape[1:], np.nan)
    return value_PLN.std(0, ddof=1) / np.sqrt(P)


def _carrying(size_E: np.ndarray) -> int:
    """How many entries have `SHARE` of the sum, the largest first."""
    sums_E = np.cumsum(np.sort(size_E)[::-1])
    return int(np.searchsorted(sums_E, SHARE * sums_E[-1])) + 1 if sums_E[-1] else 0


@struct.dataclass
class _Split:
    """The split of one prompt; shares are 0 up to the layer of h."""

    total: jax.Array
    share_LNTS: jax.Array
    bypass_L: jax.Array


@functools.partial(exact_jit, static_argnames="skipped")
def _split(model, tokens_1T, count, layer, stream_D, readout_D, *, skipped):
    cfg, T = model.cfg, tokens_1T.shape[1]
    L, D = cfg.num_layers, cfg.hidden_size
    counted_T = jacobian_lens.counted(tokens_1T, count, skipped)
    mixed = "mlp.out" if cfg.parallel_residual else "resid_mid"
    sites = ("attn.z", "attn.pattern", "attn.v", "resid_pre", mixed, "final_input")

    def run(offset_TD: jax.Array, head_LTNH: jax.Array, stream_LTD: jax.Array) -> dict[str, Any]:
        """What a pass records, with additions to the block's output, to z and to the stream."""
        at_L111 = (jnp.arange(L) == layer)[:, None, None, None]
        edits = {
            "resid_post": Add(jnp.where(at_L111, offset_TD[None, None], 0.0)),
            "attn.z": Add(head_LTNH[:, None]),
        }
        if cfg.parallel_residual:
            edits["resid_post"] = Add(edits["resid_post"].value + stream_LTD[:, None])
        else:
            edits["resid_mid"] = Add(stream_LTD[:, None])
        valid_1T = (jnp.arange(T) < count)[None]
        return model.forward(
            tokens_1T, valid_1T, edits=edits, record=dict.fromkeys(sites, keep)
        ).records

    heads = jnp.zeros((L, T, cfg.num_heads, cfg.head_dim), jnp.float32)
    streams = jnp.zeros((L, T, D), jnp.float32)
    still_TD = jnp.zeros((T, D), jnp.float32)
    moved_TD = counted_T[:, None] * stream_D[None] / counted_T.sum()
    records, tangents = jax.jvp(lambda x: run(x, heads, streams), (still_TD,), (moved_TD,))

    def readout(head_LTNH: jax.Array, stream_LTD: jax.Array) -> jax.Array:
        last_TD = run(still_TD, head_LTNH, stream_LTD)["final_input"][0].astype(jnp.float32)
        return jnp.einsum("TD,T,D->", last_TD, counted_T, readout_D)

    head_LTNH, stream_LTD = jax.grad(readout, (0, 1))(heads, streams)
    total = jnp.einsum("TD,T,D->", tangents["final_input"][0], counted_T, readout_D)
    above_L = jnp.arange(L) > layer

    def of_layer(_: None, each: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        z_TNH, pattern_NTS, moved_NTS, v_SKH, w_SKH = each
        groups = z_TNH.shape[1] // v_SKH.shape[1]
        v_SNH, w_SNH = (jnp.repeat(x, groups, axis=1) for x in (v_SKH, w_SKH))
        # By the values that are moved, and by the weights that change.
        by_value = jnp.einsum("TNH,SNH->NTS", z_TNH, w_SNH) * pattern_NTS
        by_weight = jnp.einsum("TNH,SNH->NTS", z_TNH, v_SNH) * moved_NTS
        return None, by_value + by_weight

    given = (
        head_LTNH,
        records["attn.pattern"][:, 0],
        tangents["attn.pattern"][:, 0],
        records["attn.v"][:, 0].astype(jnp.float32),
        tangents["attn.v"][:, 0].astype(jnp.float32),
    )
    _, share_LNTS = jax.lax.scan(of_layer, None, given)
    past_LTD = tangents["resid_pre"][:, 0]
    if cfg.parallel_residual:
        past_LTD = past_LTD + tangents[mixed][:, 0]
    bypass_L = jnp.einsum("LTD,LTD->L", stream_LTD, past_LTD)
    return _Split(
        total,
        jnp.where(above_L[:, None, None, None], share_LNTS, 0.0),
        jnp.where(above_L, bypass_L, total),
    )
