"""The MODE register: f32 denormals kept or flushed, saturating fp8 conversions, and what is refused."""

import numpy as np
import pytest

from flykernels.sim import UnknownInstruction
from flykernels.sim.decode import Decoder

from .asm_kernel import POINTER, kinds, run, words
from .test_decode import assemble

TINY = np.float32(1e-40)
# v2 holds a denormal, v3 the least normal; v4 = v2 * 1, v5 = v3 * 0.5
MULTIPLY = (
    POINTER
    + """
global_load_dwordx2 v[2:3], v1, s[4:5]
{before}
s_waitcnt vmcnt(0)
v_mul_f32 v4, 1.0, v2
v_mul_f32 v5, 0.5, v3
global_store_dwordx2 v1, v[4:5], s[4:5]
"""
).replace("v_lshlrev_b32 v1, 2, v0", "v_lshlrev_b32 v1, 3, v0")


def products(before: str = "", **options) -> tuple[list[float], list[str]]:
    x = np.tile(np.array([TINY, 2.0**-126], np.float32), 64)
    result = run(MULTIPLY.format(before=before), [x], **options)
    assert (x.reshape(64, 2) == x[:2]).all()
    return [float(x[0]), float(x[1])], kinds(result)


@pytest.mark.parametrize(
    ("mode", "kept"), [(3, (True, True)), (0, (False, False)), (1, (False, False)), (2, (False, True))]
)
def test_denormals_follow_the_mode(mode, kept):
    """Bit 0 keeps denormal sources, bit 1 denormal results. A product with a denormal source has a denormal result."""
    want = [float(TINY) if kept[0] and mode & 1 else 0.0, 2.0**-127 if kept[1] else 0.0]
    got, found = products(denorm=mode)
    assert got == want and found == ([] if mode & 2 else ["denormal-flush"])
    set_there, _ = products(f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), {mode}")
    assert set_there == want


def test_mode_may_change_and_be_read():
    x = words(64)
    body = (
        POINTER
        + """
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0
    s_nop 1
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3
    s_mov_b32 s8, 2
    s_nop 0
    s_setreg_b32 hwreg(HW_REG_MODE, 4, 2), s8
    s_nop 1
    s_getreg_b32 s9, hwreg(HW_REG_MODE, 4, 4)
    s_getreg_b32 s10, hwreg(HW_REG_XCC_ID)
    v_mov_b32 v2, s9
    global_store_dword v1, v2, s[4:5]
    """
    )
    assert run(body, [x]).findings == [] and (x == 0b1110).all()


@pytest.mark.parametrize(("overflow", "want"), [(0, 0x7F), (1, 0x7E)])
def test_fp16_ovfl_saturates_fp8(overflow, want):
    """1000 is beyond e4m3's 448: NaN, or the largest."""
    x = words(64)
    body = POINTER + f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {overflow}\nv_mov_b32 v2, 0x447a0000\n"
    body += "v_mov_b32 v3, 0\nv_cvt_pk_fp8_f32 v3, v2, v2\nglobal_store_dword v1, v3, s[4:5]"
    assert run(body, [x]).ok and (x == want | want << 8).all()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 1", "rounding"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 6, 2), 0", "f16 and f64 denormals"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_TRAPSTS, 0, 1), 0", "writes TRAPSTS"),
        ("s_getreg_b32 s8, hwreg(HW_REG_TRAPSTS)", "reads TRAPSTS"),
        (
            "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\nv_mov_b32 v2, 0x48000000\nv_cvt_f16_f32 v2, v2",
            "FP16_OVFL",
        ),
    ],
)
def test_what_is_not_simulated_is_refused(line, why):
    with pytest.raises(UnknownInstruction, match=why):
        run(line, [words(1)])


@pytest.mark.parametrize(
    "line",
    [
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0x3", "s_setreg_b32 hwreg(HW_REG_MODE, 0, 8), s5",
        "s_getreg_b32 s8, hwreg(HW_REG_MODE, 4, 2)", "buffer_wbl2 sc1", "buffer_inv sc0 sc1",
    ],
)  # fmt: skip
def test_code_objects_say_the_same(line):
    raw = assemble([line])
    text, size = Decoder(raw + bytes(16)).line(0)
    assert assemble([text])[:size] == raw[:size]
