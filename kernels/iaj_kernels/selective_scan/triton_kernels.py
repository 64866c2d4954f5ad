"""Triton kernels of the selective scan: all chunks at once, but for the states between them.

With the letters of `xla.py`, a chunk of C steps that starts with the state h maps it to

    h' = exp(A sum_t delta_t) h + e

where e is its end from a state of zero: the decays of a chunk multiply to one exponential. So,

1. `end`, all chunks at once: e, and the sums of delta.
2. `carry`, one chunk after the other: the state at each chunk's start, and after the last.
3. `output`, all chunks at once: y, from those states.

Backward, the same from the last chunk on, for the cotangent g' of a chunk's end:

4. `adjoint`, all chunks at once: what the chunk's dy give to the cotangent of its start.
5. `carry`, reversed: g = exp(A sum_t delta_t) g' + that.
6. `gradient`, all chunks at once: a first pass keeps the state at each group of G steps. Then, from
   the last group on, its G states are computed again and stay in registers, and the equations of
   `xla.py` follow step by step.

A program has BI channels and all J numbers of their states, as a tile [J, BI] whose sums over J
stay within a thread. Sums over channels, in dB and dC, are left as one term for each program, which
XLA adds: an atomic sum would depend on its order. Steps past T have delta = 0, which changes
nothing; what lies past I or J is read as zero.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x to about one rounding, from 2^n and the Taylor series of what is left.

    The exponential of a GPU is off by up to four roundings. Where delta is the same in all steps,
    so is its error, and a state that remembers many steps adds them up.
    """
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts: the product with the first is exact.
    r = x - n * 0.693359375 + n * 2.12194440054690583e-4
    p = 1.0 / 720 + r * (1.0 / 5040)
    p = 1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120 + r * p))
    return (1.0 + r * (1.0 + r * (0.5 + r * p))) * tl.exp2(n)


@triton.jit
def load_tile(base, at, I, J, BI: tl.constexpr, BJ: tl.constexpr):  # noqa: E741
    """A tile [BJ, BI] of the array [J, I] at `base`, columns `at` on; zero outside."""
    j, i = tl.arange(0, BJ)[:, None], at + tl.arange(0, BI)[None, :]
    return tl.load(base + j * I + i, (j < J) & (i < I), 0.0)


@triton.jit
def store_tile(base, at, I, J, tile, BI: tl.constexpr, BJ: tl.constexpr):  # noqa: E741
    """Writes what of a tile is inside the array; arguments as of `load_tile`."""
    j, i = tl.arange(0, BJ)[:, None], at + tl.arange(0, BI)[None, :]
    tl.store(base + j * I + i, tile, (j < J) & (i < I))


@triton.jit
def load_step(base, first, t, steps, x, WIDTH):
    """The float32 numbers `x` of step `t` of a chunk that begins with row `first`; zero outside."""
    return tl.load(base + (first + t) * WIDTH + x, (x < WIDTH) & (t < steps), 0.0).to(tl.float32)


@triton.jit
def step(h_JI, A_JI, u_BTI, delta_BTI, B_BTJ, first, t, steps, i, j, I, J):  # noqa: E741
    """The state after step `t`, and the delta of that step."""
    delta_I = load_step(delta_BTI, first, t, steps, i, I)
    x_I = delta_I * load_step(u_BTI, first, t, steps, i, I)
    B_J = load_step(B_BTJ, first, t, steps, j, J)
    return exp(delta_I[None, :] * A_JI) * h_JI + x_I[None, :] * B_J[:, None], delta_I


