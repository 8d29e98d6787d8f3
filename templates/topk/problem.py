"""What a top-k selection is asked to do, and what a kernel of it is specialised for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flykernels.dtypes import DType, dtype

DTYPES = ("f32", "bf16", "f16")
CPU_DTYPES = (*DTYPES, "f64", "i64", "i32", "i16", "i8", "u8")  # all that torch.topk takes
LAYOUTS = ("last", "any")
TARGETS = ("x86", "gfx950", "sm90a")
MOST_K = 4096  # entries of 8 bytes that one workgroup's shared memory sorts
WIDEST = 16  # bytes of one load
MOST_ELEMENTS = 2**31 - 1  # an element's number in its row is a 32-bit integer


@dataclass(frozen=True)
class TopKProblem:
    """The k largest (or smallest) elements of each row, with their int64 positions, best first.

    Order is ATen's: NaN (of either sign) is greater than all else, so it comes first of the largest and last of the
    smallest; -0 equals +0. Of equal elements the one with the lower position comes first, always. Values are the
    elements themselves, bit for bit: signs of zeros and NaNs are kept.

    rows      slices along the dimension: the product of all other sizes. A run-time argument
    width     elements of a row: the dimension's size. A run-time argument
    k         results of a row, 1 <= k <= width. A run-time argument
    dtype     "f32", "bf16" or "f16"; on x86 also "f64", "i64", "i32", "i16", "i8", "u8"
    largest   else the smallest
    sorted    False: the caller takes any order. What comes out is in order all the same
    layout    "last": a row's elements are neighbours (rows, values and indices may lie any distance apart);
              "any": three strides each, (outer, along the row, inner), as a dimension in the middle has
    align     bytes that x's pointer and the distance between its rows are multiples of, at least an element's:
              from 16 on rows are read with the widest loads, so that on GPUs they have as many bytes at least

    Code depends on dtype, largest, layout, align and the configuration (see `build.kernel_key`); rows, width and k say
    which configurations fit. None of a row's bytes are read outside the row.
    """

    rows: int
    width: int
    k: int
    dtype: str = "f32"
    largest: bool = True
    sorted: bool = True
    layout: str = "last"
    align: int = 16

    @property
    def element(self) -> DType:
        return dtype(self.dtype)

    @property
    def wide(self) -> bool:
        """Whether rows begin at multiples of the widest load."""
        return self.layout == "last" and self.align % WIDEST == 0

    @property
    def short(self) -> bool:
        """Whether a row has fewer bytes than the widest load."""
        return self.width * self.element.bytes < WIDEST

    def why_not(self, target) -> str | None:
        """Why no kernel of this template serves the problem on `target`, in words; None if one does."""
        if target.name not in TARGETS:
            return f"no top-k kernel is written for {target.name}; there are {', '.join(TARGETS)}"
        dtypes = CPU_DTYPES if target.name == "x86" else DTYPES
        for name, value, known in (("dtype", self.dtype, dtypes), ("layout", self.layout, LAYOUTS)):
            if value not in known:
                return f"{name} is {value!r}; kernels exist for {', '.join(known)}"
        if self.k < 0 or self.k > self.width:
            return f"k = {self.k} of rows of {self.width} elements: selected index k out of range"
        if self.k == 0 or self.rows < 1:
            return f"{self.rows} rows, k = {self.k}: there is nothing to select"
        if self.k > MOST_K:
            return f"k = {self.k}: above {MOST_K} results a row are left to ATen"
        if self.rows * self.width > MOST_ELEMENTS:
            return f"{self.rows} rows of {self.width}: more than {MOST_ELEMENTS} elements are left to ATen"
        if self.align < self.element.bytes or self.align & (self.align - 1):
            least = self.element.bytes
            return f"align is {self.align}; it must be a power of two, and at least an element's {least} bytes"
        if self.wide and self.short and target.name != "x86":
            size = self.width * self.element.bytes
            return f"rows of {size} bytes are not read {WIDEST} at a time: align must be below {WIDEST}"
        return None

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)
