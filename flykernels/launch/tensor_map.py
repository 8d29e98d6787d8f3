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
ROOM = ctypes.c_char * (BYTES + ALIGN)
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE


def check(driver: Driver, code: CodeObject) -> None:
    """The driver's error where a code object's tensor maps are not what a driver can make."""
    given = {a.name: a.dtype for a in code.arguments if a.kind == "pointer"}
    for t in code.tensor_maps:
        name = given.get(t.of)
        if name is None or t.swizzle not in SWIZZLES or t.promotion not in PROMOTIONS:
            raise driver.error(
                f"{code.entry}: tensor map {t.name} looks through {t.of!r} with swizzle {t.swizzle} and promotion "
                f"{t.promotion}; pointers are {', '.join(given)}, swizzles {', '.join(map(str, SWIZZLES))}, promotions "
                f"{', '.join(map(str, PROMOTIONS))}"
            )
        if name not in TYPES and dtype(name).bytes != 1:
            raise driver.error(f"{code.entry}: no tensor map holds {name}; known: {', '.join(TYPES)}")


class Shaped:
    """One tensor map of one kernel for tensors of one shape: made for an address, and kept for the next launch there.

    arguments: the launch's scalar arguments. The driver's error says what is wrong with sizes or strides."""

    def __init__(self, driver: Driver, code: CodeObject, spec: TensorMap, arguments: Mapping[str, int]):
        name = next(a.dtype for a in code.arguments if a.name == spec.of)
        sizes, strides = spec.encoded(arguments)
        steps = [s * dtype(name).bytes for s in strides[1:]]
        rank = len(sizes)
        self.driver = driver
        self._doing = f"{code.entry}: tensor map {spec.name} of sizes {sizes}, strides {strides}, box {spec.box}"
        self._check(sizes, steps)
        self._before = TYPES.get(name, TYPES["u8"]), rank
        self._after = (
            (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * max(1, len(steps)))(*steps),
            (ctypes.c_uint32 * rank)(*spec.box), (ctypes.c_uint32 * rank)(*[1] * rank),
            0, SWIZZLES[spec.swizzle], PROMOTIONS[spec.promotion], 0,
        )  # fmt: skip
        self._kept: dict[int, tuple[int, Any]] = {}

    def at(self, address: int) -> tuple[int, Any]:
        """(address of the map, what keeps it alive) of the tensor at `address`."""
        made = self._kept.get(address)
        if made is None:
            if len(self._kept) >= KEPT_MOST:
                self._kept.clear()
            made = self._kept[address] = self._encode(address)
        return made

    def _encode(self, address: int) -> tuple[int, Any]:
        if address % ADDRESS_ALIGN:
            raise self._error(f"address {address:#x} is no multiple of {ADDRESS_ALIGN}")
        room = ROOM()
        at = -(-ctypes.addressof(room) // ALIGN) * ALIGN
        try:
            self.driver.call("cuTensorMapEncodeTiled", at, *self._before, address, *self._after, doing=self._doing)
        except DriverError as e:
            raise self.driver.error(f"{e}; address {address:#x}", e.status) from None
        return at, room

    def _check(self, sizes: tuple[int, ...], steps: list[int]) -> None:
        """What the driver would refuse with no more than "invalid value"."""
        if any(s % STRIDE_ALIGN or not 0 <= s < STRIDE_MOST for s in steps):
            raise self._error(f"strides of {steps} bytes must be multiples of {STRIDE_ALIGN} and below 2**40")
        if any(not 1 <= n <= SIZE_MOST for n in sizes):
            raise self._error("sizes must lie between 1 and 2**32")

    def _error(self, wrong: str) -> DriverError:
        return self.driver.error(f"{self._doing}: {wrong}", INVALID_VALUE)
