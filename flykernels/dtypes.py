"""Element types, each once: bits, range, packing, MLIR and torch names.

`float8_e4m3fn` (OCP, gfx950 and NVIDIA: largest value 448) and `float8_e4m3fnuz` (gfx942: largest value 240, no
infinity, NaN only as 0x80) are different types: taking one for the other clips silently. Ranges: OCP Microscaling
Formats specification v1.0 and IEEE 754-2019.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """One element type.

    name      ours; MLIR's too, but for integers whose signedness the name tells
    bits      of one element; types under 8 bits are packed two to a byte, low half first
    is_float  else an integer
    signed    whether an integer may be negative: says how it is compared, divided, shifted and widened (lang.values)
    torch     torch's name (None: torch has no such type)
    mantissa  explicit mantissa bits; rounding to nearest errs by at most 2**-(mantissa + 1) relatively
    largest   largest finite value
    """

    name: str
    bits: int
    is_float: bool
    torch: str | None = None
    mantissa: int = 0
    largest: float = 0.0
    signed: bool = False

    @property
    def mlir(self) -> str:
        """MLIR's name of the type. Its integers have no sign, so `u32` and `i32` are both "i32" there."""
        return self.name if self.is_float or self.signed else f"i{self.bits}"

    @property
    def bytes(self) -> int:
        """Bytes an element takes where it stands alone; types under 8 bits count as one."""
        return max(1, self.bits // 8)

    @property
    def epsilon(self) -> float:
        """Largest relative error of rounding to this type to nearest."""
        return 2.0 ** -(self.mantissa + 1)

    def __repr__(self) -> str:
        return self.name


f64 = DType("f64", 64, True, "float64", 52, (2 - 2**-52) * 2.0**1023)
f32 = DType("f32", 32, True, "float32", 23, (2 - 2**-23) * 2.0**127)
f16 = DType("f16", 16, True, "float16", 10, 65504.0)
bf16 = DType("bf16", 16, True, "bfloat16", 7, (2 - 2**-7) * 2.0**127)
f8e4m3fn = DType("f8E4M3FN", 8, True, "float8_e4m3fn", 3, 448.0)
f8e4m3fnuz = DType("f8E4M3FNUZ", 8, True, "float8_e4m3fnuz", 3, 240.0)
f8e5m2 = DType("f8E5M2", 8, True, "float8_e5m2", 2, 57344.0)
f8e8m0 = DType("f8E8M0FNU", 8, True, "float8_e8m0fnu", 0, 2.0**127)
f4e2m1 = DType("f4E2M1FN", 4, True, "float4_e2m1fn_x2", 1, 6.0)
i1 = DType("i1", 1, False, "bool", largest=1)
u8 = DType("u8", 8, False, "uint8", largest=2**8 - 1)
u32 = DType("u32", 32, False, "uint32", largest=2**32 - 1)
u64 = DType("u64", 64, False, "uint64", largest=2**64 - 1)
i8 = DType("i8", 8, False, "int8", largest=2**7 - 1, signed=True)
i16 = DType("i16", 16, False, "int16", largest=2**15 - 1, signed=True)
i32 = DType("i32", 32, False, "int32", largest=2**31 - 1, signed=True)
i64 = DType("i64", 64, False, "int64", largest=2**63 - 1, signed=True)

ALL = (f64, f32, f16, bf16, f8e4m3fn, f8e4m3fnuz, f8e5m2, f8e8m0, f4e2m1, i1, u8, u32, u64, i8, i16, i32, i64)
_BY_NAME = {d.name: d for d in ALL} | {d.torch: d for d in ALL if d.torch}


def dtype(name: str) -> DType:
    """The type with our or torch's name ("bf16", "bfloat16", "torch.bfloat16"). ValueError if there is none."""
    try:
        return _BY_NAME[str(name).removeprefix("torch.")]
    except KeyError:
        raise ValueError(
            f"{name!r} is not an element type of this project; known: {', '.join(sorted(_BY_NAME))}"
        ) from None
