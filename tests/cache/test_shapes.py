"""Shapes files: the three forms say the same, and what is not of the form is refused with the place."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning_cache.shapes import Shape, ShapesError, read


@pytest.fixture
def file(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_the_three_forms_say_the_same(file):
    yaml = "defaults: {k: 4096}\nshapes:\n- {op: mm, m: [1, 16], n: 512}\n"
    yaml += "- {op: addmm+gelu, m: symbolic, n: 64, hint: 512}\n"
    as_json = """{"defaults": {"k": 4096}, "shapes": [{"m": [1, 16], "n": 512},
              {"op": "addmm+gelu", "m": null, "n": 64, "hint": 512}]}"""
    csv = "op, m, n, k, hint\nmm,1,512,4096,\nmm,16,512,4096,\naddmm+gelu,symbolic,64,4096,512\n"
    expected = [
        Shape("mm", 1, 512, 4096, bias="none"), Shape("mm", 16, 512, 4096, bias="none"),
        Shape("addmm+gelu", None, 64, 4096, bias="row", hint=512),
    ]  # fmt: skip
    assert read(file("s.yaml", yaml)) == read(file("s.json", as_json)) == read(file("s.csv", csv)) == expected


def test_each_problem_once_in_order(file):
    shapes = read(file("s.csv", "m,n,k\n2,3,4\n1,3,4\n2,3,4\n"))
    assert [s.m for s in shapes] == [2, 1]


BAD = {
    "s.txt": ("x", "ends in none of"),
    "a.json": ("", "not JSON"),
    "b.json": ("[" * 100_000, "nested"),
    "c.json": ("3", "no list of problems"),
    "d.json": ("[]", "names no problem"),
    "e.json": ('{"shapes": [], "more": 1}', "and no others"),
    "f.json": ('{"shapes": [{"m": 1, "n": 1, "k": 1}], "defaults": []}', "no list of problems"),
    "g.json": ("[3]", "problem 1 is not an object"),
    "h.json": ('[{"m": 1, "n": 1, "k": 1}, {"m": 1, "n": 1, "k": 1, "exec": "rm"}]', "problem 2: unknown exec"),
    "i.json": ('[{"m": 1, "n": -1, "k": 1}]', "n is -1, not a whole number"),
    "j.json": ('[{"m": 1, "n": 1.5, "k": 1}]', "n is 'float'"),
    "k.json": ('[{"m": 1, "n": true, "k": 1}]', "n is 'bool'"),
    "l.json": ('[{"m": 1, "n": 2147483648, "k": 1}]', "n is 2147483648"),
    "m.json": ('[{"m": 1, "n": 1' + "0" * 4000 + ', "k": 1}]', "a number of 13"),
    "n.json": ('[{"m": 1, "n": 1' + "0" * 5000 + ', "k": 1}]', "not JSON"),
    "o.json": ('[{"m": 1, "k": 1}]', "n is 0"),
    "p.json": ('[{"op": "conv", "m": 1, "n": 1, "k": 1}]', "op is 'conv'"),
    "q.json": ('[{"op": ["mm", {}], "m": 1, "n": 1, "k": 1}]', "op is 'dict'"),
    "r.json": ('[{"op": "mm+", "m": 1, "n": 1, "k": 1}]', "op is 'mm\\+'"),
    "s.json": ('[{"dtype": "fp4", "m": 1, "n": 1, "k": 1}]', "dtype is 'fp4', not one of f32"),
    "t.json": ('[{"batch": 4, "m": 1, "n": 1, "k": 1}]', "mm has no batch"),
    "u.json": ('[{"residual": 1, "m": 1, "n": 1, "k": 1}]', "residual is 1, not true or false"),
    "w1.json": ('[{"scaling": "block", "m": 1, "n": 1, "k": 1}]', "scaling: of scaled_mm, grouped_mm only"),
    "w2.json": (
        '[{"op": "scaled_mm", "m": 1, "n": 1, "k": 1, "dtype": "bf16"}]',
        "dtype is 'bf16', not one of f8E4M3FN",
    ),
    "w3.json": ('[{"op": "scaled_mm", "m": 1, "n": 1, "k": 1, "batch": 2}]', "scaled_mm has no batch"),
    "w4.json": ('[{"op": "grouped_mm", "m": 1, "n": 1, "k": 1}]', "groups is 0, not a whole number"),
    "w5.json": ('[{"op": "grouped_mm", "m": 1, "n": 1, "k": 1, "groups": 513}]', "groups is 513; at most 512"),
    "w6.json": ('[{"op": "grouped_mm", "m": 1, "n": 1, "k": 1, "groups": 2, "bias": "row"}]', "grouped_mm has no bias"),
    "v.json": (json.dumps([{"m": [*range(1, 999)], "n": [*range(1, 999)], "k": 1}]), "stands for 996004 problems"),
    "w.json": (b"\xff\xfe[]", "not UTF-8"),
    "a.yaml": ("!!python/object/apply:os.system ['true']", "more than plain data"),
    "b.yaml": ("a: &a [*a, *a]\nshapes: *a", "no others"),
    "c.yaml": ("shapes: &a [*a]", "problem 1 is not an object"),
    "d.yaml": ("[" * 20_000, "not YAML|nested"),
    "e.yaml": ("- {m: 2001-01-01, n: 1, k: 1}", "m is 'date'"),
    "a.csv": ("m,n,k\n1,2\n", "more or fewer fields"),
    "b.csv": ("m,n,k\n1,2,3,4\n", "more or fewer fields"),
    "c.csv": ('m,n,k\n"1,2,3\n', "not CSV|fewer"),
    "d.csv": ("m,n,k\n1,=cmd,3\n", "n is '=cmd'"),
    "e.csv": ("m,n,k\n1," + "9" * 200_000 + ",3\n", "not CSV|n is"),
    "f.csv": ("", "names no problem"),
    "g.csv": ("m,n,k\n1,--5,3\n", "n is '--5'"),
    "h.csv": ("m,n,k, m\n1,2,3,4\n", "'m' is there twice"),
    "x.json": ('[{"m": 1, "n": 1, "k": 1, "m": 16}]', "'m' is there twice"),
    "f.yaml": ("- {m: 1, n: 1, k: 1, m: 16}", "'m' is there twice"),
    "g.yaml": ("defaults: {k: 1, k: 2}\nshapes: [{m: 1, n: 1}]", "'k' is there twice"),
    "h.yaml": ("- {m: 1, k: 1, n: 1" + ":1" * 1_000_000 + "}", "n is '1:1"),
    "i.yaml": ("- {m: 1, k: 1, n: 1" + ":1" * 1000 + ".5}", "n is '1:1"),
    "j.yaml": (f"- &a {{m: {[1] * 300}, n: {[1] * 300}, k: 1}}\n" + "- *a\n" * 1000, "more than 100000 problems"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_with_a_reason(file, name):
    text, reason = BAD[name]
    with pytest.raises(ShapesError, match=reason):
        read(file(name, text))


def test_what_yaml_says_with_anchors_is_taken(file):
    text = "- &a {op: mm, m: 1, n: 8, k: 4}\n- {<<: *a, m: 16}\n- {<<: [*a, *a], n: 0x10}\n"
    assert [(s.m, s.n) for s in read(file("s.yaml", text))] == [(1, 8), (16, 8), (1, 16)]


def test_files_that_are_too_large_or_not_there(file, tmp_path):
    with pytest.raises(ShapesError, match="more than 8388608 bytes"):
        read(file("s.json", b" " * (9 << 20)))
    with pytest.raises(ShapesError, match="cannot be read"):
        read(tmp_path / "none.json")
    with pytest.raises(ShapesError, match="cannot be read"):
        read(tmp_path)


def test_yaml_without_its_package(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ShapesError, match=r"pip install 'flykernels\[shapes\]'"):
        read(file("s.yaml", "[]"))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
names = st.sampled_from(["m", "n", "k", "op", "shapes", "x"])
row = st.dictionaries(names, scalars | st.lists(scalars, max_size=3), max_size=4)
json_values = scalars | row | st.lists(row | scalars, max_size=3) | st.dictionaries(names, st.lists(row, max_size=2))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(json_values)
def test_any_json_is_read_or_refused(tmp_path_factory, value):

    path = tmp_path_factory.mktemp("s") / "s.json"
    path.write_text(json.dumps(value))
    with contextlib.suppress(ShapesError):
        assert all(isinstance(shape, Shape) and shape.n >= 1 for shape in read(path))
