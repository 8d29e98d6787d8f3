"""Arguments, grids, bad input: what a user can get wrong, and the one clear error for each."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simcases import triton_cases
from flykernels.sim import BadArguments, BadCodeObject, BudgetExceeded, run_on_sim

from .asm_kernel import POINTER, kernel, run, words

ADD_ONE = (
    POINTER
    + """
s_lshl_b32 s6, s2, 8
v_add_u32 v1, s6, v1
global_load_dword v2, v1, s[4:5]
s_waitcnt vmcnt(0)
v_add_u32 v2, 1, v2
global_store_dword v1, v2, s[4:5]
"""
)


def test_numpy_torch_and_views_change_in_place():
    x = np.arange(128, dtype=np.int32)
    run(ADD_ONE, [x], grid=(2,)).raise_for_findings()
    np.testing.assert_array_equal(x, np.arange(128) + 1)
    t = torch.arange(200, dtype=torch.int32)
    run(ADD_ONE, [t[8:136]], grid=(2,)).raise_for_findings()
    want = torch.arange(200, dtype=torch.int32)
    want[8:136] += 1
    assert torch.equal(t, want)
    half = torch.zeros(128, dtype=torch.bfloat16)
    run(ADD_ONE, [half], grid=(1,)).raise_for_findings()
    assert half.view(torch.int32).eq(1).all()


def test_aliased_arguments_share_memory():
    x = words(64, 5)
    body = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_mov_b32 v2, 9
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[4:5]
    s_waitcnt vmcnt(0)
    global_load_dword v3, v1, s[6:7]
    s_waitcnt vmcnt(0)
    v_add_u32 v3, 1, v3
    global_store_dword v1, v3, s[6:7]
    """
    run(body, [x, x], arguments="pp").raise_for_findings()
    assert (x == 10).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 6), columns=st.integers(1, 9), pad=st.integers(0, 5), start=st.integers(0, 3),
    transposed=st.booleans(),
)  # fmt: skip
def test_any_strided_view_is_guarded(rows, columns, pad, start, transposed):
    """Every element of a view may be touched and nothing else; the kernel writes 7 to byte offsets that it is given."""
    store = np.zeros((rows + start, columns + pad + start), np.uint32)
    view = store[start:, start : start + columns]
    view = view.T if transposed else view
    at = [i * view.strides[0] + j * view.strides[1] for i in range(view.shape[0]) for j in range(view.shape[1])]
    offsets = np.array(at, np.int32).view(np.uint32)
    offsets = np.resize(offsets, 64)
    body = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_mov_b32 v3, 7
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[6:7]
    s_waitcnt vmcnt(0)
    global_store_dword v2, v3, s[4:5]
    """
    assert run(body, [view, offsets], arguments="pp").findings == []
    assert (view == 7).sum() == min(view.size, 64) and store.sum() == 7 * min(view.size, 64)
    beyond = np.full(64, max(at) + 4 if pad or view.ndim else 4, np.uint32)
    outside = run(body, [view, beyond], arguments="pp")
    inside_storage = max(at) + 4 in at
    assert outside.ok is inside_storage


def test_empty_arrays_and_grids():
    assert run("s_nop 0", [np.zeros(0, np.float32)]).ok
    x = words(64)
    assert run(ADD_ONE, [x], grid=(0, 1, 1)).counters.instructions == 0 and (x == 0).all()


def test_some_workgroups():
    x = words(256)
    run(ADD_ONE, [x], grid=(4,), workgroups=[(1, 0, 0), (3, 0, 0)]).raise_for_findings()
    np.testing.assert_array_equal(x.reshape(4, 64)[:, 0], [0, 1, 0, 1])
    with pytest.raises(BadArguments, match="not in the grid"):
        run(ADD_ONE, [x], grid=(4,), workgroups=[(4, 0, 0)])


def test_values():
    body = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_load_dwordx2 s[6:7], s[0:1], 0x8
    v_mov_b32 v1, 0
    s_waitcnt lgkmcnt(0)
    v_mov_b32 v2, s6
    v_mov_b32 v3, s7
    global_store_dwordx2 v1, v[2:3], s[4:5]
    """
    x = words(2)
    run(body, [x, -3, 1.5], arguments="pii", block=(1,))
    assert x[0] == 0xFFFFFFFD and x[1] == np.float32(1.5).view(np.uint32)
    run(body, [x, np.uint32(7), b"abcd"], arguments="pii", block=(1,))
    assert x[0] == 7 and x[1].tobytes() == b"abcd"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "takes 2 arguments"),
        ([words(1), 1, 2], "3 were given"),
        ([1.5, 1], "is a pointer; float"),
        ([words(1), words(1)], "4-byte value; an array"),
        ([words(1), 2**40], "does not fit"),
        ([words(1), np.int64(1)], "a value of 8 was given"),
        ([words(1), "x"], "cannot pass a str"),
    ],
)
def test_wrong_arguments(args, message):
    with pytest.raises(BadArguments, match=message):
        run("s_nop 0", args, arguments="pi")


