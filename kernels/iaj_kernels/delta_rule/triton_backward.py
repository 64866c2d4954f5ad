"""Triton kernels of the delta rule, backward: gradients of the memory by chunk, then the others.

A chunk that starts with the memory S computes, with A = (I + L)^{-1} and M = tril(Q K^T),

    X = A diag(beta) (V - K S)        O = Q S + M X        S' = S + K^T X

From dO and dS' follow, with G = A^T dX,

    dX = M^T dO + K dS'
    dS = dS' + Q^T dO - K^T diag(beta) G
    dM = tril(dO X^T)                           dL = -tril(G X^T, -1)
    dQ = dO S^T + dM K                          dV = diag(beta) G
    dK = dM^T Q + X dS'^T - dV S^T + P K + P^T K,  P = diag(beta) dL
    dbeta_t = sum_e G_te (V - K S)_te + sum_j dL_tj (K K^T)_tj

With decays (`triton_forward.py`) every product with S has a, every one with S' b, and those of two
steps D. The logarithm of step s is part of the decay from a step before it to s or a later one, and
that of its chunk. Its gradient is the sum of

    dM_ij M_ij + dL_ij L_ij                     over i >= s > j
    a_t (dO Q S - dV K S)_t                     over t >= s, products of rows summed over E
    b_t (X K dS')_t                             over t < s
    a_C (S dS')                                 summed over H and E

None of these sums takes away what it added, so that nothing cancels where nothing is left.

1. `memory_gradient`, one chunk after the other from the last on: dS and G, if KEEP. Only dS depends
   on another chunk, and its columns do not depend on each other.
2. `weight_gradient`, all chunks at once: dM D, P, dV, dbeta, and the terms of the lines above.
3. `key_gradient`, all chunks and groups of columns of the keys at once: dQ and dK.
"""

import triton
import triton.language as tl

from iaj_kernels.delta_rule.triton_forward import decay_since, load, load_strengths, store


