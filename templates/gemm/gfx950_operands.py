"""A gfx950 GEMM's arguments as views, and the LDS rings that bring its operands' K tiles in."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, gcd

from flykernels.lang import Kernel, View
from flykernels.lang.ring import CopiedRing, Ring
from flykernels.lang.values import maximum, minimum

from .gfx950_config import Gfx950Config, along_k, direct_bytes, swizzle
from .problem import GemmProblem


def matrix(k: Kernel, p: GemmProblem, given: dict, name: str, batch=0) -> View:
    """An argument as (rows, columns) of one batch, or a "row" bias as (columns,)."""
    align = {"a": p.align_a, "b": p.align_b}.get(name, p.align_c)
    view = replace(given[name], alignment=align, stride_multiple=max(1, align // given[name].dtype.bytes))
    if name == "bias" and p.bias == "row":
        return replace(view, shape=(p.n,), stride=(1,))
    if name == "bias":  # any strides: element by element
        view = replace(view, alignment=view.dtype.bytes, stride_multiple=1)
    shape = {"a": (given["m"], p.k), "b": (p.k, p.n)}.get(name, (given["m"], p.n))
    stride = (given.get(f"{name}_row", 1), given.get(f"{name}_col", 1))
    if not p.batched:
        return replace(view, shape=shape, stride=stride)
    whole = replace(view, shape=(given["batch"], *shape), stride=(given[f"{name}_batch"], *stride))
    return whole[batch]


def part_of_k(p: GemmProblem, cfg: Gfx950Config, view: View, rows: int, at, piece):
    """(rows, its part of K) of a workgroup's operand, and what `Ring` must know of its last K tile (None: nothing).

    view: (rows of the matrix, K); at: number of the tile along its rows; piece: of the slices of K. Slices are whole K
    tiles, the later ones one more where they do not come out even. All run as many; to some the last one is empty."""
    if p.k % (cfg.split_k * cfg.tile_k) == 0:
        return view.tile((rows, p.k // cfg.split_k), at, piece), None
    each, over = divmod(ceil(p.k / cfg.tile_k), cfg.split_k)
    start_of = lambda i: i * each + maximum(i - (cfg.split_k - over), 0)
    if cfg.split_k == 1:
        return view.tile((rows, p.k), at), None
    tiles, start = each + (over > 0), start_of(piece)
    end = minimum(start_of(piece + 1) * cfg.tile_k, p.k)
    part = view.tile((rows, cfg.tile_k), at, start)
    known = (part.known_multiple(0), cfg.tile_k)
    part = replace(part, shape=(part.shape[0], tiles * cfg.tile_k), multiple=known)
    return part, (end - (start + (tiles - 1)) * cfg.tile_k, gcd(p.k, cfg.tile_k))


def operand_ring(k: Kernel, p: GemmProblem, cfg: Gfx950Config, which: str, source: View, rows: int, last=None):
    """The ring of a (rows, K) operand: its image in LDS runs along K, or across it where memory does."""
    along, direct = 1 if along_k(p, which) else 0, direct_bytes(p)
    tile = (rows, cfg.tile_k) if along else (cfg.tile_k, rows)
    moved = swizzle(cfg.atom(p), which, rows, cfg.tile_k, bool(along))
    source = source if along else source.transposed()
    if direct:
        return Ring(k, source, tile, cfg.stages, moved, direct, along, last)
    return CopiedRing(k, source, tile, cfg.stages, moved, along, last)
