"""The arithmetic of sm_90a's quantisers, run on the CPU: the same text, lowered for x86, number by number.

What this CPU has no instruction for is spelled out: a permutation of bytes, and arithmetic on 16-bit floats by way of
f32, which holds their products; the sums' codes change nowhere near where f32 would round them differently."""

from __future__ import annotations

import numpy as np
import pytest

from flykernels.dtypes import bf16, f4e2m1, f8e4m3fn, f8e5m2, f16, f32, i8, i16, i32
from flykernels.lang import Global
from flykernels.lang.microscaling import encoded, power_of_two, rounded_to_odd, scale_of, scales_of_bf16
from flykernels.lang.values import Value, absolute, fma, vector_of
from flykernels.microscaling import FORMATS, encode
from flykernels.targets import sm90a_fp4, sm90a_fp8
from tests.gemm.gfx950_case import decode
from tests.gemm.gfx950_case import encode as stored
from tests.lang.host import run

EACH = 8  # numbers a word
FORMAT = pytest.mark.parametrize("format", (f4e2m1, f8e4m3fn, f8e5m2), ids=str)
ROUND_UP = pytest.mark.parametrize("round_up", (False, True), ids=("floor", "ceil"))


@pytest.fixture
def spelled_out(monkeypatch):
    def permuted(a: Value, b: Value, which: int) -> Value:
        """PTX's prmt.b32: byte i of the result is the byte of (a, b) that digit i names; digits from 8 on, its sign."""
        of_both = vector_of([a, b]).bitcast(i8, 8)
        digits = [which >> (4 * i) & 15 for i in range(4)]
        return vector_of([of_both[d & 7] >> 7 if d & 8 else of_both[d] for d in digits]).bitcast(i32)

    def by_f32(*x: Value | float) -> list[Value]:
        return [v.to(f32) if isinstance(v, Value) else v for v in x]

    def multiply_add(a: Value, b: Value, c: Value) -> Value:
        return fma(*by_f32(a, b, c)).to(a.dtype)

    def scaled(x: Value, factor: Value) -> Value:
        size, by = by_f32(x, factor)
        return (absolute(size) * by).to(x.dtype)

    def pair(x: Value, dtype) -> Value:
        first, second = (encoded(x[i].to(f32), dtype).to(i16) for i in range(2))
        return first | second << 8

    monkeypatch.setattr(sm90a_fp8, "_pair", pair)
    monkeypatch.setattr(sm90a_fp4, "_bytes", permuted)
    monkeypatch.setattr(sm90a_fp4, "fma", multiply_add)
    monkeypatch.setattr(sm90a_fp4, "_scaled", scaled)


def mapped(f, given: list[tuple], found: list[tuple]) -> list[np.ndarray]:
    """f of each row of given arrays, (type, (n, width)): arrays of what it finds, (type, width)."""
    n = len(given[0][1])
    out = [np.zeros((n, width), {16: np.uint16, 32: np.uint32}[dtype.bits]) for dtype, width in found]

    def kernel(k, p, c):
        sides = [(t, a.shape[1]) for t, a in given] + found
        views = list(k.args(**{f"v{i}": Global(t, (n, width)) for i, (t, width) in enumerate(sides)}))

        @k.loop(0, n)
        def _(i):
            rows = [v.at(i, 0).get(0, 0, width=a.shape[1]) for v, (_, a) in zip(views, given)]
            for v, got in zip(views[len(given) :], f(*rows), strict=True):
                v.at(i, 0).put(got, 0, 0)

    run(kernel, *(np.ascontiguousarray(a) for _, a in given), *out)
    return out


def cut(bits: np.ndarray) -> np.ndarray:
    """f32 bits rounded to odd to bf16."""
    return (bits >> 16 | (bits & 0xFFFF != 0)).astype(np.uint16)


def of_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def tricky() -> np.ndarray:
    """f32 bits, eight a row: around each bf16 number and halfway to the next, and numbers of the whole range."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    near = (upper[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    return np.concatenate([near, np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)]).reshape(-1, EACH)


def test_rounded_to_odd():
    """Every f32 that matters, NaN and infinity among them."""
    bits = tricky()
    (got,) = mapped(lambda x: [rounded_to_odd(x)], [(f32, bits)], [(bf16, EACH)])
    assert (got == cut(bits)).all()
    nan = lambda x: (x & np.array(0x7FFFFFFF, x.dtype)) > 0x7F800000
    assert (nan(got.astype(np.uint32) << 16) == nan(bits)).all()


@ROUND_UP
def test_codes_and_scales_of_f32_are_those_of_its_odd_bf16(round_up):
    """FP4's, of each number as the largest of a block and as one of a larger or smaller one: also of subnormal ones."""
    bits = tricky() & 0x7FFFFFFF
    bits = bits[(bits < 0x7F800000).all(1)]
    take = lambda x: scale_of(x, f4e2m1, round_up)
    byte, exponent = mapped(take, [(i32, bits)], [(i32, EACH)] * 2)
    odd = cut(bits)
    byte16, exponent16 = mapped(lambda x: scales_of_bf16(x, f4e2m1, round_up), [(i16, odd)], [(i16, EACH)] * 2)
    assert (byte == byte16).all() and (exponent == exponent16).all()
    for more in range(4):
        factor = 2.0 ** (exponent.astype(np.float64) - 127 - more)
        exact = bits.view(np.float32).astype(np.float64) * factor
        assert (encode(exact, f4e2m1) == encode(of_bf16(odd) * factor, f4e2m1)).all()


