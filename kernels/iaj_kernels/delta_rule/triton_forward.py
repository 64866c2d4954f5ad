"""Triton kernels of the delta rule, forward: chunks in parallel, but for the memory between them.

The algebra is that of `xla.py`. The columns of a memory, the widths of a value, do not depend on
each other, so a program holds some of them. For chunks of C steps:

1. `inverse`, all chunks at once: (I + L)^{-1} of the keys and strengths of a chunk.
2. `memory`, one chunk after the other: Changes = (I + L)^{-1} diag(beta) (V - K S), then
   S + K^T Changes. It keeps the memory at each chunk's start, if KEEP; V is zero if not VALUES.
3. `output`, all chunks at once: Q S + tril(Q K^T) Changes.

With DECAY, a and b are what is left at step t of the memory at the chunk's start, and at its end of
what step t wrote, and D_ts what is left at t of what s wrote. Then K S and Q S are a K S and a Q S,
K^T Changes is (b K)^T Changes, S decays by the last a, and K K^T and Q K^T are multiplied by D.

C, BH and BE (H and E rounded up, and the columns of a program) are powers of two; what lies past T,
H or E is read as zero, which writes nothing. A program's first index is a row, a head of a batch
row, and `first` the index of its first step among those of all heads. Arrays of decays, `[B, N, Z,
C]`, have every step of every chunk.
"""

import triton
import triton.language as tl


@triton.jit
def load(base, count, stride, WIDTH, at, C: tl.constexpr, BLOCK: tl.constexpr):
    """A float32 tile of C rows and BLOCK columns from column `at` on, zero outside of the array.

    Args:
      base: pointer to the first row.
      count: rows of the array from there on.
      stride: elements from one row to the next.
      WIDTH: columns of the array.
    """
    t, column = tl.arange(0, C)[:, None], at + tl.arange(0, BLOCK)[None, :]
    mask = (t < count) & (column < WIDTH)
    return tl.load(base + t * stride + column, mask, 0.0).to(tl.float32)


