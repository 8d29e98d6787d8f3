"""Counters, banks, the timing model's behaviour, timeline, command line and fixture."""

import dataclasses
import re

import numpy as np
import pytest
from click.testing import CliRunner

from bench.simcases import own_cases, triton_cases
from flykernels.sim import banks
from flykernels.sim.addresses import lds_cycles
from flykernels.sim.asm import parse_instruction
from flykernels.sim.cli import parse_argument, sim
from flykernels.sim.report import occupancy, profile
from flykernels.sim.timeline import draw, spans
from flykernels.sim.timing import Machine950, Unit
from flykernels.sim.trace import kind_of

from .asm_kernel import POINTER, kernel, words

pytest_plugins = ["flykernels.sim.testing"]


# -- banks
def test_bank_conflicts():
    lane = np.arange(64)
    assert banks.cycles(False, 4, lane * 4, None) == (1, 1)
    assert banks.cycles(False, 4, lane * 0, None) == (1, 1), "one dword is broadcast"
    assert banks.cycles(False, 4, lane * 256, None) == (64, 1), "all lanes in one bank"
    assert banks.cycles(False, 16, lane * 16, None) == (4, 4)
    assert banks.cycles(False, 16, lane * 128, None)[0] > 4
    assert banks.cycles(True, 8, lane * 8, None) == (4, 4), "writes behave as on 32 banks"
    half = lane < 32
    assert banks.cycles(False, 8, lane * 8, half) == (1, 1)


def test_phase_tables_are_partitions():
    for table in (banks.READ, banks.WRITE):
        for phases in table.values():
            assert sorted(phases.lanes.ravel()) == list(range(64))


# -- the whole report
@pytest.fixture(scope="module")
def hti():
    case = own_cases.hti(K=1024)
    return case, profile(case.text, case.arguments(), case.grid)


def test_report(hti):
    _, report = hti
    text = "\n".join(report.lines())
    assert text.count("simulated") >= 5 and "bank conflicts" in text
    assert report.mix["mfma"] == 8 * 16 * 64 and report.mix["direct"] == 8 * 16 * 8
    low, middle, high = (report.timing[k].cycles for k in ("low", "middle", "high"))
    assert low < middle < high and 0.3 < report.matrix_busy < 1
    assert sum(s.conflict_cycles for s in report.lds) == sum(s.ideal_cycles for s in report.lds), "the swizzle works"
    assert report.occupancy.workgroups == 1


def test_regressions_show(hti):
    """`vmcnt(0)` in the main loop costs much; a vector instruction before every matrix one fits beside it, nearly."""
    _, report = hti
    recorder = report.recorder
    base = report.timing["middle"].cycles
    drained = [
        dataclasses.replace(i, mods={**i.mods, "vmcnt": 0}) if i.name == "s_waitcnt" and "vmcnt" in i.mods else i
        for i in recorder.instructions
    ]
    slow = Unit([(recorder.waves(), drained)], Machine950()).run().cycles
    assert slow > 1.1 * base
    vector = next(k for k, i in enumerate(recorder.instructions) if kind_of(i) == "valu")
    more = [
        [y for x in w for y in (([vector, 0, 0], x) if kind_of(recorder.instructions[x[0]]) == "mfma" else (x,))]
        for w in recorder.waves()
    ]
    busier = Unit([(more, recorder.instructions)], Machine950()).run().cycles
    assert busier > 1.005 * base


def test_constants_have_sources():
    for f in dataclasses.fields(Machine950):
        assert len(f.metadata["source"]) > 5 and f.metadata["confidence"] in ("high", "medium", "low")
        assert f.metadata["low"] is not None and f.metadata["high"] is not None


def test_matrix_bound_loop_takes_the_matrix_cycles():
    """32 independent matrix instructions a wave on four SIMDs: 16 cycles each, waits and prologue aside."""
    many = "\n".join(
        f"v_mfma_f32_16x16x32_bf16 v[{8 + 4 * (k % 8)}:{11 + 4 * (k % 8)}], v[0:3], v[4:7], 0" for k in range(32)
    )
    zero = "\n".join(f"v_mov_b32 v{k}, 0" for k in range(8))
    report = profile(kernel(f"{zero}\ns_nop 1\n{many}\ns_nop 7", waves=4), [words(1)])
    t = report.timing["middle"]
    assert 32 * 16 <= t.cycles <= 32 * 16 + 100 and t.last_matrix - t.first_matrix == pytest.approx(31 * 16)


@pytest.mark.parametrize("where", ["end", "barrier"])
def test_a_branch_right_to_the_end_or_a_barrier(where):
    """Waves of which some jump there: what is recorded of each ends in the end, and all barriers are counted."""
    at = {"end": "there:", "barrier": "there:\ns_barrier\ns_nop 0"}[where]
    body = f"""
        v_readfirstlane_b32 s3, v0
        s_cmp_lg_u32 s3, 0
        s_cbranch_scc1 there
        s_nop 3
        {at}
    """
    report = profile(kernel(body, waves=4), [words(1)])
    streams = [[report.recorder.instructions[pc].name for pc, _, _ in stream] for stream in report.recorder.waves()]
    assert len(streams) == 4 and all(names[-1] == "s_endpgm" for names in streams)
    assert [names.count("s_barrier") for names in streams] == [int(where == "barrier")] * 4
    assert report.result.counters.by_name["s_endpgm"] == 4 and report.timing["middle"].cycles > 0


