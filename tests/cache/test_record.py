"""FLYKERNELS_RECORD: many processes append, nothing is lost or torn, nothing is raised; foreign files are refused."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_plugin import settings as of_user
from templates.gemm.problem import GemmProblem
from templates.scaled_gemm.problem import ScaledGemmProblem
from tuning_cache import Key, record
from tuning_cache.record import RecordError, note, read

TARGET = {"arch": "gfx950", "product": "AMD Instinct MI350X", "compute_units": 256}
P = GemmProblem(64, 32, "bf16", "bf16")


def key(m=8, op="mm", problem=P, **sizes):
    return Key(op, {**problem.key(), "m": m, **sizes}, TARGET, {"plugin": "1"})


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.setattr(record, "_noted", {})
    monkeypatch.setattr(record, "_complained", set())


def test_what_is_noted_is_read(tmp_path):
    path = tmp_path / "misses"
    scaled = ScaledGemmProblem(64, 64)
    asked = [key(), key("symbolic", "addmm+gelu"), key(2, "bmm", GemmProblem(8, 8, batched=True), batch=3)]
    asked += [key(4, "_scaled_mm", scaled)]
    for each in asked * 2:
        note(each, str(path))
    assert len(path.read_text().splitlines()) == 4 and record.is_record(path)
    misses, torn = read(path)
    assert torn == 0 and [m.key({"plugin": "1"}) for m in misses] == asked
    assert [m.template for m in misses] == ["gemm"] * 3 + ["scaled_gemm"] and misses[3].problem == scaled
    record._noted.clear()  # the next process: what the file holds is not written again
    note(key(), str(path))
    assert len(path.read_text().splitlines()) == 4


WRITER = """
import sys
from tests.cache.test_record import key, note
for n in range(int(sys.argv[2]), int(sys.argv[3])):
    note(key(n), sys.argv[1])
