"""Atomics of memory and LDS: every operation against a plain model, lane after lane; and what they race with."""

import struct

import numpy as np
import pytest

from .asm_kernel import POINTER, kinds, run, words

SLOTS = 4


def s32(x):
    return x - 2**32 if x >> 31 else x


def s64(x):
    return x - 2**64 if x >> 63 else x


def f32(f):
    unpack = lambda x: struct.unpack("<f", struct.pack("<I", x))[0]
    return lambda old, x, y: struct.unpack("<I", struct.pack("<f", f(unpack(old), unpack(x))))[0]


def f64(f):
    unpack = lambda x: struct.unpack("<d", struct.pack("<Q", x))[0]
    return lambda old, x, y: struct.unpack("<Q", struct.pack("<d", f(unpack(old), unpack(x))))[0]


def halves(old, x, y):
    sums = [np.uint32(old >> k & 0xFFFF).astype(np.uint16).view(np.float16) +
            np.uint32(x >> k & 0xFFFF).astype(np.uint16).view(np.float16) for k in (0, 16)]  # fmt: skip
    return int(sums[0].view(np.uint16)) | int(sums[1].view(np.uint16)) << 16


PLAIN = {  # name -> (memory's mnemonic, LDS's mnemonic, f(old, x, y)), 32 and 64 bits
    "add": ("add", "add_u", lambda o, x, y: o + x),
    "sub": ("sub", "sub_u", lambda o, x, y: o - x),
    "rsub": (None, "rsub_u", lambda o, x, y: x - o),
    "and": ("and", "and_b", lambda o, x, y: o & x),
    "or": ("or", "or_b", lambda o, x, y: o | x),
    "xor": ("xor", "xor_b", lambda o, x, y: o ^ x),
    "umin": ("umin", "min_u", lambda o, x, y: min(o, x)),
    "umax": ("umax", "max_u", lambda o, x, y: max(o, x)),
    "inc": ("inc", "inc_u", lambda o, x, y: 0 if o >= x else o + 1),
    "dec": ("dec", "dec_u", lambda o, x, y: x if o == 0 or o > x else o - 1),
    "swap": ("swap", "wrxchg_b", lambda o, x, y: x),
}
CASES = []  # (mnemonic, bytes, f, data operands)
for memory, lds, f in PLAIN.values():
    for size, suffix in ((4, ""), (8, "_x2")):
        if memory:
            CASES.append((f"global_atomic_{memory}{suffix}", size, f, 1))
        name, kind = lds.rsplit("_", 1)
        CASES.append((f"ds_{name}_rtn_{kind}{8 * size}", size, f, 1))
for size, sign in ((4, s32), (8, s64)):
    least = lambda o, x, y, sign=sign: min(o, x, key=sign)
    most = lambda o, x, y, sign=sign: max(o, x, key=sign)
    suffix = "_x2" if size == 8 else ""
    CASES += [(f"global_atomic_smin{suffix}", size, least, 1), (f"global_atomic_smax{suffix}", size, most, 1)]
    CASES += [(f"ds_min_rtn_i{8 * size}", size, least, 1), (f"ds_max_rtn_i{8 * size}", size, most, 1)]
    CASES.append((f"ds_cmpst_rtn_b{8 * size}", size, lambda o, x, y: y if o == x else o, 2))
    CASES.append((f"ds_mskor_rtn_b{8 * size}", size, lambda o, x, y: o & ~x | y, 2))
CASES += [
    ("global_atomic_cmpswap", 4, lambda o, x, y: x if o == y else o, 2),
    ("ds_wrap_rtn_b32", 4, lambda o, x, y: o - x if o >= x else o + y, 2),
    ("global_atomic_add_f32", 4, f32(lambda a, b: float(np.float32(a) + np.float32(b))), 1),
    ("ds_add_rtn_f32", 4, f32(lambda a, b: float(np.float32(a) + np.float32(b))), 1),
    ("ds_min_rtn_f32", 4, f32(min), 1),
    ("ds_max_rtn_f32", 4, f32(max), 1),
    ("global_atomic_add_f64", 8, f64(lambda a, b: a + b), 1),
    ("global_atomic_min_f64", 8, f64(min), 1),
    ("global_atomic_max_f64", 8, f64(max), 1),
    ("ds_add_rtn_f64", 8, f64(lambda a, b: a + b), 1),
    ("global_atomic_pk_add_f16", 4, halves, 1),
    ("ds_pk_add_rtn_f16", 4, halves, 1),
]