@triton.jit
def store(base, count, stride, WIDTH, at, tile, C: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what of a tile is inside the array; arguments as of `load`."""
    t, column = tl.arange(0, C)[:, None], at + tl.arange(0, BLOCK)[None, :]
    tl.store(base + t * stride + column, tile, (t < count) & (column < WIDTH))


@triton.jit
def load_strengths(base, count, stride, C: tl.constexpr):
    """The float32 writing strengths of C steps; zero for a step that does not exist."""
    t = tl.arange(0, C)
    return tl.load(base + t * stride, t < count, 0.0).to(tl.float32)


@triton.jit
def decay_since(log_BNZC, chunk, C: tl.constexpr):
    """D of a chunk, `[C, C]`, from the logarithms of its steps; 1 above the diagonal.

    The exponent is summed from each step on: a difference of sums from the first would cancel.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    log_C = tl.load(log_BNZC + chunk * C + tl.arange(0, C))
    return tl.exp(tl.cumsum(tl.where(i > j, log_C[:, None], 0.0), 0))


@triton.jit
def inverse_kernel(
    k_BTNH,
    beta_BTN,
    log_BNZC,
    inverse_BNZCC,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BH: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, z = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = row * tl.num_programs(1) + z
    first = (row // N * T + z * C) * N + row % N
    steps = T - z * C
    k_CH = load(k_BTNH + first * H, steps, N * H, H, 0, C, BH)
    t = tl.arange(0, C)
    beta_C = load_strengths(beta_BTN + first, steps, N, C)
    system_CC = beta_C[:, None] * tl.dot(k_CH, tl.trans(k_CH), input_precision=PRECISION)
    if DECAY:
        system_CC *= decay_since(log_BNZC, chunk, C)
    i, j = t[:, None], t[None, :]
    inverse_CC = tl.where(i == j, 1.0, 0.0)
    # The inverse of the diagonal blocks of twice the size, from that of the blocks (`xla.py`).
    for level in tl.static_range(LEVELS):
        size = 1 << level
        below = (i // (2 * size) == j // (2 * size)) & (i // size > j // size)
        corner_CC = tl.where(below, system_CC, 0.0)
        corner_CC = tl.dot(inverse_CC, corner_CC, input_precision=PRECISION)
        inverse_CC -= tl.dot(corner_CC, inverse_CC, input_precision=PRECISION)
    store(inverse_BNZCC + chunk * C * C, C, C, C, 0, inverse_CC, C, C)


@triton.jit
def memory_kernel(
    k_BTNH,
    v_BTNE,
    beta_BTN,
    inverse_BNZCC,
    state_BNHE,
    before_BNZC,
    after_BNZC,
    end_BNHE,
    starts_BNZHE,
    changes_BTNE,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    BE: tl.constexpr,
    DECAY: tl.constexpr,
    KEEP: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BE
    Z: tl.constexpr = (T + C - 1) // C
    t = tl.arange(0, C)
    state_HE = load(state_BNHE + row * H * E, H, E, E, at, BH, BE)
    for z in range(Z):
        chunk = row * Z + z
        if KEEP:
            store(starts_BNZHE + chunk * H * E, H, E, E, at, state_HE, BH, BE)
        first = (row // N * T + z * C) * N + row % N
        steps = T - z * C
        k_CH = load(k_BTNH + first * H, steps, N * H, H, 0, C, BH)
        beta_C = load_strengths(beta_BTN + first, steps, N, C)
        inverse_CC = load(inverse_BNZCC + chunk * C * C, C, C, C, 0, C, C)
        unexpected_CE = -tl.dot(k_CH, state_HE, input_precision=PRECISION)
        if DECAY:
            before_C = tl.load(before_BNZC + chunk * C + t)
            unexpected_CE *= before_C[:, None]
            # The whole chunk's decay is that before its end.
            state_HE *= tl.load(before_BNZC + chunk * C + C - 1)
        if VALUES:
            unexpected_CE += load(v_BTNE + first * E, steps, N * E, E, at, C, BE)
        changes_CE = tl.dot(inverse_CC, beta_C[:, None] * unexpected_CE, input_precision=PRECISION)
        if KEEP:
            store(changes_BTNE + first * E, steps, N * E, E, at, changes_CE, C, BE)
        if DECAY:
            changes_CE *= tl.load(after_BNZC + chunk * C + t)[:, None]
        state_HE += tl.dot(tl.trans(k_CH), changes_CE, input_precision=PRECISION)
    store(end_BNHE + row * H * E, H, E, E, at, state_HE, BH, BE)


@triton.jit
def output_kernel(
    q_BTNH,
    k_BTNH,
    starts_BNZHE,
    changes_BTNE,
    log_BNZC,
    before_BNZC,
    out_BTNE,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    BE: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, at, z = tl.program_id(0).to(tl.int64), tl.program_id(1) * BE, tl.program_id(2)
    first = (row // N * T + z * C) * N + row % N
    steps = T - z * C
    q_CH = load(q_BTNH + first * H, steps, N * H, H, 0, C, BH)
    k_CH = load(k_BTNH + first * H, steps, N * H, H, 0, C, BH)
    chunk = row * tl.num_programs(2) + z
    state_HE = load(starts_BNZHE + chunk * H * E, H, E, E, at, BH, BE)
    changes_CE = load(changes_BTNE + first * E, steps, N * E, E, at, C, BE)
    t = tl.arange(0, C)
    weight_CC = tl.dot(q_CH, tl.trans(k_CH), input_precision=PRECISION)
    if DECAY:
        weight_CC *= decay_since(log_BNZC, chunk, C)
    weight_CC = tl.where(t[:, None] >= t[None, :], weight_CC, 0.0)
    out_CE = tl.dot(q_CH, state_HE, input_precision=PRECISION)
    if DECAY:
        out_CE *= tl.load(before_BNZC + chunk * C + t)[:, None]
    out_CE += tl.dot(weight_CC, changes_CE, input_precision=PRECISION)
    store(out_BTNE + first * E, steps, N * E, E, at, out_CE, C, BE)