def test_coalescing_is_counted():
    scattered = POINTER + "v_lshlrev_b32 v1, 5, v1\nglobal_load_dword v2, v1, s[4:5]\ns_waitcnt vmcnt(0)"
    wide = profile(kernel(scattered), [words(64 * 32)])
    tight = profile(kernel(POINTER + "global_load_dword v2, v1, s[4:5]\ns_waitcnt vmcnt(0)"), [words(64)])
    assert wide.memory[0].lines == 64 and wide.memory[0].efficiency == 4 / 128
    assert tight.memory[0].lines == 2 and tight.memory[0].efficiency == 1


def test_occupancy():
    info = triton_info()
    info.vgprs = 128
    assert (occupancy(info, 4, 0).workgroups, occupancy(info, 4, 0).limit) == (4, "registers")
    assert occupancy(info, 4, 80 * 1024).workgroups == 2
    info.vgprs = 32
    assert occupancy(info, 4, 0).limit == "wave slots" or occupancy(info, 4, 0).workgroups == 8


def triton_info():
    from flykernels.sim.load import load

    return load(triton_cases.scan(3, 1000).text).kernel


# -- pictures, command, fixture
def test_timeline(hti, tmp_path):
    _, report = hti
    drawn = spans(report)
    assert {row for _, row, _, _ in drawn} >= {"matrix", "LDS", "memory", "wait", "barrier"}
    assert {wave for wave, *_ in drawn} == set(range(8))
    svg = draw(report, tmp_path / "t.svg", cycles=(0, 4000)).read_text()
    assert "simulated" in svg and "wave 7" in svg
    assert draw(report, tmp_path / "t.png", cycles=(0, 4000)).read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"\.svg or a \.png"):
        draw(report, tmp_path / "t.pdf")


def test_command(tmp_path):
    case = triton_cases.scan(3, 1000)
    (tmp_path / "scan.hsaco").write_bytes(case.binary)
    words = ["f32[3,1000]=ones", "f32[3,1000]=nan", "1000", "u8[64]=zeros", "u8[64]=zeros"]
    args = ["--args", *words[:2], "--args", *words[2:]]
    args += ["--grid", "3", "--shared", str(case.options["shared_bytes"])]
    done = CliRunner().invoke(sim, [str(tmp_path / "scan.hsaco"), *args, "--profile", "--save", str(tmp_path / "out"),
                                    "--timeline", str(tmp_path / "t.svg")])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "no findings" in done.output and "simulated" in done.output and (tmp_path / "t.svg").exists()
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "argument1.npy")[2], np.arange(1, 1001))


def test_command_reports_findings_and_errors(tmp_path):
    file = tmp_path / "k.s"
    file.write_text(kernel(POINTER + "global_load_dword v2, v1, s[4:5]\nv_mov_b32 v3, v2\ns_waitcnt vmcnt(0)"))
    go = lambda *args: CliRunner().invoke(sim, [str(file), *args])
    bad = go("--args", "u32[64]")
    assert bad.exit_code == 1 and "register-in-flight" in bad.output
    excused = go("--args", "u32[64]", "--waive", "register-in-flight:only a test")
    assert excused.exit_code == 0 and "waived: only a test" in excused.output
    few = go()
    assert few.exit_code == 2 and "takes 1 arguments" in few.output
    assert go("--args", "u33[4]").exit_code == 2 and go("--grid", "a").exit_code == 2


@pytest.mark.parametrize(
    ("text", "want"), [("7", 7), ("0x10", 16), ("1e-5", 1e-5), ("7:i64", np.int64(7)), ("1.5:f32", np.float32(1.5))]
)
def test_argument_words(text, want):
    got = parse_argument(text)
    assert got == want and type(got) is type(want)


def test_argument_arrays(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3))
    assert parse_argument(f"@{tmp_path / 'x.npy'}").tolist() == [0, 1, 2]
    assert parse_argument("bf16[2x3]=ones").tolist() == [[0x3F80] * 3] * 2
    assert parse_argument("i32[4]=range").tolist() == [0, 1, 2, 3]
    for bad in ("f32[4]=what", "what", "7:what"):
        with pytest.raises(ValueError, match=re.escape(bad.split("=")[-1].split(":")[-1])):
            parse_argument(bad)


def test_fixture(sim_run):
    x = words(64)
    sim_run(kernel(POINTER + "v_mov_b32 v2, 1\nglobal_store_dword v1, v2, s[4:5]"), [x])
    assert (x == 1).all()
    with pytest.raises(AssertionError, match="out-of-bounds"):
        sim_run(kernel(POINTER + "v_mov_b32 v2, 1\nglobal_store_dword v1, v2, s[4:5] offset:4"), [x])


CODE = """
  v_lshlrev_b32_e32 v1, 4, v0
  ds_read_b128 v[4:7], v1
  v_lshlrev_b32_e32 v2, 8, v0
  ds_write2_b32 v2, v4, v5 offset1:1
  s_load_dword s4, s[0:1], 0x0
  v_add_u32_e32 v3, s4, v1
  ds_read_b128 v[8:11], v3
  v_mov_b32_e32 v3, 0
  ds_read_b32 v12, v3
"""


def test_lds_cycles_follow_from_the_code():
    code = [parse_instruction(line.strip(), n) for n, line in enumerate(CODE.strip().splitlines())]
    found = lds_cycles(code, [[k, 0, 0] for k in range(len(code))], wave=1)
    # rows of 16 bytes: no conflicts; 256 bytes apart: all 32 lanes of both phases in one bank, twice; s4 is not known;
    # one dword for all lanes is one cycle
    assert found == {1: 4, 3: 128, 8: 1}
