"""What a quantiser should give, bit for bit: numpy, plain."""

from __future__ import annotations

import numpy as np

from flykernels.microscaling import BLOCK, FORMATS, SCALE_BIAS, SCALE_NAN, encode, packed

from .problem import QuantizeProblem


def reference(p: QuantizeProblem, x: np.ndarray) -> dict[str, np.ndarray]:
    """Outputs by name (see arguments.py) of x (M, N), any float type that holds X's numbers exactly."""
    out: dict[str, np.ndarray] = {}
    for names, wanted, lines in ((("codes", "scales"), p.rows, x), (("codes_t", "scales_t"), p.columns, x.T)):
        if wanted:
            out |= dict(zip(names, along_rows(p, np.asarray(lines, np.float64))))
    return out


def along_rows(p: QuantizeProblem, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes as bytes, scales as bytes) of blocks along the last axis of float64 x."""
    kind = p.output_type
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    finite = np.isfinite(blocks).all(-1)
    amax = np.where(finite, np.abs(np.where(np.isfinite(blocks), blocks, 0)).max(-1), 0)
    exponent = np.frexp(amax)[1] - 1 - FORMATS[kind].largest_exponent  # floor(log2 amax) - e; of zero, anything low
    if p.round_up:
        exponent = exponent + (np.ldexp(amax, -exponent) > kind.largest)
    exponent = np.where(amax == 0, -SCALE_BIAS, np.clip(exponent, -SCALE_BIAS, SCALE_BIAS))
    codes = encode(np.ldexp(np.where(finite[..., None], blocks, 0), -exponent[..., None]), kind)
    codes = np.where(finite[..., None], codes, 0).reshape(x.shape)
    scales = np.where(finite, exponent + SCALE_BIAS, SCALE_NAN).astype(np.uint8)
    return packed(codes, kind), scales