@triton.jit
def end_kernel(
    u_BTI,
    delta_BTI,
    A_BJI,
    B_BTJ,
    ends_BZJI,
    totals_BZI,
    T: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    J: tl.constexpr,
    C: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
    at, z, b = tl.program_id(0) * BI, tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, steps = b * T + z * C, T - z * C
    i, j = at + tl.arange(0, BI), tl.arange(0, BJ)
    A_JI = load_tile(A_BJI + b * J * I, at, I, J, BI, BJ)
    h_JI = tl.full([BJ, BI], 0.0, tl.float32)
    total_I = tl.full([BI], 0.0, tl.float32)
    for t in range(C):
        h_JI, delta_I = step(h_JI, A_JI, u_BTI, delta_BTI, B_BTJ, first, t, steps, i, j, I, J)
        total_I += delta_I
    chunk = b * tl.num_programs(1) + z
    store_tile(ends_BZJI + chunk * J * I, at, I, J, h_JI, BI, BJ)
    tl.store(totals_BZI + chunk * I + i, total_I, i < I)


@triton.jit
def carry_kernel(
    A_BJI,
    totals_BZI,
    added_BZJI,
    state_BJI,
    before_BZJI,
    last_BJI,
    I: tl.constexpr,  # noqa: E741
    J: tl.constexpr,
    Z: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    REVERSE: tl.constexpr,
):
    at, b = tl.program_id(0) * BI, tl.program_id(1).to(tl.int64)
    i = at + tl.arange(0, BI)
    A_JI = load_tile(A_BJI + b * J * I, at, I, J, BI, BJ)
    h_JI = load_tile(state_BJI + b * J * I, at, I, J, BI, BJ)
    for k in range(Z):
        z = Z - 1 - k if REVERSE else k
        chunk = b * Z + z
        store_tile(before_BZJI + chunk * J * I, at, I, J, h_JI, BI, BJ)
        total_I = tl.load(totals_BZI + chunk * I + i, i < I, 0.0)
        added_JI = load_tile(added_BZJI + chunk * J * I, at, I, J, BI, BJ)
        h_JI = exp(total_I[None, :] * A_JI) * h_JI + added_JI
    store_tile(last_BJI + b * J * I, at, I, J, h_JI, BI, BJ)


@triton.jit
def output_kernel(
    u_BTI,
    delta_BTI,
    A_BJI,
    B_BTJ,
    C_BTJ,
    starts_BZJI,
    y_BTI,
    T: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    J: tl.constexpr,
    C: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
    at, z, b = tl.program_id(0) * BI, tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, steps = b * T + z * C, T - z * C
    i, j = at + tl.arange(0, BI), tl.arange(0, BJ)
    A_JI = load_tile(A_BJI + b * J * I, at, I, J, BI, BJ)
    h_JI = load_tile(starts_BZJI + (b * tl.num_programs(1) + z) * J * I, at, I, J, BI, BJ)
    for t in range(C):
        there_I, mask_I = (first + t) * I + i, (i < I) & (t < steps)
        h_JI, _ = step(h_JI, A_JI, u_BTI, delta_BTI, B_BTJ, first, t, steps, i, j, I, J)
        C_J = load_step(C_BTJ, first, t, steps, j, J)
        y_I = tl.sum(h_JI * C_J[:, None], 0)
        tl.store(y_BTI + there_I, y_I, mask_I)


@triton.jit
def adjoint_kernel(
    delta_BTI,
    A_BJI,
    C_BTJ,
    dy_BTI,
    added_BZJI,
    T: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    J: tl.constexpr,
    C: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
    at, z, b = tl.program_id(0) * BI, tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, steps = b * T + z * C, T - z * C
    i, j = at + tl.arange(0, BI), tl.arange(0, BJ)
    A_JI = load_tile(A_BJI + b * J * I, at, I, J, BI, BJ)
    g_JI = tl.full([BJ, BI], 0.0, tl.float32)
    for back in range(C):
        t = C - 1 - back
        delta_I = load_step(delta_BTI, first, t, steps, i, I)
        dy_I = load_step(dy_BTI, first, t, steps, i, I)
        C_J = load_step(C_BTJ, first, t, steps, j, J)
        g_JI = exp(delta_I[None, :] * A_JI) * (g_JI + C_J[:, None] * dy_I[None, :])
    chunk = b * tl.num_programs(1) + z
    store_tile(added_BZJI + chunk * J * I, at, I, J, g_JI, BI, BJ)


@triton.jit
def gradient_kernel(
    u_BTI,
    delta_BTI,
    A_BJI,
    B_BTJ,
    C_BTJ,
    starts_BZJI,
    dy_BTI,
    dends_BZJI,
    groups_BZGJI,
    du_BTI,
    ddelta_BTI,
    dA_BZJI,
    dB_BPTJ,
    dC_BPTJ,
    T: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    J: tl.constexpr,
    C: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    GROUP: tl.constexpr,
):
    at, z, b = tl.program_id(0) * BI, tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, steps = b * T + z * C, T - z * C
    i, j = at + tl.arange(0, BI), tl.arange(0, BJ)
    chunk = b * tl.num_programs(1) + z
    partial = ((b * tl.num_programs(0) + tl.program_id(0)) * T + z * C) * J
    groups_GJI = groups_BZGJI + chunk * (C // GROUP) * J * I
    A_JI = load_tile(A_BJI + b * J * I, at, I, J, BI, BJ)
    h_JI = load_tile(starts_BZJI + chunk * J * I, at, I, J, BI, BJ)
    for group in range(C // GROUP):
        store_tile(groups_GJI + group * J * I, at, I, J, h_JI, BI, BJ)
        for own in range(GROUP):
            t = group * GROUP + own
            h_JI, delta_I = step(h_JI, A_JI, u_BTI, delta_BTI, B_BTJ, first, t, steps, i, j, I, J)
    # Every thread sees what the others have stored.
    tl.debug_barrier()
    g_JI = load_tile(dends_BZJI + chunk * J * I, at, I, J, BI, BJ)
    dA_JI = tl.full([BJ, BI], 0.0, tl.float32)
    for back in range(C // GROUP):
        group = C // GROUP - 1 - back
        h_JI = load_tile(groups_GJI + group * J * I, at, I, J, BI, BJ)
        before = ()
        for own in tl.static_range(GROUP):
            before = before + (h_JI,)  # noqa: RUF005 - Triton has no starred expression
            t = group * GROUP + own
            h_JI, delta_I = step(h_JI, A_JI, u_BTI, delta_BTI, B_BTJ, first, t, steps, i, j, I, J)
        for own in tl.static_range(GROUP):
            t = group * GROUP + GROUP - 1 - own
            there_I, mask_I = (first + t) * I + i, (i < I) & (t < steps)
            mask_J = (j < J) & (t < steps)
            u_I = load_step(u_BTI, first, t, steps, i, I)
            delta_I = load_step(delta_BTI, first, t, steps, i, I)
            dy_I = load_step(dy_BTI, first, t, steps, i, I)
            B_J = load_step(B_BTJ, first, t, steps, j, J)
            C_J = load_step(C_BTJ, first, t, steps, j, J)
            g_JI += C_J[:, None] * dy_I[None, :]
            dC_J = tl.sum(h_JI * dy_I[None, :], 1)
            dB_J = tl.sum(g_JI * (delta_I * u_I)[None, :], 1)
            dx_I = tl.sum(g_JI * B_J[:, None], 0)
            h_JI = before[GROUP - 1 - own]
            g_JI *= exp(delta_I[None, :] * A_JI)
            p_JI = g_JI * h_JI
            dA_JI += p_JI * delta_I[None, :]
            ddelta_I = dx_I * u_I + tl.sum(p_JI * A_JI, 0)
            tl.store(du_BTI + there_I, dx_I * delta_I, mask_I)
            tl.store(ddelta_BTI + there_I, ddelta_I, mask_I)
            tl.store(dB_BPTJ + partial + t * J + j, dB_J, mask_J)
            tl.store(dC_BPTJ + partial + t * J + j, dC_J, mask_J)
    store_tile(dA_BZJI + chunk * J * I, at, I, J, dA_JI, BI, BJ)
