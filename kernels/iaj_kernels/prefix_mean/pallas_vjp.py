"""The gradient of the prefix mean on a GPU, in two sweeps over every segment.

The formulae are in `tile.py`. The forward pass saves its arguments alone; the states at the segment
boundaries are recomputed, then

1. `_read_kernel` goes forward through every segment, with the state: the gradient of the reads, and
   for later c = read / D and c read'.
2. `_reach_kernel` goes back through every segment from a zero cotangent of the state, and
   `segments.boundaries` sums what the segments add: the cotangent of the state at every boundary.
3. `_write_kernel` goes back with it: the gradients of the writes and the values, and that of ln
   beta, whose flux F is exact at every segment boundary, where state and cotangent are both known.

Two sweeps, because state and cotangent together do not fit the registers of a program.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core import dispatch
from iaj_kernels.prefix_mean import segments, tile
from iaj_kernels.prefix_mean.config import Call, Config
from iaj_kernels.prefix_mean.segments import Plan
from iaj_kernels.prefix_mean.state import State


def backward(config: Config, call: Call, cotangents: tuple[jax.Array, State]) -> tuple[Call]:
    """The cotangent of the call."""
    call, cotangents = dispatch.first_order(segments.OP, (call, cotangents))
    write_BTR, value_BTE, decay_R, read_BTR, state, _ = call
    d_out_BTE, d_state = cotangents
    B, T, E = value_BTE.shape
    R = decay_R.shape[0]
    sizes = {"B": B, "T": T, "R": R, "E": E}
    plan = segments.plan(config.target, sizes, value_BTE.dtype, backward=True)
    log2_decay_1R = segments.log2_of_decay(decay_R)
    gates, values = segments.gates_spec(plan), segments.values_spec(plan)
    decay_spec, starts = segments.decay_spec(plan), segments.state_specs(plan)
    float_gates = jax.ShapeDtypeStruct((B, T, R), jnp.float32)

    summary = segments.summaries(plan, write_BTR, value_BTE, log2_decay_1R)
    total, mass = segments.boundaries(plan, state, summary, log2_decay_1R)
    d_read_BTR, scaled_read_BTR, pull_BTR = plan.call(
        functools.partial(_read_kernel, normalise=config.mass_normalisation),
        "read_gradient",
        tile=(plan.chunk, plan.block_e),
        in_specs=[gates, values, gates, values, decay_spec, *starts],
        out_specs=[gates, gates, gates],
        out_shape=[jax.ShapeDtypeStruct((B, T, R), read_BTR.dtype), float_gates, float_gates],
    )(write_BTR, value_BTE, read_BTR, d_out_BTE, log2_decay_1R, total, mass)

    d_summary = plan.call(
        functools.partial(_reach_kernel, normalise=config.mass_normalisation),
        "reach",
        tile=(plan.chunk, plan.block_e),
        in_specs=[gates, gates, values, decay_spec],
        out_specs=starts,
        out_shape=segments.state_shapes(plan, plan.segments),
    )(scaled_read_BTR, pull_BTR, d_out_BTE, log2_decay_1R)
    d_total, d_mass = segments.boundaries(plan, d_state, d_summary, log2_decay_1R, reverse=True)
    flux = jnp.sum(d_total * total, axis=-1)[:, :, None] + d_mass * mass

    ends = segments.state_specs(plan, shift=1)
    d_write_BTR, d_value_BTE, d_log_decay = plan.call(
        functools.partial(_write_kernel, normalise=config.mass_normalisation),
        "write_gradient",
        tile=(plan.chunk, plan.block_e),
        in_specs=[gates, values, gates, gates, values, decay_spec, *ends, ends[1]],
        out_specs=[gates, values, starts[1]],
        out_shape=[
            jax.ShapeDtypeStruct((B, T, R), write_BTR.dtype),
            jax.ShapeDtypeStruct((B, T, E), value_BTE.dtype),
            segments.state_shapes(plan, plan.segments)[1],
        ],
    )(
        write_BTR,
        value_BTE,
        scaled_read_BTR,
        pull_BTR,
        d_out_BTE,
        log2_decay_1R,
        d_total,
        d_mass,
        flux,
    )
    d_decay_R = jnp.sum(d_log_decay, axis=(0, 1, 2)) / decay_R
    d_state = State(d_total[:, 0], d_mass[:, 0, 0])
    return (Call(d_write_BTR, d_value_BTE, d_decay_R, d_read_BTR, d_state),)


def _read_kernel(
    plan: Plan,
    write_ref,
    value_ref,
    read_ref,
    d_out_ref,
    log2_decay_ref,
    total_ref,
    mass_ref,
    d_read_ref,
    scaled_read_ref,
    pull_ref,
    *,
    normalise: bool,
) -> None:
    left = segments.steps_left(plan)
    log2_decay_1R = log2_decay_ref[...]
    powers = tile.decays(plan.chunk, log2_decay_1R)
    until_end_CR = tile.until_end(plan.chunk, log2_decay_1R, plan.chunk)
    kept_1R = segments.kept(log2_decay_1R, plan.chunk)
    kept_R1 = kept_1R.reshape(plan.R, 1)

    def step(k, state):
        total_RE, mass_1R = state
        write_CR = segments.load(plan, left, write_ref, k).astype(jnp.float32)
        read_CR = segments.load(plan, left, read_ref, k).astype(jnp.float32)
        value_CE = segments.load(plan, left, value_ref, k)
        d_out_CE = segments.load(plan, left, d_out_ref, k)
        per_mass_CR = jnp.ones_like(write_CR)
        if normalise:
            per_mass_CR = tile.per_mass(tile.past_mass(powers, write_CR, mass_1R))
        d_read_CR = tile.read_gradient(powers, write_CR, value_CE, d_out_CE, total_RE, per_mass_CR)
        scaled_read_CR = read_CR * per_mass_CR
        segments.store(plan, left, d_read_ref, k, d_read_CR)
        segments.store(plan, left, scaled_read_ref, k, scaled_read_CR)
        segments.store(plan, left, pull_ref, k, scaled_read_CR * d_read_CR)
        add_total_RE, add_mass_1R = tile.advance(until_end_CR, write_CR, value_CE)
        return kept_R1 * total_RE + add_total_RE, kept_1R * mass_1R + add_mass_1R

    lax.fori_loop(jnp.int32(0), segments.chunks(plan, left), step, (total_ref[...], mass_ref[...]))


def _reach_kernel(
    plan: Plan,
    scaled_read_ref,
    pull_ref,
    d_out_ref,
    log2_decay_ref,
    d_total_ref,
    d_mass_ref,
    *,
    normalise: bool,
) -> None:
    left = segments.steps_left(plan)
    log2_decay_1R = log2_decay_ref[...]
    powers = tile.decays(plan.chunk, log2_decay_1R)
    kept_1R = segments.kept(log2_decay_1R, plan.chunk)
    kept_R1 = kept_1R.reshape(plan.R, 1)
    count = segments.chunks(plan, left)

    def step(done, d_state):
        k = count - 1 - done
        scaled_read_CR = segments.load(plan, left, scaled_read_ref, k)
        pull_CR = segments.load(plan, left, pull_ref, k) if normalise else None
        d_out_CE = segments.load(plan, left, d_out_ref, k)
        add_total_RE, add_mass_1R = tile.retreat(powers, scaled_read_CR, pull_CR, d_out_CE)
        # The last chunk may be partial, but the cotangent that it decays is still zero.
        return kept_R1 * d_state[0] + add_total_RE, kept_1R * d_state[1] + add_mass_1R

    empty = jnp.zeros(d_total_ref.shape, jnp.float32), jnp.zeros(d_mass_ref.shape, jnp.float32)
    d_total_ref[...], d_mass_ref[...] = lax.fori_loop(jnp.int32(0), count, step, empty)


def _write_kernel(
    plan: Plan,
    write_ref,
    value_ref,
    scaled_read_ref,
    pull_ref,
    d_out_ref,
    log2_decay_ref,
    d_total_ref,
    d_mass_ref,
    flux_ref,
    d_write_ref,
    d_value_ref,
    d_log_decay_ref,
    *,
    normalise: bool,
) -> None:
    left = segments.steps_left(plan)
    log2_decay_1R = log2_decay_ref[...]
    log2_decay_R1 = log2_decay_1R.reshape(plan.R, 1)
    powers = tile.decays(plan.chunk, log2_decay_1R)
    count = segments.chunks(plan, left)

    def step(done, carry):
        d_total_RE, d_mass_1R, flux_1R, d_log_decay_1R = carry
        k = count - 1 - done
        steps = segments.length(plan, left, k)
        until_end_CR = tile.until_end(plan.chunk, log2_decay_1R, steps)
        write_CR = segments.load(plan, left, write_ref, k).astype(jnp.float32)
        value_CE = segments.load(plan, left, value_ref, k)
        scaled_read_CR = segments.load(plan, left, scaled_read_ref, k)
        pull_CR = segments.load(plan, left, pull_ref, k)
        d_out_CE = segments.load(plan, left, d_out_ref, k)
        mass_pull_CR = pull_CR if normalise else None

        d_write_CR = tile.write_gradient(
            powers,
            until_end_CR,
            scaled_read_CR,
            mass_pull_CR,
            value_CE,
            d_out_CE,
            d_total_RE,
            d_mass_1R,
        )
        d_value_CE = tile.value_gradient(
            powers, until_end_CR, scaled_read_CR, write_CR, d_out_CE, d_total_RE
        )
        segments.store(plan, left, d_write_ref, k, d_write_CR)
        segments.store(plan, left, d_value_ref, k, d_value_CE)

        lost_CR = write_CR * d_write_CR - (0.0 if normalise else pull_CR)
        add_1R, flux_1R = tile.flux_gradient(flux_1R, lost_CR, steps)
        add_total_RE, add_mass_1R = tile.retreat(powers, scaled_read_CR, mass_pull_CR, d_out_CE)
        return (
            segments.kept(log2_decay_R1, steps) * d_total_RE + add_total_RE,
            segments.kept(log2_decay_1R, steps) * d_mass_1R + add_mass_1R,
            flux_1R,
            d_log_decay_1R + add_1R,
        )

    first = d_total_ref[...], d_mass_ref[...], flux_ref[...], jnp.zeros_like(log2_decay_1R)
    d_log_decay_ref[...] = lax.fori_loop(jnp.int32(0), count, step, first)[3]
