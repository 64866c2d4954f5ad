"""Triton kernels of the delta rule, forward: chunks in parallel, but for the memory between them.

The algebra is that of `xla.py`. The columns of a memory, the widths of a value, do not depend on
each other, so a program holds some of them. For chunks of C steps:

1. `inverse`, all chunks at once: (I + L)^{-1} of the keys and strengths of a chunk.
2. `memory`, one chunk after the other: Changes = (I + L)^{-1} diag(beta) (V - K S), then
   S + K^T Changes. It keeps the memory at each chunk's start.
3. `output`, all chunks at once: Q S + tril(Q K^T) Changes.

C, BH and BE (H and E rounded up, and the columns of a program) are powers of two; what lies past T,
H or E is read as zero, which writes nothing. A program's first index is a row, a head of a batch
row, and `first` the index of its first step among those of all heads.
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
def inverse_kernel(
    k_BTNH,
    beta_BTN,
    inverse_BNZCC,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, z = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (row // N * T + z * C) * N + row % N
    steps = T - z * C
    k_CH = load(k_BTNH + first * H, steps, N * H, H, 0, C, BH)
    t = tl.arange(0, C)
    beta_C = load_strengths(beta_BTN + first, steps, N, C)
    system_CC = beta_C[:, None] * tl.dot(k_CH, tl.trans(k_CH), input_precision=PRECISION)
    i, j = t[:, None], t[None, :]
    inverse_CC = tl.where(i == j, 1.0, 0.0)
    # The inverse of the diagonal blocks of twice the size, from that of the blocks (`xla.py`).
    for level in tl.static_range(LEVELS):
        size = 1 << level
        below = (i // (2 * size) == j // (2 * size)) & (i // size > j // size)
        corner_CC = tl.where(below, system_CC, 0.0)
        corner_CC = tl.dot(inverse_CC, corner_CC, input_precision=PRECISION)
        inverse_CC -= tl.dot(corner_CC, inverse_CC, input_precision=PRECISION)
    chunk = row * tl.num_programs(1) + z
    store(inverse_BNZCC + chunk * C * C, C, C, C, 0, inverse_CC, C, C)


@triton.jit
def memory_kernel(
    k_BTNH,
    v_BTNE,
    beta_BTN,
    inverse_BNZCC,
    state_BNHE,
    starts_BNZHE,
    changes_BTNE,
    end_BNHE,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    BE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BE
    Z: tl.constexpr = (T + C - 1) // C
    state_HE = load(state_BNHE + row * H * E, H, E, E, at, BH, BE)
    for z in range(Z):
        store(starts_BNZHE + (row * Z + z) * H * E, H, E, E, at, state_HE, BH, BE)
        first = (row // N * T + z * C) * N + row % N
        steps = T - z * C
        k_CH = load(k_BTNH + first * H, steps, N * H, H, 0, C, BH)
        v_CE = load(v_BTNE + first * E, steps, N * E, E, at, C, BE)
        beta_C = load_strengths(beta_BTN + first, steps, N, C)
        inverse_CC = load(inverse_BNZCC + (row * Z + z) * C * C, C, C, C, 0, C, C)
        unexpected_CE = v_CE - tl.dot(k_CH, state_HE, input_precision=PRECISION)
        changes_CE = tl.dot(inverse_CC, beta_C[:, None] * unexpected_CE, input_precision=PRECISION)
        store(changes_BTNE + first * E, steps, N * E, E, at, changes_CE, C, BE)
        state_HE += tl.dot(tl.trans(k_CH), changes_CE, input_precision=PRECISION)
    store(end_BNHE + row * H * E, H, E, E, at, state_HE, BH, BE)


@triton.jit
def output_kernel(
    q_BTNH,
    k_BTNH,
    starts_BNZHE,
    changes_BTNE,
    out_BTNE,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    BE: tl.constexpr,
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
    weight_CC = tl.where(t[:, None] >= t[None, :], weight_CC, 0.0)
    out_CE = tl.dot(q_CH, state_HE, input_precision=PRECISION)
    out_CE += tl.dot(weight_CC, changes_CE, input_precision=PRECISION)
    store(out_BTNE + first * E, steps, N * E, E, at, out_CE, C, BE)
