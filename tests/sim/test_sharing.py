"""Memory that waves and workgroups share: what orders it, what flushes caches, and what does neither."""

import numpy as np
import pytest

from bench.simcases import mutate, own_cases
from flykernels.sim import sharing

from .asm_kernel import POINTER, kinds, run, words

ALONE = "v_cmp_eq_u32 vcc, 0, v0\ns_and_saveexec_b64 s[20:21], vcc\n"


def race(result, *words_of_it):
    assert kinds(result) == ["memory-race"], [str(f) for f in result.findings]
    for word in words_of_it:
        assert word in result.findings[0].message
    return result.findings[0]


def test_two_workgroups_write_the_same_bytes():
    body = POINTER + "v_mov_b32 v2, 7\nglobal_store_dword v1, v2, s[4:5]"
    f = race(run(body, [words(64)], grid=(2,)), "bytes 0 to 255 of argument 0", "workgroup (", "writes")
    assert f.severity == "error" and "global_store_dword" in f.other
    apart = POINTER + "s_lshl_b32 s6, s2, 8\nv_add_u32 v1, s6, v1\nv_mov_b32 v2, 7\nglobal_store_dword v1, v2, s[4:5]"
    assert run(apart, [words(128)], grid=(2,)).findings == []


def test_neighbouring_bytes_of_workgroups_are_no_race():
    body = POINTER + "v_lshlrev_b32 v1, 1, v0\nv_add_u32 v1, s2, v1\nv_mov_b32 v2, 7\nglobal_store_byte v1, v2, s[4:5]"
    assert run(body, [words(32)], grid=(2,)).findings == []


# Each workgroup leaves a value in its slot and counts itself; the last one adds the slots up, as in a GEMM with split
# K. {release} and {acquire} are what has to stand there.
LAST = (
    POINTER
    + ALONE
    + """
    s_lshl_b32 s6, s2, 2
    v_mov_b32 v1, s6
    v_add_u32 v2, 5, s2
    global_store_dword v1, v2, s[4:5] offset:64 {store}
    {release}
    v_mov_b32 v3, 0
    v_mov_b32 v4, 1
    global_atomic_add v5, v3, v4, s[4:5] sc0
    {acquire}
    v_readfirstlane_b32 s7, v5
    s_cmp_lg_u32 s7, 2
    s_cbranch_scc1 out
    {late}
    global_load_dword v6, v3, s[4:5] offset:64 {load}
    global_load_dword v7, v3, s[4:5] offset:68 {load}
    global_load_dword v8, v3, s[4:5] offset:72 {load}
    s_waitcnt vmcnt(0)
    v_add3_u32 v6, v6, v7, v8
    global_store_dword v3, v6, s[4:5] offset:128
    out:
    """
)
RELEASE, ACQUIRE = "buffer_wbl2 sc1\ns_waitcnt vmcnt(0)", "s_waitcnt vmcnt(0)\nbuffer_inv sc1"
WAIT = "s_waitcnt vmcnt(0)"


def last(release=RELEASE, acquire=ACQUIRE, late="", store="", load=""):
    x = words(64)
    result = run(LAST.format(release=release, acquire=acquire, late=late, store=store, load=load), [x], grid=(3,))
    assert x[32] == 18 and x[0] == 3  # the values are right in a simulator without caches, whatever it says of them
    return result


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"acquire": WAIT, "late": "buffer_inv sc1"},
        {"release": "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)"},  # system scope is wider
        {"release": WAIT, "store": "sc1"},  # written through
        {"acquire": WAIT, "load": "sc1"},  # read past the caches
    ],
    ids=["fences", "late invalidation", "system scope", "stores with sc1", "loads with sc1"],
)
def test_the_last_workgroup_may_read_what_was_released(how):
    assert last(**how).findings == []


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"release": WAIT}, "no buffer_wbl2"),
        ({"release": "buffer_wbl2\ns_waitcnt vmcnt(0)"}, "no buffer_wbl2"),
        ({"release": "buffer_wbl2 sc0\ns_waitcnt vmcnt(0)"}, "no buffer_wbl2"),
        ({"release": "buffer_wbl2 sc1"}, "no atomic"),  # neither the store nor the write-back was waited for
        ({"release": ""}, "no atomic"),
        ({"release": WAIT, "acquire": ACQUIRE + "\nbuffer_wbl2 sc1\ns_waitcnt vmcnt(0)"}, "no buffer_wbl2"),
        ({"acquire": WAIT}, "no buffer_inv"),
        ({"acquire": "s_waitcnt vmcnt(0)\nbuffer_inv"}, "no buffer_inv"),
        ({"acquire": "buffer_inv sc1\ns_waitcnt vmcnt(0)"}, "no buffer_inv"),  # before the atomic had an answer
    ],
    ids=["no write-back", "narrow write-back", "workgroup write-back", "no wait", "nothing", "late write-back",
         "no invalidation", "narrow invalidation", "early invalidation"],
)  # fmt: skip
def test_what_is_missing_is_named(how, why):
    findings = last(**how).findings
    assert findings and all(f.kind == "memory-race" and why in f.message for f in findings), list(map(str, findings))


