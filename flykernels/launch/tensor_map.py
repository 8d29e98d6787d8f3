"""Tensor maps (CUtensorMap), which TMA loads look through: made from a description and a launch's arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from ..codeobject import CodeObject, TensorMap
from ..dtypes import dtype
from .driver import Driver, DriverError

BYTES, ALIGN = 128, 64  # of a CUtensorMap (cuda.h)
# CUtensorMapDataType, by element; other one-byte types move as bytes.
TYPES = {"u8": 0, "i32": 3, "i64": 5, "f16": 6, "f32": 7, "bf16": 9}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # CUtensorMapL2promotion
ADDRESS_ALIGN, STRIDE_ALIGN, STRIDE_MOST, SIZE_MOST = 16, 16, 2**40, 2**32  # cuTensorMapEncodeTiled's documentation
KEPT_MOST = 1024


class Encoder:
    """One tensor map of one kernel: makes it for a launch, and keeps it for the next with the same tensor."""

    def __init__(self, driver: Driver, code: CodeObject, spec: TensorMap):
        self.driver, self.spec, self.entry = driver, spec, code.entry
        name = next((a.dtype for a in code.arguments if a.name == spec.of), None)
        if name is None or spec.swizzle not in SWIZZLES or spec.promotion not in PROMOTIONS:
            raise driver.error(
                f"{code.entry}: tensor map {spec.name} looks through {spec.of!r} with swizzle {spec.swizzle} and "
                f"promotion {spec.promotion}; arguments are {', '.join(a.name for a in code.arguments)}, swizzles "
                f"{', '.join(map(str, SWIZZLES))}, promotions {', '.join(map(str, PROMOTIONS))}"
            )
        self.bytes = dtype(name).bytes
        if name not in TYPES and self.bytes != 1:
            raise driver.error(f"{code.entry}: no tensor map holds {name}; known: {', '.join(TYPES)}")
        rank = len(spec.box)
        self._type, self._rank = TYPES.get(name, TYPES["u8"]), rank
        self._box = (ctypes.c_uint32 * rank)(*spec.box)
        self._steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        self._kept: dict[tuple, tuple[int, Any]] = {}

    def encode(self, arguments: Mapping[str, int]) -> tuple[int, Any]:
        """(address of the map, what keeps it alive) for a launch's arguments. The driver's error says what is wrong
        with address, sizes or strides."""
        address = arguments[self.spec.of]
        sizes, strides = self.spec.encoded(arguments)
        key = (address, sizes, strides)
        made = self._kept.get(key)
        if made is None:
            if len(self._kept) >= KEPT_MOST:
                self._kept.clear()
            made = self._kept[key] = self._encode(address, sizes, strides)
        return made

    def _encode(self, address: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, Any]:
        room = ctypes.create_string_buffer(BYTES + ALIGN)
        at = -(-ctypes.addressof(room) // ALIGN) * ALIGN
        steps = [s * self.bytes for s in strides[1:]]
        doing = f"{self.entry}: tensor map {self.spec.name} of sizes {sizes}, strides {strides}, box {self.spec.box}"
        wrong = self._wrong(address, sizes, steps)
        if wrong:
            raise self.driver.error(f"{doing}: {wrong}", 1)
        try:
            self.driver.call(
                "cuTensorMapEncodeTiled", at, self._type, self._rank, address,
                (ctypes.c_uint64 * self._rank)(*sizes), (ctypes.c_uint64 * max(1, len(steps)))(*steps),
                self._box, self._steps, 0, SWIZZLES[self.spec.swizzle], PROMOTIONS[self.spec.promotion], 0, doing=doing,
            )  # fmt: skip
        except DriverError as e:
            raise self.driver.error(f"{e}; address {address:#x}", e.status) from None
        return at, room

    def _wrong(self, address: int, sizes: tuple[int, ...], steps: list[int]) -> str:
        """What the driver would refuse with no more than "invalid value"; "" if nothing."""
        if address % ADDRESS_ALIGN:
            return f"address {address:#x} is no multiple of {ADDRESS_ALIGN}"
        if any(s % STRIDE_ALIGN or not 0 <= s < STRIDE_MOST for s in steps):
            return f"strides of {steps} bytes must be multiples of {STRIDE_ALIGN} and below 2**40"
        if any(not 1 <= n <= SIZE_MOST for n in sizes):
            return "sizes must lie between 1 and 2**32"
        return ""