@FORMAT
@ROUND_UP
def test_scales_of_bf16_are_those_of_f32(format, round_up):
    """Of all magnitudes that are finite; what is not spoils none beside it."""
    bits = np.arange(1 << 15, dtype=np.uint16).reshape(-1, EACH)
    take = lambda x: scale_of(x, format, round_up)
    byte, exponent = mapped(take, [(i32, bits.astype(np.uint32) << 16)], [(i32, EACH)] * 2)
    beside = bits.copy()
    beside[:, ::2] = 0x7FFF
    for given, which in ((bits, slice(None)), (beside, slice(1, None, 2))):
        got = mapped(lambda x: scales_of_bf16(x, format, round_up), [(i16, given)], [(i16, EACH)] * 2)
        finite = (given < 0x7F80)[:, which]
        for a, b in zip(got, (byte, exponent), strict=True):
            assert (a[:, which][finite] == b[:, which][finite]).all()


def test_powers_of_f16_come_in_two_parts():
    """first * second is the power, for all that blocks of f16 have; slopes are 2, 1 and FLAT times the second."""
    exponent = np.arange(1, 255, dtype=np.uint16).repeat(2).reshape(-1, 2)
    exponent[:, 1] = exponent[::-1, 0]  # any two beside each other
    got = mapped(sm90a_fp4.factors_of_f16, [(i16, exponent)], [(f16, 2)] * 4)
    first, *slopes = (g.view(np.float16).astype(np.float64) for g in got)
    power = 2.0 ** (exponent.astype(np.float64) - 127)
    here = (power >= 2.0**-14) & (power <= 2.0**29)
    for got_slope, (slope, _) in zip(slopes, sm90a_fp4.LINES[f16], strict=True):
        want = (power * slope)[here]
        assert np.allclose((first * got_slope)[here], want, rtol=2.0**-11, atol=0)
        assert (got_slope > 0).all() and np.isfinite(got_slope).all()
    assert (first[here] * slopes[1][here] == power[here]).all()


def blocks(kind) -> tuple[np.ndarray, np.ndarray]:
    """(bits, eight a row; exponents of powers of two that leave them below 8): all numbers, both signs, each under the
    powers that their block might have if it were one of the eight largest binades in it."""
    last = 0x7F80 if kind == bf16 else 0x7C00
    positive = np.arange(last, dtype=np.uint16)
    bits = np.concatenate([positive, positive | 0x8000]).reshape(-1, EACH)
    largest = np.abs(decode(bits, kind.name)).max(1)
    exponent = np.frexp(np.maximum(largest, 2.0**-149))[1]  # largest < 2^exponent
    every = [(bits, 127 + 3 - exponent - more) for more in range(8)]
    bits, power = np.concatenate([b for b, _ in every]), np.concatenate([p for _, p in every])
    some = (power >= (1 if kind == bf16 else 127 - 14)) & (power <= (254 if kind == bf16 else 127 + 29))
    return bits[some], power[some].astype(np.uint16)


def factors(kind, exponent: Value) -> tuple[Value, ...]:
    return (power_of_two(exponent),) if kind == bf16 else sm90a_fp4.factors_of_f16(exponent)


@pytest.mark.parametrize("kind", (bf16, f16), ids=str)
def test_codes_along_and_down(kind, spelled_out):
    """Every finite number's code, eight of a row and eight of a column, beside columns of other powers."""
    bits, power = blocks(kind)
    want = encode(decode(bits, kind.name) * 2.0 ** (power[:, None].astype(np.float64) - 127), f4e2m1)
    want = (want.astype(np.uint32) << (4 * np.arange(EACH, dtype=np.uint32))).sum(1, dtype=np.uint32)

    def along(x, exponent):
        return (sm90a_fp4.along(x, tuple(f[0] for f in factors(kind, exponent))),)

    (got,) = mapped(along, [(kind, bits), (i16, power[:, None].repeat(2, 1))], [(i32, 1)])
    assert (got[:, 0] == want).all()

    def down(first, second, exponent):
        rows = [vector_of([first[i], second[i]]) for i in range(EACH)]
        return (vector_of(list(sm90a_fp4.down(rows, factors(kind, exponent)))),)

    other = np.random.default_rng(1).permutation(len(bits))
    pairs = np.stack([power, power[other]], 1)
    (got,) = mapped(down, [(kind, bits), (kind, bits[other]), (i16, pairs)], [(i32, 2)])
    assert (got == np.stack([want, want[other]], 1)).all()


