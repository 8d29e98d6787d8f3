"""Triton sources of the acceptance kernels: what anyone would write first, compiled for gfx950 without a GPU."""

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, c, M, N, K, sam, sbn, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C[M, N] = A[M, K] B[N, K]^T, f32 accumulation; M, N any, K a multiple of BK."""
    i, j = tl.program_id(0), tl.program_id(1)
    rm = (i * BM + tl.arange(0, BM)) % M
    rn = (j * BN + tl.arange(0, BN)) % N
    rk = tl.arange(0, BK)
    pa = a + rm[:, None] * sam + rk[None, :]
    pb = b + rk[:, None] + rn[None, :] * sbn
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(pa), tl.load(pb), acc)
        pa += BK
        pb += BK
    om = i * BM + tl.arange(0, BM)
    on = j * BN + tl.arange(0, BN)
    mask = (om[:, None] < M) & (on[None, :] < N)
    tl.store(c + om[:, None] * scm + on[None, :], acc.to(c.dtype.element_ty), mask=mask)


@triton.jit
def grouped_matmul(
    a,
    b,
    offs,
    c,
    K,
    sam,
    sbn,
    sbg,
    scm,
    G: tl.constexpr,
    N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """C[rows of g, N] = A[rows of g, K] B[g, N, K]^T; K a multiple of BK, N of BN. Programs stay: each looks through
    the groups in order and does every PROGRAMS-th tile, rows first, as Inductor's template for _grouped_mm does;
    pointers move along K and rows wrap round instead of being masked, the faster way to write its inner loop."""
    tile = tl.program_id(0)
    done = 0
    end = 0
    for g in range(G):
        start = end
        end = tl.load(offs + g)
        rows = end - start
        if rows > 0:
            tall = tl.cdiv(rows, BM)
            count = tall * tl.cdiv(N, BN)
            while tile >= done and tile < done + count:
                i, j = (tile - done) % tall, (tile - done) // tall
                om = i * BM + tl.arange(0, BM)
                on = j * BN + tl.arange(0, BN)
                rk = tl.arange(0, BK)
                pa = a + (start + om % rows)[:, None] * sam + rk[None, :]
                pb = b + g.to(tl.int64) * sbg + rk[:, None] + on[None, :] * sbn
                acc = tl.zeros((BM, BN), tl.float32)
                for _ in range(0, K, BK):
                    acc = tl.dot(tl.load(pa), tl.load(pb), acc)
                    pa += BK
                    pb += BK
                at = c + (start + om)[:, None] * scm + on[None, :]
                tl.store(at, acc.to(c.dtype.element_ty), mask=(om[:, None] < rows) & (on[None, :] < N))
                tile += PROGRAMS
            done += count


@triton.jit
def matmul_scaled(
    a, sa, b, sb, c, K, FMT: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """One BM x BN tile a program: A[M, K] B[N, K]^T with an E8M0 scale for each 32 along K; PACK values a byte."""
    i, j = tl.program_id(0), tl.program_id(1)
    n = tl.num_programs(1) * BN
    om = i * BM + tl.arange(0, BM)
    on = j * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK // PACK)
    rs = tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + om[:, None] * (K // PACK) + k // PACK + rk[None, :])
        y = tl.load(b + on[None, :] * (K // PACK) + k // PACK + rk[:, None])
        s = tl.load(sa + om[:, None] * (K // 32) + k // 32 + rs[None, :])
        t = tl.load(sb + on[:, None] * (K // 32) + k // 32 + rs[None, :])
        acc = tl.dot_scaled(x, s, FMT, y, t, FMT, acc)
    tl.store(c + om[:, None] * n + on[None, :], acc)


@triton.jit
def softmax(x, y, n, stride, B: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + row * stride + i, mask=i < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * stride + i, (e / tl.sum(e, 0)).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def layer_norm(x, w, b, y, n, eps, B: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((B,), tl.float32)
    for at in range(0, n, B):
        i = at + tl.arange(0, B)
        total += tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / n
    total = tl.zeros((B,), tl.float32)
    for at in range(0, n, B):
        i = at + tl.arange(0, B)
        d = tl.where(i < n, tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32) - mean, 0.0)
        total += d * d
    r = 1 / tl.sqrt(tl.sum(total, 0) / n + eps)
    for at in range(0, n, B):
        i = at + tl.arange(0, B)
        m = i < n
        v = (tl.load(x + row * n + i, mask=m, other=0.0).to(tl.float32) - mean) * r
        v = v * tl.load(w + i, mask=m, other=0.0) + tl.load(b + i, mask=m, other=0.0)
        tl.store(y + row * n + i, v.to(y.dtype.element_ty), mask=m)


@triton.jit
def reduce_atomic(x, total, top, n, B: tl.constexpr):
    """Sum (float) and maximum (int, of the values times 1000) of x[n], by atomics of many programs."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_add(total, tl.sum(v, 0))
    tl.atomic_max(top, tl.max((v * 1000).to(tl.int32), 0))


@triton.jit
def scan(x, y, n, B: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + row * n + i, mask=i < n, other=0.0)
    tl.store(y + row * n + i, tl.cumsum(v, 0), mask=i < n)