"""


def test_many_processes_append_to_one_file(tmp_path):
    path = tmp_path / "misses"
    ranges = [(1 + 100 * n, 301 + 100 * n) for n in range(4)]  # each meets some of the next one's
    run = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), *map(str, r)]) for r in ranges]
    assert [p.wait() for p in run] == [0] * 4
    misses, torn = read(path)
    assert torn == 0 and {m.sizes["m"] for m in misses} == set(range(1, 601))


def test_a_full_file_grows_no_more(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(record, "FILE_MOST", 2000)
    path = tmp_path / "misses"
    with caplog.at_level(logging.WARNING):
        for m in range(1, 50):
            note(key(m), str(path))
    assert path.stat().st_size <= 2000 and 0 < len(read(path)[0]) < 49
    assert caplog.text.count("larger than 2000 bytes") == 1


def test_nothing_is_raised(tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")  # nobody reads: opening it to write would wait for ever
    for bad in ("/dev/full", str(tmp_path), str(tmp_path / "no" / "such"), str(tmp_path / "pipe"), "\0"):
        with caplog.at_level(logging.WARNING):
            note(key(), bad)
            note(key(2), bad)
        assert caplog.text.count("not recorded") == 1, bad
        caplog.clear()
    long = Key("mm", {**P.key(), "m": "x" * 5000}, TARGET, {})
    note(long, str(tmp_path / "misses"))
    assert not (tmp_path / "misses").exists()


def test_half_lines_are_passed_over(tmp_path):
    path = tmp_path / "misses"
    note(key(1), str(path))
    note(key(2), str(path))
    whole = path.read_bytes()
    for cut in range(len(whole.splitlines()[0]) + 2, len(whole) - 1):  # within the second line
        path.write_bytes(whole[:cut])
        misses, torn = read(path)
        assert len(misses) == 1 and torn == 1


def test_a_record_that_begins_with_half_a_line_is_one(tmp_path):
    path = tmp_path / "misses"
    path.write_bytes(b'{"format":1,"op":"m')  # its process died, or the disk was full
    note(key(1), str(path))
    note(key(2), str(path))
    misses, torn = read(path)
    assert record.is_record(path) and torn == 1 and [m.sizes["m"] for m in misses] == [1, 2]


def test_processes_that_reach_the_limit_together_leave_a_record_that_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "FILE_MOST", 2000)
    path = tmp_path / "misses"
    text = line()
    path.write_text(text * (record.FILE_MOST // len(text) + 2))
    assert path.stat().st_size > record.FILE_MOST and record.is_record(path) and len(read(path)[0]) == 1
    note(key(3), str(path))
    assert len(read(path)[0]) == 1


def test_a_home_in_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLYKERNELS_RECORD", "~/misses")
    of_user.missed(key())
    assert len(read(tmp_path / "misses")[0]) == 1


def line(**changes):
    held = {"format": 1, "op": "mm", "problem": {**P.key(), "m": 8}, "target": TARGET}
    return json.dumps({**held, **changes}) + "\n"


def problem(**changes):
    held = {**P.key(), "m": 8, **changes}
    return line(problem={k: v for k, v in held.items() if v != "gone"})


NORM = {"dtype": "f32", "weight_dtype": "none", "rows": 4, "width": 64}
TOPK = {"dtype": "bf16", "largest": False, "layout": "any", "wide": False, "rows": 8, "width": 256, "k": 4}
CASES = [
    ("rms_norm", {**NORM, "gradient": True}),
    ("rms_norm", {**NORM, "align": 8}),
    ("rms_norm_backward", {**NORM, "weight_dtype": "f32", "align": 16, "weight_gradient": True}),
    ("add_rms_norm", {
        **NORM, "align": 4, "direction": "backward", "residual": True, "rstd": False, "weight_gradient": False,
    }),
    ("topk", {**TOPK, "dtype": "i64"}),
    ("topk", TOPK),
]  # fmt: skip


def test_cases_of_eager_operators_are_read_too(tmp_path):
    path = tmp_path / "misses"
    asked = [Key(f"eager {op}", case, TARGET, {"plugin": "1"}) for op, case in CASES]
    for each in [key(), *asked, *asked]:
        note(each, str(path))
    (product, *eager), torn = read(path)
    assert torn == 0 and product.key({"plugin": "1"}) == key() and [m.key({"plugin": "1"}) for m in eager] == asked
    assert [m.template for m in eager] == [*["rms_norm"] * 4, "topk", "topk"]


def case(op="topk", **changes):
    held = {**dict(CASES)[op], **changes}
    return line(op=f"eager {op}", problem={k: v for k, v in held.items() if v != "gone"})


BAD = {
    "": "holds no problem",
    "half": "holds no problem",
    "[1]\n": "line 1: not an object",
    line(format=2): "format 2; this version reads 1",
    line(format=True): "format 'bool'",
    line(op="conv"): "op is 'conv'",
    line(op="mm+"): "op is 'mm\\+'",
    line(op="mm+exec"): "op is 'mm\\+exec'",
    line(op=["mm"]): "op is 'list'",
    line(exec="x"): "and no others",
    line(problem=3): "problem and target are objects",
    line(target=[]): "problem and target are objects",
    problem(exec="x"): "a problem of gemm has",
    problem(n="gone"): "a problem of gemm has",
    problem(n="64"): "problem's n is '64', not of its type",
    problem(n=True): "problem's n is 'bool'",
    problem(n=-1): "problem's n is -1, not from 0",
    problem(k=1 << 31): "problem's k is 2147483648",
    problem(k=10**4000): "a number of 13288 bits",
    problem(k=1.5): "problem's k is 'float'",
    problem(batched=1): "problem's batched is 1",
    problem(m="some"): "whole numbers or symbolic",
    problem(m=None): "problem's m is 'NoneType'",
    problem(dtype="x" * 101): "too long",
    problem(dtype="\x1b[2J"): "unprintable",
    line(target={"arch": {"a": 1}}): "target's 'arch' is 'dict'",
    line(op="eager softmax", problem=TOPK): "eager operator 'softmax'; known are rms_norm",
    line(op="eager ", problem=TOPK): "eager operator ''",
    case(k="gone"): "a case of topk has dtype, largest",
    case(exec="x"): "a case of topk has",
    case("rms_norm", gradient=True): "a case of rms_norm has .*gradient; or .*align",
    case(k=True): "case's k is 'bool', not of its type",
    case(rows=0): "case's rows is 0",
    case(width=1 << 31): "case's width is 2147483648, not from 0",
    case(dtype="f8"): "case's dtype is 'f8'",
    case("rms_norm", dtype="f64"): "case's dtype is 'f64'",
    case("add_rms_norm", direction="sideways"): "case's direction is 'sideways'",
    case(layout="x" * 101): "too long",
    case(largest=1): "case's largest is 1, not of its type",
    case("rms_norm", align=3): "case's align is 3",
    line(op="eager topk", problem=TOPK, target={"arch": 1.5}): "target's 'arch' is 'float'",
    line(target={"arch": "gfx950", "product": "a\nb"}): "unprintable",
}


@pytest.mark.parametrize("number", range(len(BAD)))
def test_refused_with_a_reason(tmp_path, number):
    text, reason = list(BAD.items())[number]
    path = tmp_path / "misses"
    path.write_text(text)
    with pytest.raises(RecordError, match=reason):
        read(path)


def test_too_large_or_not_there(tmp_path):
    (tmp_path / "misses").write_bytes(b" " * (13 << 20))
    with pytest.raises(RecordError, match="more than 12582912 bytes"):
        read(tmp_path / "misses")
    with pytest.raises(RecordError, match="cannot be read"):
        read(tmp_path / "none")
    assert not record.is_record(tmp_path / "none") and not record.is_record(tmp_path)
    (tmp_path / "deep").write_text("[" * 100_000)
    assert not record.is_record(tmp_path / "deep")


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.sampled_from([*P.key(), "m", "batch"]), values, st.sampled_from(["arch", "threads", "x"]), values)
def test_any_value_is_read_or_refused(tmp_path_factory, name, value, of_target, other):
    path = tmp_path_factory.mktemp("r") / "misses"
    held = json.loads(line())
    held["problem"][name] = value
    held["target"][of_target] = other
    path.write_text(json.dumps(held))
    try:
        misses, _ = read(path)
    except RecordError:
        return
    assert type(misses[0].problem) is GemmProblem and misses[0].problem.why_not(type("T", (), {"name": "gfx950"})) != ""
