"""Arguments -> the kernarg segment and the registers that a wave starts with.

Source: LLVM's "User Guide for AMDGPU Backend": kernarg layout in the metadata, hidden arguments of code object V5, AQL
dispatch packet, order of user and system SGPRs, packed work-item ids on gfx90a and later.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .asm import EXEC
from .errors import BadArguments
from .kernel import USER_SGPRS, KernelArgument, KernelInfo
from .memory import Memory, as_array, place
from .state import LANE, LANES, POISON, Group, pack_mask


class Launch:
    """A kernel's arguments in simulated memory, and how its waves start.

    `copy_back()` writes the results into the caller's arrays.
    """

    def __init__(
        self, kernel: KernelInfo, args: Sequence[Any], grid: tuple[int, int, int], block: tuple[int, int, int],
        outputs: set[int] | None,
    ):  # fmt: skip
        self.kernel, self.grid, self.block = kernel, grid, block
        self.memory = Memory()
        explicit = kernel.explicit
        if len(args) != len(explicit):
            kinds = ", ".join(f"{a.name or a.kind}:{a.size}" for a in explicit)
            raise BadArguments(f"{kernel.name} takes {len(explicit)} arguments ({kinds}); {len(args)} were given")
        buffers = [(k, pair) for k, a in enumerate(args) if (pair := as_array(a)) is not None]
        positions = {k: n for n, (k, _) in enumerate(buffers)}
        wanted = None if outputs is None else {positions[k] for k in outputs if k in positions}
        if outputs is not None and (bad := [k for k in outputs if k not in positions]):
            raise BadArguments(f"outputs={sorted(outputs)}: argument {bad[0]} is not a buffer")
        addresses, self.copy_back = place(self.memory, [pair for _, pair in buffers], wanted)
        self._name_allocations(buffers, explicit, args)
        # Whole 64-byte lines: LLVM widens aligned scalar loads of arguments; they read past the end but not past a
        # line.
        block_bytes = bytearray(max(64, -(-kernel.kernarg_size // 64) * 64))
        for k, (value, arg) in enumerate(zip(args, explicit, strict=True)):
            raw = addresses[positions[k]] if k in positions else value
            block_bytes[arg.offset : arg.offset + arg.size] = pack(kernel.name, k, arg, raw, k in positions)
        for arg in kernel.arguments:
            if arg.hidden:
                value = self._hidden(arg)
                block_bytes[arg.offset : arg.offset + arg.size] = value.to_bytes(arg.size, "little")
        self.kernarg = self.memory.add(
            "the kernel arguments", np.frombuffer(bytes(block_bytes), np.uint8), writable=False
        )
        self.packet = self.memory.add("the dispatch packet", self._packet(), writable=False)
        self.queue = self.memory.add("the queue", np.zeros(256, np.uint8), writable=False)

    def _name_allocations(self, buffers, explicit, args) -> None:
        for allocation in self.memory.allocations:
            words = allocation.name.split(" = ")
            names = []
            for w in words:
                k = buffers[int(w.split()[1])][0]
                given = explicit[k].name
                names.append(f"argument {k}" + (f" ({given})" if given else ""))
            allocation.name = " = ".join(names)

    def _hidden(self, arg: KernelArgument) -> int:
        axis = "xyz".find(arg.kind[-1])
        if arg.kind.startswith("hidden_block_count_"):
            return self.grid[axis]
        if arg.kind.startswith("hidden_group_size_"):
            return self.block[axis]
        if arg.kind.startswith(("hidden_remainder_", "hidden_global_offset_")):
            return 0
        if arg.kind == "hidden_grid_dims":
            return max(1, sum(n > 1 for n in self.grid))
        return 0

    def _packet(self) -> np.ndarray:
        """hsa_kernel_dispatch_packet: header, setup, workgroup sizes, grid sizes in work-items."""
        items = [g * b for g, b in zip(self.grid, self.block, strict=True)]
        raw = struct.pack("<HH3HH3I", 0, 3, *self.block, 0, *items)
        return np.frombuffer(raw.ljust(64, b"\0"), np.uint8)

    # -- registers
    def start(self, g: Group, group_ids: list[tuple[int, int, int]]) -> None:
        """Sets the initial registers of a group of waves. Those that the launch does not set hold poison, as hardware
        leaves there what other kernels did: a kernel that needs them to be 0 must come out wrong."""
        kernel, s = self.kernel, 0
        g.V[...] = POISON
        g.S[:EXEC] = int(POISON)
        values = {
            "dispatch_ptr": self.packet.base,
            "queue_ptr": self.queue.base,
            "kernarg_segment_ptr": self.kernarg.base,
        }
        for flag, count in USER_SGPRS:
            if flag in kernel.user:
                value = values.get(flag, 0)
                for k in range(count):
                    g.S[s + k] = value >> 32 * k & 0xFFFFFFFF if k < 2 else 0
                s += count
        first, count = kernel.preload
        if count:
            words = self.kernarg.words(4)
            for k in range(count):
                g.S[s + k] = int(words[first + k]) if 4 * (first + k) < self.kernarg.size else 0
            s += count
        s = max(s, kernel.user_sgprs)
        ids = np.array(group_ids, np.int64)[g.workgroup]
        for axis in range(3):
            if kernel.group_ids[axis]:
                g.S[s] = ids[:, axis]
                s += 1
        if kernel.workgroup_info:
            s += 1
        item = g.local[:, None] * LANES + LANE
        bx, by, _ = self.block
        x, y, z = item % bx, item // bx % by, item // (bx * by)
        g.V[0] = x | (y << 10 if kernel.item_ids >= 1 else 0) | (z << 20 if kernel.item_ids >= 2 else 0)
        size = self.block[0] * self.block[1] * self.block[2]
        if size % LANES:
            g.exec = item < size
            g.S[EXEC], g.S[EXEC + 1] = pack_mask(g.exec)
            g.refresh_exec()
        if kernel.scratch_bytes:
            words = np.full((g.n, LANES, -(-kernel.scratch_bytes // 4)), POISON)
            g.scratch = words.view(np.uint8)[..., : kernel.scratch_bytes].copy()


def pack(kernel: str, k: int, arg: KernelArgument, value: Any, is_buffer: bool) -> bytes:
    """One explicit argument as bytes of its size. BadArguments if kind or size does not fit."""
    pointer = arg.kind in ("global_buffer", "dynamic_shared_pointer", "image", "sampler", "pipe", "queue")
    what = f"{kernel}: argument {k}{f' ({arg.name})' if arg.name else ''}"
    if pointer:
        if is_buffer or (isinstance(value, (int, np.integer)) and arg.size == 8):
            if not 0 <= int(value) < 1 << 64:
                raise BadArguments(f"{what} is a pointer; {value} is no address")
            return int(value).to_bytes(8, "little")
        raise BadArguments(
            f"{what} is a pointer; {type(value).__name__} was given: pass an array, or an address as int"
        )
    if is_buffer:
        if arg.size == 8:  # a pointer passed by value, as in a struct of pointers
            return int(value).to_bytes(8, "little")
        raise BadArguments(f"{what} is a {arg.size}-byte value; an array was given")
    if isinstance(value, (bytes, bytearray)):
        raw = bytes(value)
    elif isinstance(value, (bool, np.bool_)):
        raw = int(value).to_bytes(arg.size, "little")
    elif isinstance(value, np.generic):
        raw = value.tobytes()
    elif isinstance(value, int):
        bits = 8 * arg.size
        if not -(1 << (bits - 1)) <= value < 1 << bits:
            raise BadArguments(f"{what} has {arg.size} bytes; {value} does not fit")
        raw = (value & ((1 << bits) - 1)).to_bytes(arg.size, "little")
    elif isinstance(value, float):
        form = {2: "<e", 4: "<f", 8: "<d"}.get(arg.size)
        if form is None:
            raise BadArguments(f"{what} has {arg.size} bytes: no float type is that long")
        try:
            raw = struct.pack(form, value)
        except OverflowError:
            raise BadArguments(f"{what} has {arg.size} bytes; {value} is beyond their largest float") from None
    else:
        raise BadArguments(f"{what}: cannot pass a {type(value).__name__}")
    if len(raw) != arg.size:
        raise BadArguments(f"{what} has {arg.size} bytes; a value of {len(raw)} was given")
    return raw


CopyBack = Callable[[], None]