BODY = """
s_load_dwordx8 s[4:11], s[0:1], 0x0
v_and_b32 v1, {slots}, v0
v_lshlrev_b32 v1, {shift}, v1
v_lshlrev_b32 v2, {shift}, v0
s_waitcnt lgkmcnt(0)
{load} v[4:5], v2, s[6:7]
{load} v[6:7], v2, s[8:9]
s_waitcnt vmcnt(0)
{body}
{store} v2, v[8:9], s[10:11]
"""
THROUGH_LDS = """
{load} v[10:11], v1, s[4:5]
s_waitcnt vmcnt(0)
ds_write_b{bits} v1, v[10:11]
{atomic}
s_waitcnt lgkmcnt(0)
ds_read_b{bits} v[10:11], v1
s_waitcnt lgkmcnt(0)
{store} v1, v[10:11], s[4:5]
"""


@pytest.mark.parametrize(("name", "size", "f", "data"), CASES, ids=[c[0] for c in CASES])
def test_atomic(name, size, f, data):
    r, wide = np.random.default_rng(0), size == 8
    raw = np.uint64 if wide else np.uint32
    if "_f" in name and "f16" not in name:
        draw = lambda n: r.standard_normal(n).astype(np.float64 if wide else np.float32).view(raw)
    elif "f16" in name:
        draw = lambda n: r.standard_normal(2 * n).astype(np.float16).view(np.uint32)
    else:
        draw = lambda n: np.where(r.random(n) < 0.5, r.integers(0, 5, n), r.integers(0, 2**63, n) * 2 + 1).astype(raw)
    memory, x, y, out = draw(SLOTS), draw(64), draw(64), np.zeros(64, raw)
    x[::9] = memory[0]  # so that comparisons are met
    y[::9] = memory[0]
    want, back = memory.copy().tolist(), []
    for lane in range(64):
        old = want[lane % SLOTS]
        back.append(old)
        want[lane % SLOTS] = f(old, int(x[lane]), int(y[lane])) & (2 ** (8 * size) - 1)
    pick = lambda text: text if wide else text.replace("v[4:5]", "v4").replace("v[6:7]", "v6").replace(
        "v[8:9]", "v8").replace("v[10:11]", "v10")  # fmt: skip
    form = {"load": f"global_load_dword{'x2' if wide else ''}", "store": f"global_store_dword{'x2' if wide else ''}",
            "bits": 8 * size, "slots": SLOTS - 1, "shift": 3 if wide else 2}  # fmt: skip
    if name.startswith("ds_"):
        atomic = f"{name} v[8:9], v1, v[4:5]" + (", v[6:7]" if data == 2 else "")
        body = THROUGH_LDS.format(atomic=atomic, **form)
    elif data == 2:  # new value and comparison in consecutive registers
        body = f"v_mov_b32 v5, v6\n{name} v8, v1, v[4:5], s[4:5] sc0\ns_waitcnt vmcnt(0)"
    else:
        body = f"{name} v[8:9], v1, v[4:5], s[4:5] sc0\ns_waitcnt vmcnt(0)"
    text = BODY.format(body=body, **form)
    if not (data == 2 and not name.startswith("ds_")):
        text = pick(text)
    else:
        text = text.replace(f"{form['load']} v[4:5]", f"{form['load']} v4").replace("v[6:7], v2", "v6, v2").replace(
            "v[8:9], s[10:11]", "v8, s[10:11]")  # fmt: skip
    result = run(text, [memory, x, y, out], arguments="pppp", lds=512)
    result.raise_for_findings()
    assert memory.tolist() == want and out.tolist() == back


HISTOGRAM = """
v_mov_b32 v2, 0
v_lshlrev_b32 v1, 2, v0
v_and_b32 v1, 0xff, v1
{clear}
v_mov_b32 v3, 1
ds_add_u32 v1, v3
{before}
ds_read_b32 v4, v1
s_waitcnt lgkmcnt(0)
"""


@pytest.mark.parametrize(
    ("clear", "before", "ok"),
    [
        ("s_waitcnt lgkmcnt(0)\ns_barrier", "s_waitcnt lgkmcnt(0)\ns_barrier", True),
        ("s_waitcnt lgkmcnt(0)\ns_barrier", "s_waitcnt lgkmcnt(0)", False),
        ("", "s_waitcnt lgkmcnt(0)\ns_barrier", False),
    ],
    ids=["barriers", "none before the read", "none after the clearing"],
)
def test_lds_atomics_race_with_plain_accesses(clear, before, ok):
    first = (
        "v_cmp_gt_u32 vcc, 64, v0\ns_and_saveexec_b64 s[20:21], vcc\nds_write_b32 v1, v2\ns_mov_b64 exec, s[20:21]\n"
    )
    result = run(HISTOGRAM.format(clear=first + clear, before=before), [words(1)], waves=2, lds=256)
    assert (kinds(result) == []) is ok and (ok or set(kinds(result)) == {"lds-race"})


def test_an_unknown_atomic_is_named():
    from flykernels.sim import UnknownInstruction

    with pytest.raises(UnknownInstruction, match="global_atomic_frobnicate"):
        run(POINTER + "global_atomic_frobnicate v1, v2, s[4:5]", [words(1)])