def test_wrong_launch():
    with pytest.raises(BadArguments, match="at most 1024"):
        run("s_nop 0", [words(1)], block=(2048,))
    with pytest.raises(BadArguments, match="163840"):
        run("s_nop 0", [words(1)], lds=170_000)
    with pytest.raises(BadArguments, match="grid"):
        run("s_nop 0", [words(1)], grid=(1, -1))
    with pytest.raises(BadArguments, match="no kernel 'other'"):
        run("s_nop 0", [words(1)], entry="other")
    with pytest.raises(BadArguments, match="not a buffer"):
        run("s_nop 0", [words(1), 3], arguments="pi", outputs=[1])
    both = kernel("s_nop 0", name="one") + kernel("s_nop 0", name="two").split(".text", 1)[1]
    with pytest.raises((BadArguments, BadCodeObject)):
        run_on_sim(both, [words(1)])


def test_all_of_lds():
    """160 KiB a workgroup, the last word of it too."""
    x, last = words(64), 160 * 1024 - 256
    body = POINTER + f"v_add_u32 v2, {last}, v1\nds_write_b32 v2, v0\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v2\n"
    body += "s_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v3, s[4:5]"
    run(body, [x], lds=160 * 1024).raise_for_findings()
    np.testing.assert_array_equal(x, np.arange(64))


def test_endless_loop():
    with pytest.raises(BudgetExceeded, match="endless loop"):
        run("again:\ns_branch again", [words(1)], budget=1000)


@pytest.fixture(scope="module")
def binary() -> bytes:
    return triton_cases.scan(3, 1000).binary


