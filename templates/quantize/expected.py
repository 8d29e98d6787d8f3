"""What MX quantisation should cost on normally distributed numbers, by integration instead of by trying.

The measure is the QSNR, -10 log10(E |Q(x) - x|^2 / E |x|^2), with which Rouhani et al. compare block formats on normal
data ("With Shared Microexponents, A Little Shifting Goes a Long Way", ISCA 2023, section 3; the figures in their
"Microscaling Data Formats for Deep Learning", 2023, are of whole networks). A block's scale depends on its largest
magnitude alone; below, everything is summed over the binade that lies in: of 32 numbers all are below t with
probability F(t)^32, so E[f(x), largest in (s, t)] = G(t) F(t)^31 - G(s) F(s)^31 with G(t) = E[f(x), |x| < t].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import erf, log10, sqrt

import numpy as np

from flykernels.dtypes import DType
from flykernels.microscaling import BLOCK, FORMATS, encode, values

BINADES = range(-6, 4)  # that the largest of 32 lies in, in units of the deviation: beyond is rarer than 1e-14
POINTS = 1 << 15  # of a binade's integral


@dataclass(frozen=True)
class Moments:
    """Of normal numbers x of deviation 1 and what they become: E[Q(x)^2] and E[x Q(x)]."""

    squared: float
    crossed: float

    @property
    def error(self) -> float:
        """E[(Q(x) - x)^2]"""
        return self.squared - 2 * self.crossed + 1

    @property
    def qsnr(self) -> float:
        """In dB."""
        return -10 * log10(self.error)


@cache
def moments(dtype: DType, round_up: bool = False) -> Moments:
    """Of numbers quantised in blocks of 32 to a format, with the scales of mode "floor" or "round_up"."""
    parts = np.zeros(2)
    mantissa_most = dtype.largest / 2.0 ** FORMATS[dtype].largest_exponent
    for binade in BINADES:
        # within a binade the scale is one; with round_up it doubles where the largest number's fraction is passed
        low, high = 2.0**binade, 2.0 ** (binade + 1)
        cuts = [(low, low * mantissa_most, 0), (low * mantissa_most, high, 1)] if round_up else [(low, high, 0)]
        for least, most, more in cuts:
            scale = 2.0 ** (binade + more - FORMATS[dtype].largest_exponent)
            for t, sign in ((most, 1), (least, -1)):
                parts += sign * _below(dtype, scale, t) * erf(t / sqrt(2)) ** (BLOCK - 1)
    return Moments(*parts)


def _below(dtype: DType, scale: float, t: float) -> np.ndarray:
    """E[Q(x)^2] and E[x Q(x)] over |x| < t, with one scale: the midpoint rule."""
    x = (np.arange(POINTS) + 0.5) * (t / POINTS)
    q = values(dtype)[encode(x / scale, dtype)] * scale
    weight = 2 * np.exp(-x * x / 2) / sqrt(2 * np.pi) * (t / POINTS)
    return np.array([(q * q * weight).sum(), (x * q * weight).sum()])


def product_error(a: Moments, b: Moments) -> float:
    """Relative error, as a Frobenius norm, of a product of independent operands against the unquantised one."""
    return sqrt(a.squared * b.squared - 2 * a.crossed * b.crossed + 1)