def blocks_of_f16(format, round_up: bool) -> tuple[np.ndarray, np.ndarray]:
    """(bits, four a row; exponents biased by 127 of a block's power): all numbers and both signs under every power that
    a block they are in may ask for."""
    positive = np.arange(0x7C00, dtype=np.uint16)
    size = decode(positive, "f16")
    found = []
    for largest in range(-24, 16):  # the exponent of the block's largest number
        for halved in range(1 + round_up):  # where it would be beyond the format's largest
            inside = size < 2.0 ** (largest + 1)
            bits = positive[inside]
            bits = np.concatenate([bits, bits | 0x8000, np.zeros(-2 * len(bits) % 4, np.uint16)]).reshape(-1, 4)
            power = 127 + FORMATS[format].largest_exponent - largest - halved
            found.append((bits, np.full(len(bits), power, np.uint16)))
    return tuple(np.concatenate(a) for a in zip(*found, strict=True))


@pytest.mark.parametrize(("format", "round_up"), [(f8e4m3fn, False), (f8e4m3fn, True), (f8e5m2, False)], ids=str)
def test_f16_scaled_as_f16_has_fp8s_codes(format, round_up, spelled_out):
    """Along and down, by three factors, and by the first where it is said to be enough."""
    assert sm90a_fp8.takes_f16(format, round_up) and not sm90a_fp8.takes_f16(f8e5m2, True)
    bits, power = blocks_of_f16(format, round_up)
    want = encode(decode(bits, "f16") * 2.0 ** (power[:, None].astype(np.float64) - 127), format)
    want = (want.astype(np.uint32) << (8 * np.arange(4, dtype=np.uint32))).sum(1, dtype=np.uint32)

    def along(x, exponent):
        factors = tuple(f[0] for f in sm90a_fp8.factors_of_f16(exponent))
        words = [sm90a_fp8.along(x, some, format)[0] for some in (factors, factors[:1])]
        return (vector_of([*words, sm90a_fp8.first_alone(exponent).to(i32)]),)

    (got,) = mapped(along, [(f16, bits), (i16, power[:, None].repeat(2, 1))], [(i32, 3)])
    whole, by_first, alone = got.T
    assert (whole == want).all()
    assert (by_first == want)[alone != 0].all() and 0 < (alone != 0).sum() < len(alone)

    def down(first, second, exponent):
        rows = [vector_of([first[i], second[i]]) for i in range(4)]
        return (vector_of([w[0] for w in sm90a_fp8.down(rows, sm90a_fp8.factors_of_f16(exponent), format)]),)

    other = np.random.default_rng(1).permutation(len(bits))
    pairs = np.stack([power, power[other]], 1)
    (got,) = mapped(down, [(f16, bits), (f16, bits[other]), (i16, pairs)], [(i32, 2)])
    assert (got == np.stack([want, want[other]], 1)).all()


def test_when_the_first_factor_is_enough():
    """Where all blocks' powers are f16's normal ones: not of blocks of zeros, nor of what is not finite."""
    exponent = np.arange(256, dtype=np.uint16)
    for beside in (127, 0, 254):
        pairs = np.stack([exponent, np.full(256, beside, np.uint16)], 1)
        (got,) = mapped(lambda x: (vector_of([sm90a_fp8.first_alone(x).to(i32)]),), [(i16, pairs)], [(i32, 1)])
        within = (exponent >= 127 - 14) & (exponent <= 127 + 15) & (beside == 127)
        assert ((got[:, 0] != 0) == within).all()
    for largest in (0x7F80, 0x7FC0, 0x7FFF):  # infinity and NaN as `scales_of_bf16` takes them
        for format in (f8e4m3fn, f8e5m2):
            for round_up in (False, True):
                bits = np.full((1, 2), largest, np.uint16)
                find = lambda x: (scales_of_bf16(x, format, round_up)[1],)
                ((exponent,),) = mapped(find, [(i16, bits)], [(i16, 2)])
                assert (exponent < 127 - 14).all()


def test_formats_have_the_bits_that_odd_rounding_asks_for():
    """FP4's numbers and ties in the finest block are multiples of bf16's least step; FP8's are not."""
    least = {f: 2.0**-127 * 2.0 ** (FORMATS[f].least_exponent - f.mantissa) / 4 for f in (f4e2m1, f8e4m3fn, f8e5m2)}
    step = float(decode(np.array([1], np.uint16), "bf16")[0])
    assert step <= least[f4e2m1] and step > least[f8e4m3fn] > least[f8e5m2]
    assert stored(np.array([step]), "bf16")[0] == 1