def test_bad_code_objects(binary, tmp_path):
    for size in (3, 40, 400, len(binary) // 2, len(binary) - 8):
        with pytest.raises(BadCodeObject):
            run_on_sim(binary[:size], [])
    with pytest.raises(BadCodeObject, match="not an ELF"):
        run_on_sim(b"MZ" + binary, [])
    foreign = bytearray(binary)
    foreign[18:20] = (62).to_bytes(2, "little")
    with pytest.raises(BadCodeObject, match="gfx950 code objects only"):
        run_on_sim(bytes(foreign), [])
    older = bytearray(binary)
    older[48] = 0x4C
    with pytest.raises(BadCodeObject, match="gfx942"):
        run_on_sim(bytes(older), [])
    with pytest.raises(BadCodeObject, match="no file"):
        run_on_sim(tmp_path / "none.hsaco", [])
    with pytest.raises(BadCodeObject, match="names no target"):
        run_on_sim("just\nwords", [])
    with pytest.raises(BadCodeObject, match="gfx1100"):
        run_on_sim(kernel("s_nop 0").replace("gfx950", "gfx1100"), [words(1)])
    with pytest.raises(BadCodeObject, match="cannot read"):
        run_on_sim(io.BytesIO(binary), [])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(at=st.integers(0, 4000), value=st.integers(0, 255))
def test_damaged_code_objects_give_clear_errors(binary, at, value):
    """One byte changed anywhere: it runs, or one of the simulator's own errors says why not."""
    from flykernels.sim import SimulatorError
    from flykernels.sim.load import load

    damaged = bytearray(binary)
    damaged[at % len(damaged)] = value
    try:
        load(bytes(damaged))
    except SimulatorError as e:
        assert str(e)


def test_wrong_argument_count_of_a_real_kernel(binary):
    with pytest.raises(BadArguments, match="scan takes 5 arguments"):
        run_on_sim(binary, [words(4)])


def test_scratch_memory():
    x = np.arange(64, dtype=np.uint32)
    body = (
        POINTER
        + """
    global_load_dword v2, v1, s[4:5]
    s_waitcnt vmcnt(0)
    scratch_store_dword off, v2, off offset:8
    v_mov_b32 v2, 0
    s_waitcnt vmcnt(0)
    scratch_load_dword v3, off, off offset:8
    s_waitcnt vmcnt(0)
    v_add_u32 v3, v3, v3
    global_store_dword v1, v3, s[4:5]
    """
    )
    run(body, [x], scratch=16).raise_for_findings()
    np.testing.assert_array_equal(x, 2 * np.arange(64))
    assert run(body, [x], scratch=8).findings[0].kind == "out-of-bounds"


@pytest.mark.parametrize(
    ("line", "f"),
    [
        ("global_atomic_add v3, v2, s[4:5]", lambda old, x: old + sum(x)),
        ("global_atomic_umax v3, v2, s[4:5]", lambda old, x: max(old, *x)),
        ("global_atomic_or v3, v2, s[4:5]", lambda old, x: old | int(np.bitwise_or.reduce(x))),
        ("global_atomic_smin v3, v2, s[4:5]", lambda old, x: min(old, *x)),
    ],
)
def test_atomics_of_many_workgroups(line, f):
    x = words(1, 5)
    run(POINTER + f"v_mov_b32 v3, 0\nv_add_u32 v2, 3, v0\n{line}", [x], grid=(3,)).raise_for_findings()
    assert x[0] == f(5, np.tile(np.arange(3, 67), 3).tolist())


def test_returning_and_float_atomics():
    x = np.zeros(65, np.float32)
    body = (
        POINTER
        + """
    v_mov_b32 v3, 0
    v_cvt_f32_u32 v2, v0
    global_atomic_add_f32 v4, v3, v2, s[4:5] sc0
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[4:5] offset:4
    """
    )
    run(body, [x]).raise_for_findings()
    assert x[0] == np.arange(64).sum()
    np.testing.assert_array_equal(np.sort(x[1:]), np.sort(np.cumsum(np.arange(64)) - np.arange(64)))


def test_constants_in_the_code_object():
    """s_getpc_b64 and a table behind the code, as compilers place constants."""
    from triton._C.libtriton import amd
    from triton.backends.amd.compiler import assemble_amdgcn

    body = """
    s_getpc_b64 s[6:7]
    s_add_u32 s6, s6, table@rel32@lo+4
    s_addc_u32 s7, s7, table@rel32@hi+12
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_load_dwordx2 s[8:9], s[6:7], 0x0
    v_mov_b32 v1, 0
    s_waitcnt lgkmcnt(0)
    v_mov_b32 v2, s8
    v_mov_b32 v3, s9
    global_store_dwordx2 v1, v[2:3], s[4:5]
    """
    text = kernel(body).replace(
        ".section .rodata", ".section .rodata\n.p2align 6\ntable:\n.long 1234\n.long 5678\n.p2align 6", 1
    )
    text = text.replace("k:\n", "\t.globl k\n\t.p2align 8\n\t.type k,@function\nk:\n", 1)
    text = text.replace(".amdhsa_kernel k\n", ".amdhsa_kernel k\n\t\t.amdhsa_next_free_vgpr 8\n"
                        "\t\t.amdhsa_next_free_sgpr 16\n\t\t.amdhsa_accum_offset 8\n")  # fmt: skip
    text = text.replace(
        "    .name: k\n", "    .name: k\n    .symbol: k.kd\n    .kernarg_segment_align: 8\n    .wavefront_size: 64\n"
    ).replace(
        "amdhsa.target: amdgcn-amd-amdhsa--gfx950\n",
        "amdhsa.target: amdgcn-amd-amdhsa--gfx950\namdhsa.version: [1, 2]\n",
    )
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as d:
        o, so = Path(d) / "k.o", Path(d) / "k.hsaco"
        o.write_bytes(assemble_amdgcn(text, "gfx950", ""))
        amd.link_hsaco(str(o), str(so))
        x = words(2)
        run_on_sim(so, [x], block=(1,)).raise_for_findings()
    np.testing.assert_array_equal(x, [1234, 5678])
