"""Linked code objects: what their metadata says, damaged ones, and the ways to link."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass

import pytest

from flykernels.lang import Global, Layout, bf16, constant, f32, i32, trace
from flykernels.lang.memory import advance
from flykernels.targets import amd_link, amd_metadata, gfx950

LINKERS = [name for name, there in (("lld", amd_link.find_lld()), ("triton", amd_link.find_triton())) if there]


@dataclass(frozen=True)
class Waves:
    workgroup_size: int = 256


def kernel(k, p, c):
    _, y, _ = k.args(x=Global(bf16, ("m",)), y=Global(f32, ("m",)), m=i32)
    board = k.shared(f32, Layout.compact(256))
    board.write(advance(board.pointer, k.thread, f32), constant(1.0, f32), 4)
    k.barrier()
    neighbour = board.read(advance(board.pointer, k.thread ^ 1, f32), None, 4)
    y.write(advance(y.pointer, k.thread, f32), neighbour, 4)


@pytest.fixture(scope="module")
def code():
    return gfx950.compile(trace(kernel, gfx950, None, Waves(), name="mine"))


def test_costs_come_from_the_linked_object_and_agree_with_the_assembly(code):
    (meta,) = amd_metadata.kernels(code.binary)
    assert meta[".name"] == "mine" and meta[".wavefront_size"] == 64
    assert meta[".max_flat_workgroup_size"] == 256 == code.workgroup_size
    said = lambda what: int(re.search(rf"\.{what}:\s+(\d+)", code.text)[1])
    assert (code.registers, code.sgprs, code.agprs) == tuple(map(said, ("vgpr_count", "sgpr_count", "agpr_count")))
    assert code.shared_bytes == said("group_segment_fixed_size") >= 1024
    assert code.spills == 0 and code.scratch_bytes == said("private_segment_fixed_size") == 0
    offsets = [(a[".offset"], a[".size"]) for a in meta[".args"]]
    assert offsets == [(0, 8), (8, 8), (16, 4)]


@pytest.mark.parametrize("linker", LINKERS)
def test_every_linker_of_this_machine_gives_the_same_kernel(linker, code, monkeypatch):
    monkeypatch.setattr(amd_link, "find_lld", amd_link.find_lld if linker == "lld" else lambda: None)
    other = gfx950.compile(trace(kernel, gfx950, None, Waves(), name="mine"))
    for field in ("registers", "agprs", "sgprs", "spills", "shared_bytes", "scratch_bytes", "arguments", "text"):
        assert getattr(other, field) == getattr(code, field), field


@pytest.mark.parametrize("damage, words", [
    (lambda b: b"", "not a 64-bit"), (lambda b: b[:100], "cut off"), (lambda b: b"MZ" + b[2:], "not a 64-bit"),
    (lambda b: b.replace(b"AMDGPU\0", b"AMDCPU\0"), "no AMDGPU metadata"),
    (lambda b: b.replace(b"amdhsa.kernels", b"amdhsa.colonel"), "damaged"),
])  # fmt: skip
def test_damaged_objects_are_refused(code, damage, words):
    with pytest.raises(amd_metadata.MetadataError, match=words):
        amd_metadata.kernels(damage(code.binary))


@pytest.mark.parametrize("data, value", [
    (b"\x07", 7), (b"\xe0", -32), (b"\xc0", None), (b"\xc3", True), (b"\xcd\x01\x00", 256), (b"\xd1\xff\x00", -256),
    (b"\xa2hi", "hi"), (b"\xd9\x02hi", "hi"), (b"\x92\x01\xa1a", [1, "a"]), (b"\x81\xa1a\xc2", {"a": False}),
    (b"\xdc\x00\x01\x05", [5]), (b"\xde\x00\x01\x01\x02", {1: 2}), (b"\xc4\x02hi", b"hi"), (b"\xcb" + bytes(8), 0.0),
])  # fmt: skip
def test_message_pack(data, value):
    assert amd_metadata._unpack(data, 0) == (value, len(data))


def test_linking_prefers_lld_and_says_which():
    assert amd_link.linker() == ("MLIR's assembler and ld.lld" if "lld" in LINKERS else "Triton's assembler and linker")


def test_lld_is_looked_for_in_rocm_first(tmp_path, monkeypatch):
    there = tmp_path / "llvm" / "bin" / "ld.lld"
    there.parent.mkdir(parents=True)
    there.write_text("#!/bin/sh\n")
    there.chmod(0o755)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    amd_link.find_lld.cache_clear()
    assert amd_link.find_lld() == str(there)
    monkeypatch.undo()
    amd_link.find_lld.cache_clear()


def test_temporary_files_may_lie_anywhere(tmp_path, monkeypatch):
    """With a linker that hands on what it is given: the kernel's description is in the object already."""
    linker, folder = tmp_path / "ld.lld", tmp_path / "it's a {folder}; really"
    each = 'case "$1" in -o) out=$2; shift ;; -*) ;; *) in=$1 ;; esac; shift'
    linker.write_text(f'#!/bin/sh\nwhile [ $# -gt 0 ]; do {each}; done\ncat "$in" > "$out"\n')
    linker.chmod(0o755)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(amd_link, "find_lld", lambda: str(linker))
    assert gfx950.compile(trace(kernel, gfx950, None, Waves(), name="mine")).registers > 0
    assert not list(folder.iterdir())
