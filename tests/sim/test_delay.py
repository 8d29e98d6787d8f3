"""Delay mode: a reported race becomes a shown corruption, and a clean kernel shows none."""

import numpy as np

from flykernels.sim import run_on_sim
from flykernels.sim.delay import run_delayed

from .asm_kernel import kernel, words

# Wave 0 loads memory straight into LDS; wave 1 reads it after one barrier. {wait} is what publishes it.
BODY = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_mov_b32 m0, 0
v_and_b32 v1, 63, v0
v_lshlrev_b32 v1, 2, v1
v_readfirstlane_b32 s12, v0
s_waitcnt lgkmcnt(0)
s_mov_b64 s[8:9], s[4:5]
s_mov_b32 s10, 0x100
s_mov_b32 s11, 0x27000
s_cmp_lg_u32 s12, 0
s_cbranch_scc1 reader
buffer_load_dword v1, s[8:11], 0 offen lds
{wait}
s_barrier
s_waitcnt vmcnt(0)
s_branch out
reader:
s_barrier
ds_read_b32 v2, v1
s_waitcnt lgkmcnt(0)
global_store_dword v1, v2, s[6:7]
out:
"""


def text(wait: str) -> str:
    return kernel(BODY.format(wait=wait), "pp", waves=2, lds=256)


def test_race_is_shown():
    x, y = np.arange(1, 65, dtype=np.uint32), words(64)
    result = run_on_sim(text("s_nop 0"), [x, y.copy()])
    assert [f.kind for f in result.findings] == ["lds-race"]
    report = run_delayed(text("s_nop 0"), [x, y], findings=result.findings)
    assert report.corruptions and report.corruptions[0].changed.keys() == {1}
    assert "buffer_load_dword" in report.corruptions[0].instruction and "argument 1" in str(report)
    assert (y == 0).all(), "the caller's arrays stay"


def test_clean_kernel_shows_none():
    x, y = np.arange(1, 65, dtype=np.uint32), words(64)
    assert run_on_sim(text("s_waitcnt vmcnt(0)"), [x, y]).ok
    np.testing.assert_array_equal(y, x)
    report = run_delayed(text("s_waitcnt vmcnt(0)"), [x, words(64)], stop_at_first=False)
    assert report.tried == 3 and not report.corruptions and "no result changed" in str(report)


def test_write_after_read_is_shown():
    """Wave 1's read is waited for after the barrier, when wave 0 already overwrites."""
    body = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_and_b32 v1, 63, v0
    v_lshlrev_b32 v1, 2, v1
    v_readfirstlane_b32 s12, v0
    v_mov_b32 v3, 5
    v_mov_b32 v4, 6
    s_waitcnt lgkmcnt(0)
    s_cmp_lg_u32 s12, 0
    s_cbranch_scc1 reader
    ds_write_b32 v1, v3
    s_waitcnt lgkmcnt(0)
    s_barrier
    s_barrier
    ds_write_b32 v1, v4
    s_waitcnt lgkmcnt(0)
    s_branch out
    reader:
    s_barrier
    ds_read_b32 v2, v1
    s_barrier
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[4:5]
    out:
    """
    code = kernel(body, "p", waves=2, lds=256)
    result = run_on_sim(code, [words(64)])
    assert [f.kind for f in result.findings] == ["lds-race"] and "write after read" in result.findings[0].message
    assert run_delayed(code, [words(64)], findings=result.findings).corruptions


def test_a_waves_own_lds_instructions_stay_in_order():
    """A wave reads what it wrote, without a wait between: LDS serves a wave in order, so no delay can show."""
    body = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_mov_b32 v3, 5
    s_waitcnt lgkmcnt(0)
    ds_write_b32 v1, v3
    ds_read_b32 v2, v1
    ds_write_b32 v1, v1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[4:5]
    """
    code, y = kernel(body, "p", waves=1, lds=256), words(64)
    assert run_on_sim(code, [y]).ok and (y == 5).all()
    report = run_delayed(code, [words(64)], stop_at_first=False)
    assert report.tried >= 3 and not report.corruptions
