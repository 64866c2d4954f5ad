"""The delta rule on a GPU: Triton kernels over chunks, with a backward pass of their own.

The mathematics is in `triton_forward.py` and `triton_backward.py`. The forward pass keeps, in
float32, the memory at the start of every chunk, the changes that its steps make, and the inverse
that gives them: H E / C + E + C numbers for a step of a head, and never a memory of every step.

Chunks follow one another, so that few long rows would leave most of a GPU idle. Such a row is cut
into segments that run side by side. A segment makes of the memory S before it F S + U: U is what it
leaves of no memory, F of the identity without values. A scan over segments gives the memory before
each, with which they run once more; backward, gradients go through F transposed. With keys longer
than one F may overflow where the memory does not.

If all inputs are float32, so are their products. With any of bfloat16 tensor cores multiply float32
in three parts (3xTF32, to about 2^-21).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core import dispatch, triton_calls
from iaj_kernels.delta_rule import reference, tile
from iaj_kernels.delta_rule import triton_backward as backward
from iaj_kernels.delta_rule import triton_forward as forward
from iaj_kernels.delta_rule.config import Call, Config

# Of an output that is left out: a kernel has a place for all of them.
_NONE = (1,)


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """Computes what `reference.run` computes, and calls it for T = 1."""
    if call.q_BTNH.shape[1] == 1:
        return reference.run(config, call)
    return _scan(dispatch.target(), *(x for x in call if x is not None))


def _run_forward(target: dispatch.Target, *call: jax.Array) -> tuple[jax.Array, ...]:
    """Output, last memory, and what the backward pass reads, whose rows are segments."""
    whole = Call(*call)
    plan = _Plan.of(target, whole)
    own = plan.cut(whole)
    decays = plan.decays(own)
    (inverse_BNZCC,) = plan.launch(
        forward.inverse_kernel,
        (own.k_BTNH, own.beta_BTN, decays.log),
        [(plan.B, plan.N, plan.Z, plan.C, plan.C)],
        grid=(plan.rows, plan.Z),
    )

    def memory(state_BNHX: jax.Array, *, keep: bool, values: bool = True) -> Any:
        """The memory after each row that starts with this one, at its chunks, and their changes."""
        X = state_BNHX.shape[-1]
        chunks = (plan.B, plan.N, plan.Z, plan.H, X)
        return plan.launch(
            forward.memory_kernel,
            (
                *(own.k_BTNH, own.v_BTNE if values else own.k_BTNH, own.beta_BTN, inverse_BNZCC),
                *(state_BNHX, decays.before, decays.after),
            ),
            [
                (plan.B, plan.N, plan.H, X),
                chunks if keep else _NONE,
                (plan.B, plan.T, plan.N, X) if keep else _NONE,
            ],
            grid=(plan.rows, -(-X // plan.columns)),
            E=X,
            KEEP=keep,
            VALUES=values,
        )

    # The map of each segment's memory; of rows that are not cut, none.
    map_BNHH = jnp.zeros((plan.B, 1), jnp.float32)
    state_BNHE = own.state_BNHE
    if plan.segments > 1:
        one_BNHH = jnp.broadcast_to(
            jnp.eye(plan.H, dtype=jnp.float32), (plan.B, plan.N, plan.H, plan.H)
        )
        map_BNHH, *_ = memory(one_BNHH, keep=False, values=False)
        left_BNHE, *_ = memory(
            jnp.zeros((plan.B, *whole.state_BNHE.shape[1:]), jnp.float32), keep=False
        )
        state_BNHE = plan.before_segments(map_BNHH, left_BNHE, whole.state_BNHE)
    end_BNHE, starts_BNZHE, changes_BTNE = memory(state_BNHE, keep=True)
    (out_BTNE,) = plan.launch(
        forward.output_kernel,
        (own.q_BTNH, own.k_BTNH, starts_BNZHE, changes_BTNE, decays.log, decays.before),
        [(plan.B, plan.T, plan.N, plan.E)],
        grid=(plan.rows, -(-plan.E // plan.columns), plan.Z),
    )
    kept = inverse_BNZCC, starts_BNZHE, changes_BTNE, map_BNHH
    return plan.joined(out_BTNE), plan.last(end_BNHE), *kept


def _run_backward(target: dispatch.Target, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of a call in its order, in float32."""
    *call, inverse_BNZCC, starts_BNZHE, changes_BTNE, map_BNHH, dout_BTNE, dend_BNHE = arrays
    whole = Call(*call)
    plan = _Plan.of(target, whole, rows=len(inverse_BNZCC))
    own, dout_BTNE = plan.cut(whole), plan.segmented(dout_BTNE)
    decays = plan.decays(own)
    B, N, H, E, T, Z, C = plan.B, plan.N, plan.H, plan.E, plan.T, plan.Z, plan.C

    def memory(dend_BNHE: jax.Array, *, keep: bool) -> Any:
        """Gradients of the memory before each row, at its chunks' ends, and G."""
        return plan.launch(
            backward.memory_gradient_kernel,
            (
                *(own.q_BTNH, own.k_BTNH, own.beta_BTN, inverse_BNZCC, dout_BTNE, dend_BNHE),
                *(decays.log, decays.before, decays.after),
            ),
            [
                (B, N, H, E),
                (B, N, Z, H, E) if keep else _NONE,
                (B, T, N, E) if keep else _NONE,
            ],
            grid=(plan.rows, -(-E // plan.columns)),
            KEEP=keep,
        )

    if plan.segments > 1:
        left_BNHE, *_ = memory(jnp.zeros((B, N, H, E), jnp.float32), keep=False)
        dend_BNHE = plan.after_segments(map_BNHH, left_BNHE, dend_BNHE)
    dstate_BNHE, dends_BNZHE, g_BTNE = memory(dend_BNHE, keep=True)
    of_steps = (B, N, Z, C) if plan.decay else _NONE
    dweight_BNZCC, dsystem_BNZCC, dv_BTNE, dbeta_BTN, *dlogs = plan.launch(
        backward.weight_gradient_kernel,
        (
            *(own.q_BTNH, own.k_BTNH, own.v_BTNE, own.beta_BTN, starts_BNZHE, dends_BNZHE),
            *(changes_BTNE, dout_BTNE, g_BTNE, *decays),
        ),
        [
            *((B, N, Z, C, C), (B, N, Z, C, C), (B, T, N, E), (B, T, N)),
            *(of_steps, of_steps, of_steps, of_steps[:3]),
        ],
        grid=(plan.rows, Z),
    )
    dq_BTNH, dk_BTNH = plan.launch(
        backward.key_gradient_kernel,
        (
            *(own.q_BTNH, own.k_BTNH, starts_BNZHE, changes_BTNE, dout_BTNE, dends_BNZHE),
            *(dweight_BNZCC, dsystem_BNZCC, dv_BTNE, decays.before, decays.after),
        ),
        [(B, T, N, H), (B, T, N, H)],
        grid=(plan.rows, Z, -(-H // plan.columns)),
    )
    gradients = map(plan.joined, (dq_BTNH, dk_BTNH, dv_BTNE, dbeta_BTN))
    if not plan.decay:
        return *gradients, plan.first(dstate_BNHE)
    # Of the logarithm of step s: pairs around it, reads at it and later, writes before it, and what
    # the chunk leaves of the memory.
    dpairs_BNZC, dreads_BNZC, dwrites_BNZC, dchunk_BNZ = dlogs
    dlog_BNZC = dpairs_BNZC + lax.cumsum(dreads_BNZC, 3, reverse=True)
    dlog_BNZC += lax.cumsum(_moved(dwrites_BNZC, 1), 3) + dchunk_BNZ[..., None]
    dlog_BTN = jnp.moveaxis(dlog_BNZC.reshape(B, N, Z * C), 1, 2)[:, :T]
    return *gradients, plan.first(dstate_BNHE), plan.joined(dlog_BTN)


class _Decays(NamedTuple):
    """What kernels read of decays, `[B, N, Z, C]`; any array where there is none.

    Attributes:
      log: logarithms of the steps.
      before: what is left at a step of the memory at its chunk's start.
      after: what is left at a chunk's end of what a step wrote.
    """

    log: jax.Array
    before: jax.Array
    after: jax.Array


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The launches of one call.

    Attributes:
      launch: runs a kernel.
      B, T, N, H, E, C, Z: sizes of what kernels see, whose rows are segments.
      columns: columns of a program.
      segments: segments of a row.
      steps: steps of a row, before it is filled up.
      decay: whether there is one.
    """

    launch: Any
    B: int
    T: int
    N: int
    H: int
    E: int
    C: int
    Z: int
    columns: int
    segments: int
    steps: int
    decay: bool

    @classmethod
    def of(cls, target: dispatch.Target, call: Call, rows: int = 0) -> "_Plan":
        """The launches of a call; `rows` counts its segments if they were cut before."""
        B, T, N, H = call.q_BTNH.shape
        E = call.v_BTNE.shape[-1]
        wide = all(x.dtype == jnp.float32 for x in call if x is not None)
        sizes = {"B": B, "T": T, "N": N, "H": H, "E": E}
        tiles = tile.default_tiles(sizes, jnp.float32 if wide else jnp.bfloat16)
        C, columns = tiles["chunk"], tiles["columns"]
        segments = rows // B if rows else tile.segments(sizes, columns)
        # Whole chunks, where a row is cut.
        length = T if segments == 1 else -(-T // (segments * C)) * C
        decay = call.log_decay_BTN is not None
        launch = triton_calls.launcher(
            target,
            num_warps=4,
            T=length,
            N=N,
            H=H,
            E=E,
            C=C,
            LEVELS=C.bit_length() - 1,
            BH=max(tile.SMALLEST, 1 << (H - 1).bit_length()),
            BE=columns,
            DECAY=decay,
            PRECISION="ieee" if wide else "tf32x3",
        )
        Z = -(-length // C)
        return cls(launch, B * segments, length, N, H, E, C, Z, columns, segments, T, decay)

    @property
    def rows(self) -> int:
        """How many memories there are."""
        return self.B * self.N

    def segmented(self, x_BTX: jax.Array) -> jax.Array:
        """An array of whole rows with its segments as rows; what is filled up is zero."""
        missing = self.segments * self.T - self.steps
        if self.segments == 1:
            return x_BTX
        x_BTX = jnp.pad(x_BTX, ((0, 0), (0, missing)) + ((0, 0),) * (x_BTX.ndim - 2))
        return x_BTX.reshape(self.B, self.T, *x_BTX.shape[2:])

    def joined(self, x_BTX: jax.Array) -> jax.Array:
        """Whole rows of an array of segments."""
        if self.segments == 1:
            return x_BTX
        whole = x_BTX.reshape(-1, self.segments * self.T, *x_BTX.shape[2:])
        return whole[:, : self.steps]

    def cut(self, call: Call) -> Call:
        """The arrays of a call with segments as rows, but for its memory."""
        q, k, v, beta, state_BNHE, log_decay = call
        q, k, v, beta, log_decay = jax.tree.map(self.segmented, (q, k, v, beta, log_decay))
        return Call(q, k, v, beta, state_BNHE, log_decay)

    def decays(self, call: Call) -> _Decays:
        """What kernels read of the decays of a call that is cut."""
        if call.log_decay_BTN is None:
            return _Decays(call.beta_BTN, call.beta_BTN, call.beta_BTN)
        log_BTN = call.log_decay_BTN.astype(jnp.float32)
        log_BTN = jnp.pad(log_BTN, ((0, 0), (0, self.Z * self.C - self.T), (0, 0)))
        log_BNZC = jnp.moveaxis(log_BTN, 1, 2).reshape(self.B, self.N, self.Z, self.C)
        # Summed from the end on, without the own step: a difference of sums would cancel.
        after_BNZC = lax.cumsum(_moved(log_BNZC, -1), 3, reverse=True)
        return _Decays(log_BNZC, jnp.exp(lax.cumsum(log_BNZC, 3)), jnp.exp(after_BNZC))

    def before_segments(
        self, map_BNHH: jax.Array, left_BNHE: jax.Array, state_BNHE: jax.Array
    ) -> jax.Array:
        """The memory before each segment, of the maps F, of U, and of the memories before rows."""
        maps, left = (self._by_segment(x) for x in (map_BNHH, left_BNHE))
        maps, left = lax.associative_scan(_followed, (maps, left))
        after = _product(maps, state_BNHE[None]) + left
        before = jnp.concatenate([state_BNHE[None], after[:-1]])
        return jnp.moveaxis(before, 0, 1).reshape(self.B, *state_BNHE.shape[1:])

    def after_segments(
        self, map_BNHH: jax.Array, left_BNHE: jax.Array, dend_BNHE: jax.Array
    ) -> jax.Array:
        """The gradient of the memory after each segment, of F, of what they leave, and of rows'."""
        maps, left = (self._by_segment(x)[::-1] for x in (map_BNHH.mT, left_BNHE))
        maps, left = lax.associative_scan(_followed, (maps, left))
        before = _product(maps, dend_BNHE[None]) + left
        after = jnp.concatenate([dend_BNHE[None], before[:-1]])[::-1]
        return jnp.moveaxis(after, 0, 1).reshape(self.B, *dend_BNHE.shape[1:])

    def first(self, x_BNHE: jax.Array) -> jax.Array:
        """Entries of the first segment of each row."""
        return self._by_segment(x_BNHE)[0]

    def last(self, x_BNHE: jax.Array) -> jax.Array:
        """Entries of the last segment of each row."""
        return self._by_segment(x_BNHE)[-1]

    def _by_segment(self, x_BNHX: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_BNHX.reshape(-1, self.segments, *x_BNHX.shape[1:]), 1, 0)


def _followed(first: tuple[jax.Array, ...], then: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The map S -> F S + U of two segments, one after the other."""
    return _product(then[0], first[0]), _product(then[0], first[1]) + then[1]


def _product(map_PBNHH: jax.Array, x_PBNHX: jax.Array) -> jax.Array:
    shape = (*map_PBNHH.shape[:-1], x_PBNHX.shape[-1])
    return jnp.matmul(map_PBNHH, jnp.broadcast_to(x_PBNHX, shape), precision="highest")


def _moved(x_BNZC: jax.Array, by: int) -> jax.Array:
    """Entries one step later (1) or earlier (-1), zero where there is none."""
    before, after = max(by, 0), max(-by, 0)
    moved = jnp.pad(x_BNZC, ((0, 0), (0, 0), (0, 0), (before, after)))
    return moved[..., after : after + x_BNZC.shape[-1]]


# `out_BTNE` before its scale, and the memory after the last step.
_scan = triton_calls.recurrence("delta_rule", _run_forward, _run_backward)
