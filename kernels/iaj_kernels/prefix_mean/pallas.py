"""The prefix mean on a GPU: three launches of Pallas kernels (Triton lowering).

Prototype Transformer, Eq. 2. `segments.py` finds the state at every segment boundary in two
launches, and a third reads every segment from its own initial state:

1. `summaries`: the state that each segment leaves when it starts empty.
2. `boundaries`: the running sum of those.
3. `_output_kernel`: the outputs, chunk by chunk (`tile.py`).

A sequence of one segment needs the third alone; XLA drops the others if the state is not used. The
backward pass (`pallas_vjp.py`) saves the arguments alone. Under `jax.shard_map` pass
`check_vma=False`: a Pallas call does not say over which axes its results vary.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core import dispatch
from iaj_kernels.prefix_mean import pallas_vjp, segments, tile
from iaj_kernels.prefix_mean.config import Call, Config
from iaj_kernels.prefix_mean.segments import Plan
from iaj_kernels.prefix_mean.state import State


def unsupported_reason(config: Config, call: Call) -> str:
    """Why the kernels do not run for a call; empty if they do."""
    if reason := dispatch.unsupported_reason(config.target):
        return reason
    if call.resets_BT is not None:
        return "has no resets"
    R, E = call.write_BTR.shape[-1], call.value_BTE.shape[-1]
    for letter, size, most in (("R", R, 64), ("E", E, 256)):
        if size & (size - 1) or not 16 <= size <= most:
            return f"needs {letter} a power of two from 16 to {most}, and {letter} = {size}"
    return ""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(config: Config, call: Call) -> tuple[jax.Array, State]:
    """`out_BTE` in the dtype of the values and the state after the last step; see `api`."""
    write_BTR, value_BTE, decay_R, read_BTR, state, _ = call
    B, T, E = value_BTE.shape
    sizes = {"B": B, "T": T, "R": decay_R.shape[0], "E": E}
    plan = segments.plan(config.target, sizes, value_BTE.dtype, backward=False)
    log2_decay_1R = segments.log2_of_decay(decay_R)
    summary = segments.summaries(plan, write_BTR, value_BTE, log2_decay_1R)
    total, mass = segments.boundaries(plan, state, summary, log2_decay_1R)
    starts = (
        (total, mass)
        if plan.segments > 1
        else (state.total_BRE[:, None], state.mass_BR[:, None, None])
    )
    out_BTE = plan.call(
        functools.partial(_output_kernel, normalise=config.mass_normalisation),
        "output",
        tile=(plan.chunk, plan.block_e),
        in_specs=[
            segments.gates_spec(plan),
            segments.values_spec(plan),
            segments.gates_spec(plan),
            segments.decay_spec(plan),
            *segments.state_specs(plan),
        ],
        out_specs=segments.values_spec(plan),
        out_shape=jax.ShapeDtypeStruct((B, T, E), value_BTE.dtype),
    )(write_BTR, value_BTE, read_BTR, log2_decay_1R, *starts)
    return out_BTE, State(total[:, -1], mass[:, -1, 0])


def _output_kernel(
    plan: Plan,
    write_ref,
    value_ref,
    read_ref,
    log2_decay_ref,
    total_ref,
    mass_ref,
    out_ref,
    *,
    normalise: bool,
) -> None:
    left = segments.steps_left(plan)
    log2_decay_1R = log2_decay_ref[...]
    powers = tile.decays(plan.chunk, log2_decay_1R)
    # The state after a last, partial chunk is not used, so its decay may count steps past the end.
    until_end_CR = tile.until_end(plan.chunk, log2_decay_1R, plan.chunk)
    kept_1R = segments.kept(log2_decay_1R, plan.chunk)
    kept_R1 = kept_1R.reshape(plan.R, 1)

    def step(k, state):
        total_RE, mass_1R = state
        write_CR = segments.load(plan, left, write_ref, k).astype(jnp.float32)
        scaled_read_CR = segments.load(plan, left, read_ref, k).astype(jnp.float32)
        value_CE = segments.load(plan, left, value_ref, k)
        if normalise:
            scaled_read_CR *= tile.per_mass(tile.past_mass(powers, write_CR, mass_1R))
        out_CE = tile.output(powers, scaled_read_CR, write_CR, value_CE, total_RE)
        segments.store(plan, left, out_ref, k, out_CE)
        add_total_RE, add_mass_1R = tile.advance(until_end_CR, write_CR, value_CE, wide=False)
        return kept_R1 * total_RE + add_total_RE, kept_1R * mass_1R + add_mass_1R

    lax.fori_loop(jnp.int32(0), segments.chunks(plan, left), step, (total_ref[...], mass_ref[...]))


def _forward(config: Config, call: Call) -> tuple[tuple[jax.Array, State], Call]:
    return run(config, call), call


run.defvjp(_forward, pallas_vjp.backward)