@triton.jit
def memory_gradient_kernel(
    q_BTNH,
    k_BTNH,
    beta_BTN,
    inverse_BNZCC,
    dout_BTNE,
    dend_BNHE,
    log_BNZC,
    before_BNZC,
    after_BNZC,
    dstate_BNHE,
    dends_BNZHE,
    g_BTNE,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    BE: tl.constexpr,
    DECAY: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BE
    Z: tl.constexpr = (T + C - 1) // C
    t = tl.arange(0, C)
    i, j = t[:, None], t[None, :]
    dstate_HE = load(dend_BNHE + row * H * E, H, E, E, at, BH, BE)
    for back in range(Z):
        z = Z - 1 - back
        chunk = row * Z + z
        if KEEP:
            store(dends_BNZHE + chunk * H * E, H, E, E, at, dstate_HE, BH, BE)
        first = (row // N * T + z * C) * N + row % N
        steps = T - z * C
        q_CH = load(q_BTNH + first * H, steps, N * H, H, 0, C, BH)
        k_CH = load(k_BTNH + first * H, steps, N * H, H, 0, C, BH)
        beta_C = load_strengths(beta_BTN + first, steps, N, C)
        inverse_CC = load(inverse_BNZCC + chunk * C * C, C, C, C, 0, C, C)
        dout_CE = load(dout_BTNE + first * E, steps, N * E, E, at, C, BE)
        # M^T: row i is the step that writes, column j the one that reads. The order of products
        # decides how many registers are spilled: none without decay, few with it.
        weight_CC = tl.dot(k_CH, tl.trans(q_CH), input_precision=PRECISION)
        if DECAY:
            dchanges_CE = tl.dot(k_CH, dstate_HE, input_precision=PRECISION)
            weight_CC *= tl.trans(decay_since(log_BNZC, chunk, C))
            dchanges_CE *= tl.load(after_BNZC + chunk * C + t)[:, None]
            before_C = tl.load(before_BNZC + chunk * C + t)
            q_CH *= before_C[:, None]
            k_CH *= before_C[:, None]
            dstate_HE *= tl.load(before_BNZC + chunk * C + C - 1)
            weight_CC = tl.where(i <= j, weight_CC, 0.0)
            dchanges_CE += tl.dot(weight_CC, dout_CE, input_precision=PRECISION)
        else:
            weight_CC = tl.where(i <= j, weight_CC, 0.0)
            dchanges_CE = tl.dot(weight_CC, dout_CE, input_precision=PRECISION)
            dchanges_CE += tl.dot(k_CH, dstate_HE, input_precision=PRECISION)
        g_CE = tl.dot(tl.trans(inverse_CC), dchanges_CE, input_precision=PRECISION)
        if KEEP:
            store(g_BTNE + first * E, steps, N * E, E, at, g_CE, C, BE)
        dstate_HE += tl.dot(tl.trans(q_CH), dout_CE, input_precision=PRECISION)
        dstate_HE -= tl.dot(tl.trans(k_CH), beta_C[:, None] * g_CE, input_precision=PRECISION)
    store(dstate_BNHE + row * H * E, H, E, E, at, dstate_HE, BH, BE)


@triton.jit
def weight_gradient_kernel(
    q_BTNH,
    k_BTNH,
    v_BTNE,
    beta_BTN,
    starts_BNZHE,
    dends_BNZHE,
    changes_BTNE,
    dout_BTNE,
    g_BTNE,
    log_BNZC,
    before_BNZC,
    after_BNZC,
    dweight_BNZCC,
    dsystem_BNZCC,
    dv_BTNE,
    dbeta_BTN,
    dpairs_BNZC,
    dreads_BNZC,
    dwrites_BNZC,
    dchunk_BNZ,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BE: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, z = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (row // N * T + z * C) * N + row % N
    chunk = row * tl.num_programs(1) + z
    steps = T - z * C
    t = tl.arange(0, C)
    i, j = t[:, None], t[None, :]
    beta_C = load_strengths(beta_BTN + first, steps, N, C)
    dweight_CC = tl.full([C, C], 0.0, tl.float32)
    dsystem_CC = tl.full([C, C], 0.0, tl.float32)
    dbeta_C = tl.full([C], 0.0, tl.float32)
    # What only a decay needs is left out by the compiler without one.
    reads_C = tl.full([C], 0.0, tl.float32)
    writes_C = tl.full([C], 0.0, tl.float32)
    both_C = tl.full([BE], 0.0, tl.float32)
    before_C = tl.full([C], 1.0, tl.float32)
    after_C = tl.full([C], 1.0, tl.float32)
    if DECAY:
        before_C = tl.load(before_BNZC + chunk * C + t)
        after_C = tl.load(after_BNZC + chunk * C + t)
    for at in range(0, E, BE):
        changes_CE = load(changes_BTNE + first * E, steps, N * E, E, at, C, BE)
        dout_CE = load(dout_BTNE + first * E, steps, N * E, E, at, C, BE)
        g_CE = load(g_BTNE + first * E, steps, N * E, E, at, C, BE)
        store(dv_BTNE + first * E, steps, N * E, E, at, beta_C[:, None] * g_CE, C, BE)
        dweight_CC += tl.dot(dout_CE, tl.trans(changes_CE), input_precision=PRECISION)
        dsystem_CC -= tl.dot(g_CE, tl.trans(changes_CE), input_precision=PRECISION)
        unexpected_CE = load(v_BTNE + first * E, steps, N * E, E, at, C, BE)
        for h in range(0, H, BE):
            k_CH = load(k_BTNH + first * H, steps, N * H, H, h, C, BE)
            state_HE = load(starts_BNZHE + (chunk * H + h) * E, H - h, E, E, at, BE, BE)
            expected_CE = tl.dot(k_CH, state_HE, input_precision=PRECISION)
            if DECAY:
                q_CH = load(q_BTNH + first * H, steps, N * H, H, h, C, BE)
                expected_CE *= before_C[:, None]
                read_CE = tl.dot(q_CH, state_HE, input_precision=PRECISION)
                reads_C += before_C * tl.sum(dout_CE * read_CE, 1)
                reads_C -= beta_C * tl.sum(g_CE * expected_CE, 1)
                dend_HE = load(dends_BNZHE + (chunk * H + h) * E, H - h, E, E, at, BE, BE)
                written_CE = tl.dot(k_CH, dend_HE, input_precision=PRECISION)
                writes_C += after_C * tl.sum(changes_CE * written_CE, 1)
                both_C += tl.sum(state_HE * dend_HE, 1)
            unexpected_CE -= expected_CE
        dbeta_C += tl.sum(g_CE * unexpected_CE, 1)
    dweight_CC = tl.where(i >= j, dweight_CC, 0.0)
    dsystem_CC = tl.where(i > j, dsystem_CC, 0.0)
    if DECAY:
        since_CC = decay_since(log_BNZC, chunk, C)
        dweight_CC *= since_CC
        dsystem_CC *= since_CC
    weight_CC = tl.full([C, C], 0.0, tl.float32)
    similar_CC = tl.full([C, C], 0.0, tl.float32)
    for h in range(0, H, BE):
        k_CH = load(k_BTNH + first * H, steps, N * H, H, h, C, BE)
        similar_CC += tl.dot(k_CH, tl.trans(k_CH), input_precision=PRECISION)
        if DECAY:
            q_CH = load(q_BTNH + first * H, steps, N * H, H, h, C, BE)
            weight_CC += tl.dot(q_CH, tl.trans(k_CH), input_precision=PRECISION)
    dbeta_C += tl.sum(dsystem_CC * similar_CC, 1)
    dsystem_CC = beta_C[:, None] * dsystem_CC
    if DECAY:
        # Of pairs i > j, those with j < s: then those with i >= s.
        pairs_CC = tl.where(i > j, dweight_CC * weight_CC + dsystem_CC * similar_CC, 0.0)
        earlier_CC = tl.where(i < j, 1.0, 0.0)
        up_to_CC = tl.dot(pairs_CC, earlier_CC, input_precision=PRECISION)
        tl.store(dpairs_BNZC + chunk * C + t, tl.sum(tl.where(i >= j, up_to_CC, 0.0), 0))
        tl.store(dreads_BNZC + chunk * C + t, reads_C)
        tl.store(dwrites_BNZC + chunk * C + t, writes_C)
        whole = tl.load(before_BNZC + chunk * C + C - 1)
        tl.store(dchunk_BNZ + chunk, whole * tl.sum(both_C))
    tl.store(dbeta_BTN + first + t * N, dbeta_C, t < steps)
    store(dweight_BNZCC + chunk * C * C, C, C, C, 0, dweight_CC, C, C)
    store(dsystem_BNZCC + chunk * C * C, C, C, C, 0, dsystem_CC, C, C)


@triton.jit
def key_gradient_kernel(
    q_BTNH,
    k_BTNH,
    starts_BNZHE,
    changes_BTNE,
    dout_BTNE,
    dends_BNZHE,
    dweight_BNZCC,
    dsystem_BNZCC,
    dv_BTNE,
    before_BNZC,
    after_BNZC,
    dq_BTNH,
    dk_BTNH,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BE: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, z = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = tl.program_id(2) * BE
    first = (row // N * T + z * C) * N + row % N
    chunk = row * tl.num_programs(1) + z
    steps = T - z * C
    dweight_CC = load(dweight_BNZCC + chunk * C * C, C, C, C, 0, C, C)
    dsystem_CC = load(dsystem_BNZCC + chunk * C * C, C, C, C, 0, C, C)
    q_CH = load(q_BTNH + first * H, steps, N * H, H, own, C, BE)
    k_CH = load(k_BTNH + first * H, steps, N * H, H, own, C, BE)
    dq_CH = tl.dot(dweight_CC, k_CH, input_precision=PRECISION)
    dk_CH = tl.dot(tl.trans(dweight_CC), q_CH, input_precision=PRECISION)
    # P K + P^T K in one product.
    dk_CH += tl.dot(dsystem_CC + tl.trans(dsystem_CC), k_CH, input_precision=PRECISION)
    before_C = tl.full([C], 1.0, tl.float32)
    after_C = tl.full([C], 1.0, tl.float32)
    if DECAY:
        before_C = tl.load(before_BNZC + chunk * C + tl.arange(0, C))
        after_C = tl.load(after_BNZC + chunk * C + tl.arange(0, C))
    for at in range(0, E, BE):
        rows_HE = (chunk * H + own) * E
        state_HE = load(starts_BNZHE + rows_HE, H - own, E, E, at, BE, BE)
        dstate_HE = load(dends_BNZHE + rows_HE, H - own, E, E, at, BE, BE)
        changes_CE = load(changes_BTNE + first * E, steps, N * E, E, at, C, BE)
        dout_CE = load(dout_BTNE + first * E, steps, N * E, E, at, C, BE)
        dv_CE = load(dv_BTNE + first * E, steps, N * E, E, at, C, BE)
        if DECAY:
            changes_CE *= after_C[:, None]
            dout_CE *= before_C[:, None]
            dv_CE *= before_C[:, None]
        dq_CH += tl.dot(dout_CE, tl.trans(state_HE), input_precision=PRECISION)
        dk_CH += tl.dot(changes_CE, tl.trans(dstate_HE), input_precision=PRECISION)
        dk_CH -= tl.dot(dv_CE, tl.trans(state_HE), input_precision=PRECISION)
    store(dq_BTNH + first * H, steps, N * H, H, own, dq_CH, C, BE)
    store(dk_BTNH + first * H, steps, N * H, H, own, dk_CH, C, BE)
