"""What a quantiser is asked to do: bf16, fp16 or f32 to MXFP8 or MXFP4, along rows, along columns, or both at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flykernels.dtypes import DType, dtype, f4e2m1, f8e4m3fn, f8e4m3fnuz, f8e5m2
from flykernels.microscaling import BLOCK, FORMATS

INPUTS = ("bf16", "f16", "f32")
FORMAT_NAMES = tuple(d.name for d in (f8e4m3fn, f8e4m3fnuz, f8e5m2, f4e2m1))
# How a block's scale follows from its largest magnitude; see QuantizeProblem.
MODES = ("floor", "round_up")
NATIVE_E4M3 = {"gfx942": f8e4m3fnuz}  # what a GPU's matrix units take for e4m3, where it is not OCP's
LARGEST = 2**31 - 1


def native_e4m3(target: str) -> DType:
    """The e4m3 of a GPU by name: OCP's e4m3fn (largest 448) but for gfx942's e4m3fnuz (largest 240)."""
    return NATIVE_E4M3.get(target, f8e4m3fn)


@dataclass(frozen=True)
class QuantizeProblem:
    """X (M, N), row-major -> codes and one E8M0 scale for each block of 32.

    rows      blocks along rows: codes (M, N) and scales (M, N / 32)
    columns   blocks along columns, for the backward pass: codes (N, M) and scales (N, M / 32), both transposed, so that
              what is summed over lies contiguous. M is a run-time argument, then a multiple of 32
    n         columns of X; a multiple of 32 with `rows`
    dtype     of X: "bf16", "f16" or "f32"
    format    of the codes: "f8E4M3FN", "f8E5M2", "f4E2M1FN" (two a byte, first in the low half), "f8E4M3FNUZ"
    consumer  the GPU whose matrix units read the codes (default: the target of the kernel). It decides which e4m3 is
              right; the wrong one is refused, because it would clip or overflow silently
    mode      how the scale follows from the block's largest magnitude:
              "floor": 2^(floor(log2 amax) - e), e the exponent of the format's largest number: the conversion that the
              OCP Microscaling specification v1.0 states in section 6.3 (torchao's ScaleCalculationMode.FLOOR). Numbers
              above the largest after scaling (by at most 1/7 for FP8, 1/3 for FP4) saturate.
              "round_up": the least power of two with amax / scale <= the largest number, so nothing saturates
              (torchao's RCEIL, NVIDIA's recipe for MXFP8: cuBLAS, Transformer Engine). Decided exactly, where those
              divide in f32 first and may come out one step lower for amax within 2^-23 above a limit
    align_x   bytes that X's pointer and row stride are multiples of; a power of two

    Bytes that come out, in every mode: a block with a NaN or an infinity has scale 255 (NaN) and codes 0. A block of
    zeros has scale 0 (2^-127) and codes +-0. Where amax asks for a scale below 2^-127 it is 2^-127, and the codes are
    the nearest multiples of the format's least number times that. A scale above 2^127 cannot be asked for: f32's
    largest number asks for 2^126 at most. Codes are rounded to nearest, ties to even."""

    n: int
    dtype: str = "bf16"
    format: str = "f8E4M3FN"
    rows: bool = True
    columns: bool = False
    mode: str = "floor"
    consumer: str = ""
    m_hint: int = 4096
    align_x: int = 16

    @property
    def input_type(self) -> DType:
        return dtype(self.dtype)

    @property
    def output_type(self) -> DType:
        return dtype(self.format)

    @property
    def per_byte(self) -> int:
        return FORMATS[self.output_type].per_byte

    @property
    def round_up(self) -> bool:
        return self.mode == "round_up"

    def why_not(self, target) -> str | None:
        """Why no kernel of this template serves the problem on `target`, in words; None if one does."""
        for name, value, known in (
            ("dtype", self.dtype, INPUTS),
            ("format", self.format, FORMAT_NAMES),
            ("mode", self.mode, MODES),
        ):
            if value not in known:
                return f"{name} is {value!r}; kernels exist for {', '.join(known)}"
        consumer = self.consumer or target.name
        native, asked = native_e4m3(consumer), self.output_type
        if asked in (f8e4m3fn, f8e4m3fnuz) and asked != native:
            return (
                f"format is {asked.name} (largest value {asked.largest:.0f}), but {consumer} reads {native.name} "
                f"(largest value {native.largest:.0f}): the same bytes mean other numbers there. Ask for {native.name}"
            )
        if not (self.rows or self.columns):
            return "neither rows nor columns are asked for"
        if self.n < 1 or self.n > LARGEST:
            return f"N = {self.n}; kernels exist for 1 to {LARGEST}"
        if self.rows and self.n % BLOCK:
            return f"N = {self.n} is not a multiple of {BLOCK}, the numbers along a row that share a scale"
        if self.align_x < self.input_type.bytes or self.align_x & (self.align_x - 1):
            return f"align_x is {self.align_x}; a power of two, at least an element's {self.input_type.bytes} bytes"
        return None

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)