@pytest.mark.parametrize(("wait", "ok"), [("s_waitcnt vmcnt(0)\ns_barrier", True), ("s_barrier", False), ("", False)])
def test_waves_of_a_workgroup_meet_at_barriers(wait, ok):
    """Their caches are the same: a store that was waited for before the barrier is seen after it."""
    body = POINTER + f"global_store_dword v1, v0, s[4:5]\n{wait}\nv_xor_b32 v3, 0x100, v1\n"
    body += "global_load_dword v4, v3, s[4:5]\ns_waitcnt vmcnt(0)"
    result = run(body, [words(128)], waves=2)
    assert result.findings == [] if ok else race(result, "before a barrier")


def test_a_wave_may_read_what_it_wrote():
    body = POINTER + "global_store_dword v1, v0, s[4:5]\nglobal_load_dword v4, v1, s[4:5]\ns_waitcnt vmcnt(0)"
    assert run(body, [words(64)]).findings == []


HALO = """
s_lshl_b32 s6, s2, 8
v_add_u32 v1, s6, v1
v_xor_b32 v3, 0x100, v1
{first}
s_waitcnt vmcnt(0)
global_store_dword v1, v0, s[4:5]
"""


@pytest.mark.parametrize("most", [sharing.LOG_MOST, 0], ids=["reads put aside", "reads looked at at once"])
def test_a_neighbour_reads_what_is_overwritten_in_place(monkeypatch, most):
    monkeypatch.setattr(sharing, "LOG_MOST", most)
    both = "global_load_dword v4, v3, s[4:5]\nglobal_load_dword v5, v1, s[4:5]"
    result = run(POINTER + HALO.format(first=both), [words(128)], grid=(2,))
    assert "memory-race" in kinds(result) and any("overwrites" in f.message for f in result.findings)
    own = run(POINTER + HALO.format(first="global_load_dword v5, v1, s[4:5]"), [words(128)], grid=(2,))
    assert own.findings == []


def test_atomics_race_with_plain_accesses_only():
    add = POINTER + "v_mov_b32 v2, 1\nv_mov_b32 v3, 0\nglobal_atomic_add v3, v2, s[4:5]\n"
    assert run(add, [words(64)], grid=(3,)).findings == []
    look = add + "s_waitcnt vmcnt(0)\nglobal_load_dword v4, v3, s[4:5]{}\ns_waitcnt vmcnt(0)"
    assert "memory-race" in kinds(run(look.format(""), [words(64)], grid=(3,)))
    assert run(look.format(" sc1"), [words(64)], grid=(3,)).findings == []


def test_a_flag_may_be_reset_by_who_saw_it():
    """Workgroup 0 raises a flag with sc1; workgroup 1 sees it with sc1 and takes it down with a plain store."""
    body = (
        POINTER
        + ALONE
        + """
    v_mov_b32 v1, 0
    v_mov_b32 v2, 1
    v_mov_b32 v3, 0
    s_cmp_lg_u32 s2, 0
    s_cbranch_scc1 second
    global_store_dword v1, v2, s[4:5] sc1
    s_branch out
    second:
    global_load_dword v4, v1, s[4:5] sc1
    s_waitcnt vmcnt(0)
    global_store_dword v1, v3, s[4:5]
    out:
    """
    )
    assert run(body, [words(64)], grid=(2,)).findings == []
    blind = body.replace("global_load_dword v4, v1, s[4:5] sc1", "s_nop 0")
    race(run(blind, [words(64)], grid=(2,)), "overwrites")


def test_scalar_loads_are_looked_at():
    body = POINTER + "s_cmp_lg_u32 s2, 0\ns_cbranch_scc1 on\nglobal_store_dword v1, v0, s[4:5]\non:\n"
    body += "s_cmp_eq_u32 s2, 0\ns_cbranch_scc1 out\ns_load_dword s8, s[4:5], 0x0\ns_waitcnt lgkmcnt(0)\nout:"
    race(run(body, [words(64)], grid=(2,)), "reads bytes 0 to 3")
    assert run(body, [words(64)], grid=(1,)).findings == []


def test_split_k_and_its_flushes():
    """The GEMM whose K is split: silent as it is; every flush of its caches is needed."""
    case = own_cases.split()
    loaded, hits, watch = mutate.survey(case)
    flushes = [m for m in mutate.mutants(loaded, hits, watch) if m.kind == "flush removed"]
    assert len(flushes) == 2
    assert [mutate.verdict(case, m) for m in flushes] == ["found", "found"]


def test_no_check_no_cost():
    body = POINTER + "v_mov_b32 v2, 7\nglobal_store_dword v1, v2, s[4:5]"
    x = words(64)
    assert run(body, [x], grid=(2,), check=False).findings == [] and np.all(x == 7)
