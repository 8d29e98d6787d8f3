"""Which configurations of a scaled GEMM are worth compiling, and why the others are not."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

from flykernels.microscaling import BLOCK
from templates.gemm import space_gfx950, space_sm90a, space_x86
from templates.gemm.gfx950_config import Gfx950Config
from templates.gemm.problem import GemmProblem
from templates.gemm.sm90a_config import Sm90aConfig
from templates.gemm.space import Candidate, Dropped, Space

from . import gfx950, sm90a
from .gfx950_config import STEP, WORD, ScaledConfig
from .problem import ALIGN, ScaledGemmProblem

SUMS_BESIDE_NEXT = 64  # that leave room for a half read early and for scales
PER_UNIT = 2  # FP8 numbers in 16 bits
SHAPES = {"16x16x32": "16x16x128", "32x32x16": "32x32x64"}  # of instructions, dense and scaled


def candidates(problem: ScaledGemmProblem, target, threads: int = 1) -> Space:
    """The few configurations to try on `target` (with up to `threads` threads, on a CPU), best guess first.

    Empty `kept` where the problem is not eligible, with that reason in `dropped`. ValueError for an unknown target."""
    reason = problem.why_not(target)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    if target.name == "x86":
        return _on_x86(problem, target, threads)
    if target.name == "gfx950":
        reason = gfx950.why_not(problem)
        return Space(dropped=[Dropped(None, reason)]) if reason else _on_gfx950(problem, target)
    if target.name == "sm90a":
        reason = sm90a.why_not(problem)
        return Space(dropped=[Dropped(None, reason)]) if reason else _on_sm90a(problem, target)
    raise ValueError(f"scaled GEMM kernels exist for x86, gfx950 and sm90a, not for {target.name}")


def _on_x86(p: ScaledGemmProblem, target, threads: int) -> Space:
    """The dense kernel's panels over f32, both operands packed: that is where they are decoded."""
    dense = GemmProblem(n=p.n, k=p.k, dtype="f32", a="any", b="any", m_hint=p.m_hint)
    found = space_x86.candidates(dense, target, threads)
    space = Space(dropped=found.dropped)
    for c in found.kept:
        k_block = -(-c.config.k_block // BLOCK) * BLOCK  # a block of K begins with a block of scales
        space.kept.append(replace(c, config=replace(c.config, k_block=k_block, pack_a=True, pack_b=True)))
    if not space.kept:
        space.kept = [Candidate(replace(d.config, pack_a=True), "the only one") for d in found.dropped if d.config][:1]
    return space


def _on_gfx950(p: ScaledGemmProblem, target) -> Space:
    """The dense kernel's candidates for 16-bit operands of as many bytes: a scaled 16x16x128 instruction takes as many
    bytes and cycles as two dense 16x16x32 ones, so what bounds them is the same."""
    dense = GemmProblem(
        n=p.n,
        k=units(p),
        dtype="bf16",
        out_dtype=p.out_dtype,
        b="col",
        bias=p.bias,
        m_hint=p.m_hint,
        align_c=p.align_c,
    )
    found = space_gfx950.candidates(dense, target)
    space = Space(dropped=found.dropped)
    for c in found.kept:
        config = of_dense(p, c.config)
        reason = limit(p, config, target.limits)
        if reason is None:
            space.kept.append(replace(c, config=config))
        else:
            space.dropped.append(Dropped(config, reason))
    return space


def _on_sm90a(p: ScaledGemmProblem, target) -> Space:
    """The dense kernel's candidates for 16-bit operands of as many bytes, which take as many cycles of everything."""
    dense = GemmProblem(
        n=p.n, k=-(-p.k // PER_UNIT), dtype="bf16", out_dtype=p.out_dtype, b="col", bias=p.bias, m_hint=p.m_hint,
        align_a=p.align_a, align_b=p.align_b, align_c=p.align_c,
    )  # fmt: skip
    scaled = lambda config: replace(config, tile_k=config.tile_k * PER_UNIT)
    found = space_sm90a.candidates(dense, target, lambda config: sm90a.limit(p, scaled(config)))
    again = lambda c: replace(c, config=scaled(c.config)) if isinstance(c.config, Sm90aConfig) else c
    return Space([again(c) for c in found.kept], [again(c) for c in found.dropped])


def units(p: Any) -> int:
    """16-bit words of K numbers of the wider operand: K of the dense problem that is alike."""
    return max(p.row_bytes("a"), p.row_bytes("b")) // 2


def of_dense(p: Any, cfg: Gfx950Config) -> ScaledConfig:
    """The configuration that moves as many bytes as `cfg` does of 16-bit operands."""
    fields = {f.name: getattr(cfg, f.name) for f in dataclass_fields(cfg)}
    return ScaledConfig(**fields | {"tile_k": cfg.tile_k * p.k // units(p), "shape": SHAPES[cfg.shape]})


def limit(p: Any, cfg: ScaledConfig, limits) -> str | None:
    """The limit that a configuration runs into beyond those of the dense kernel, in words; None if it fits."""
    if cfg.tile_k % (STEP * cfg.k_waves):
        return f"K tiles of {cfg.tile_k}; whole instructions of all waves along K take {STEP * cfg.k_waves}"
    if cfg.k_waves > 1 and cfg.shape != "16x16x128":
        return "waves along K: only with instructions that take whole words of scales"
    for which, rows in (("a", cfg.part[0]), ("b", cfg.part[1])):
        if rows * cfg.bytes_of(p, which) % (ALIGN * cfg.workgroup_size):
            return f"{which.upper()}'s tile is less than one load of {ALIGN} bytes by {cfg.workgroup_size} threads"
    sums = cfg.tile_m * cfg.tile_n // cfg.workgroup_size  # a lane's
    if cfg.schedule == "eight" and p.scaling == "block" and sums > SUMS_BESIDE_NEXT:
        return f"{sums} sums a lane, scales and the next K tile's first half: more than the registers there are"
    if cfg.interleaved:
        tiles, rest = -(-p.k // cfg.tile_k), p.k % cfg.tile_k
        least = space_gfx950.LOOP_TILES + 1 if rest else space_gfx950.LOOP_TILES if sums > SUMS_BESIDE_NEXT else 1
        if tiles < least:
            return (
                f"K = {p.k} is {tiles} K tiles: with fewer than {least} their ends need more registers than there are"
            )
        shifted = rest and p.blocks % WORD
        two = cfg.steps() > 1 and sums > SUMS_BESIDE_NEXT
        if shifted and two and (tiles % 2 == 0 or rest == BLOCK):
            return f"K = {p.k} ends {rest} numbers into a K tile of two steps: shifted scales leave no registers for it"
    if cfg.lds_bytes(p) > limits.shared_bytes:
        return f"{cfg.lds_bytes(p)} bytes of LDS with scales; a workgroup has {limits.shared_bytes}"
    return gfx950.uneven(p, cfg)
