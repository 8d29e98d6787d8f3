"""What is not whole or not for here is refused, with a reason, and nothing is written then."""

from __future__ import annotations

import gzip
import json
import tarfile

import pytest

from tests.cache.making import archive, bundle, files, fill, packed, parts, records, refused
from tuning_cache import Accept, BundleError, Limits, Store, export, import_, verify
from tuning_cache.archive import END, header
from tuning_cache.manifest import Manifest

# -- refused: every byte


def test_every_changed_byte_is_refused(tmp_path):
    """Manifest, entry, code object, tar headers, padding and end: every eleventh byte (`bench cache`: every one)."""
    path = bundle(tmp_path, count=1, size=16)
    data = path.read_bytes()
    damaged = tmp_path / "damaged.tar"
    for at in range(0, len(data), 11):
        flip = (0x01, 0x20, 0x80, 0xFF)[at % 4]
        damaged.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
        with pytest.raises(BundleError):
            verify(damaged)
    store = Store([tmp_path / "target"])
    for at in range(0, len(data), 397):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
        with pytest.raises(BundleError):
            import_(store, damaged)
    assert not files(tmp_path / "target")


def test_every_changed_byte_of_a_compressed_bundle_is_refused_or_changes_nothing(tmp_path):
    path = bundle(tmp_path, "b.tar.gz", count=1, size=16)
    data, whole = path.read_bytes(), verify(path)
    damaged, same = tmp_path / "damaged.tar.gz", 0
    for at in (*range(10), *range(10, len(data), 7)):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            assert verify(damaged) == whole
            same += 1
        except BundleError:
            pass
    assert same <= 6  # gzip's own header: time, level and system, which nobody reads


@pytest.mark.parametrize("name", ["b.tar", "b.tar.gz"])
def test_a_bundle_that_is_cut_off_is_refused(tmp_path, name):
    data = bundle(tmp_path, name, count=1).read_bytes()
    cut = tmp_path / "cut.tar"
    for size in (*range(0, len(data), 61), len(data) - 1):
        cut.write_bytes(data[:size])
        with pytest.raises(BundleError):
            verify(cut)
    refused(tmp_path, cut, "cut off|damaged")


def test_every_changed_byte_in_a_store_is_never_loaded(tmp_path):
    """An entry and its code object in a directory: skipped, or read as it was (white space)."""
    made = fill(Store([tmp_path]), 1, size=16)[0]
    entry_file, object_file = next(tmp_path.glob("entries/*/*")), next(tmp_path.glob("objects/*/*"))
    digest = made.timings["flykernels t=1"].artefact
    for path in (entry_file, object_file):
        data = path.read_bytes()
        for at in range(0, len(data), 3):
            path.write_bytes(data[:at] + bytes([data[at] ^ (0x01, 0x20, 0x80, 0xFF)[at % 4]]) + data[at + 1 :])
            store = Store([tmp_path])
            if path is entry_file:
                assert store.lookup(made.key) in (None, made)
            else:
                assert store.load(digest) is None
        path.write_bytes(data)


# -- refused: what is not for here


@pytest.mark.parametrize(
    "accept, reason",
    [
        (Accept(targets=({"arch": "sm_90"},)), "it is for arch gfx950.*this is arch sm_90"),
        (Accept(targets=({"arch": "gfx950", "compute_units": 304},)), "compute_units 256.*compute_units 304"),
        (Accept(targets=()), "this is nothing"),
        (Accept(versions=({"plugin": "2"},)), "made by .*plugin 1.* here are plugin 2"),
        (Accept(versions=({"plugin": "1", "templates": "cd" * 32},)), "templates abab.*templates cdcd"),
        (Accept(versions=({"plugin": "1", "mlir": "other"},)), "mlir flydsl 0.5.0.*mlir other"),
    ],
)
def test_another_machine_or_version(tmp_path, accept, reason):
    refused(tmp_path, bundle(tmp_path), reason, accept=accept)


def test_a_machine_without_a_compiler_takes_a_bundle(tmp_path):
    verify(bundle(tmp_path), Accept(({"arch": "gfx950"},), ({"plugin": "1", "templates": "ab" * 32, "mlir": None},)))


def test_what_is_not_for_here_can_be_left_out(tmp_path):
    store = Store([tmp_path / "source"])
    fill(store, 2)
    fill(store, 3, target={"arch": "x86-64-v3", "threads": 2})
    path = export(store, tmp_path / "b.tar").path
    accept = Accept(targets=({"arch": "gfx950"},))
    refused(tmp_path, path, "x86-64-v3", accept=accept)
    done = import_(Store([tmp_path / "target2"]), path, accept, leave_out=True)
    assert (done.added, done.left_out) == (2, 3)
    assert {k.target["arch"] for k in Store([tmp_path / "target2"]).all_keys()} == {"gfx950"}
    assert done.objects == 2  # of the three that the other entries name


def test_a_newer_format(tmp_path):
    path = bundle(tmp_path)
    held = parts(path)
    manifest = json.loads(held[0][1])
    manifest["format"] = 3
    archive(path, [("manifest.json", json.dumps(manifest).encode()), *held[1:]])
    refused(tmp_path, path, "format 3; this version reads up to 2")


def test_an_older_format_can_be_unpacked(tmp_path):
    """Format 1 had entries and code objects as members: a cache directory in a tar."""
    refused(tmp_path, archive(tmp_path / "b.tar", [("manifest.json", b'{"format":1}')]), "unpack it with `tar xf`")


def test_an_entry_of_a_newer_format(tmp_path):
    newer = lambda held: {n: d.replace(b'"format":1', b'"format":2') if n[0] == "e" else d for n, d in held.items()}
    path = bundle(tmp_path, count=1)
    refused(tmp_path, packed(path, newer(records(path))), "format 2")


# -- refused: hostile archives

NAMES = {
    "../../etc/passwd": "leads out", "/etc/passwd": "leads out", "segments/../../x": "leads out",
    "segments/x.fks": "no name", "segments\\x.fks": "no name", "C:/x": "no name", "": "no name|damaged",
    "segments/entries-1-" + "b" * 64 + ".fks": "no name", "./manifest.json": "no name", "evil.py": "no name",
    "entries/bb/" + "b" * 64 + ".json": "no name",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere(tmp_path, name):
    path = bundle(tmp_path)
    refused(tmp_path, archive(path, [*parts(path), (name, b"x")]), NAMES[name])


@pytest.mark.parametrize("kind", "12345607xgLKSDV")
def test_everything_but_plain_files(tmp_path, kind):
    """Hard and symbolic links, devices, directories, pipes, and tar's extensions."""
    path = bundle(tmp_path)
    held = parts(path)
    first = held[1][0]
    info = tarfile.TarInfo(first)
    info.type, info.linkname, info.mode = kind.encode(), "/etc/passwd", 0o644
    data = path.read_bytes()
    at = data.index(first.encode(), 512 + len(held[0][1]))
    path.write_bytes(data[:at] + info.tobuf(tarfile.USTAR_FORMAT) + data[at:])
    refused(tmp_path, path, "plain files only|not one that .* writes")


@pytest.mark.parametrize("change", [{"mode": 0o4755}, {"uid": 1000}, {"mtime": 1}, {"uname": "root"}])
def test_headers_that_export_does_not_write(tmp_path, change):
    path = bundle(tmp_path)
    held = parts(path)
    info = tarfile.TarInfo(held[1][0])
    info.size, info.mode = len(held[1][1]), 0o644
    for name, value in change.items():
        setattr(info, name, value)
    data = path.read_bytes()
    at = data.index(held[1][0].encode(), 512 + len(held[0][1]))
    path.write_bytes(data[:at] + info.tobuf(tarfile.USTAR_FORMAT) + data[at + 512 :])
    refused(tmp_path, path, "tar header")


def test_names_that_come_twice(tmp_path):
    path = bundle(tmp_path)
    held = parts(path)
    refused(tmp_path, archive(path, [*held, held[1]]), "twice")


def test_files_that_the_manifest_does_not_name_or_names_in_vain(tmp_path):
    path = bundle(tmp_path)
    held = parts(path)
    for members in ([*held[:1], *held[2:]], held[:-1], [held[0], held[2], held[1], *held[3:]], held[1:], []):
        refused(tmp_path, archive(path, members), "manifest")
    refused(tmp_path, archive(path, held, END + b"more"), "follows the end")
    refused(tmp_path, archive(path, held, bytes(512)), "cut off")


def test_sizes_that_are_declared(tmp_path):
    path = bundle(tmp_path)
    held = parts(path)
    huge = header(held[1][0], 2**33 - 1)
    path.write_bytes(b"".join(header(n, len(d)) + d + bytes(-len(d) % 512) for n, d in held[:1]) + huge)
    refused(tmp_path, path, "the manifest says", limits=Limits(total=1 << 40))
    refused(tmp_path, path, "more than 1000000 bytes|at most 1000000", limits=Limits(total=1_000_000))
    info = tarfile.TarInfo(held[1][0])
    info.size = 2**70
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    refused(tmp_path, path, "bytes; at most|header|more than")
    digest = "ab" * 32
    sums = {f"segments/entries-00000000-{digest}.fks": (2**60, digest)}
    archive(path, [("manifest.json", Manifest(sums).to_bytes())])
    refused(tmp_path, path, "says that it holds 1152921504606846976 bytes")


def test_sizes_that_come(tmp_path):
    path = bundle(tmp_path)
    refused(tmp_path, path, "at most 100 are taken", limits=Limits(manifest=100))
    refused(tmp_path, path, "at most 50 are taken", limits=Limits(entry=50))
    refused(tmp_path, path, "at most 60 are taken", limits=Limits(object=60))
    refused(tmp_path, path, "at most 3000 are taken|more than 3000 bytes", limits=Limits(total=3000))


def test_a_decompression_bomb(tmp_path):
    """A gibibyte of zeros, as an entry, and after the end."""
    path = bundle(tmp_path)
    held = parts(path)
    bomb = tmp_path / "bomb.tar.gz"
    zeros = bytes(1 << 20)
    for start in (header(held[1][0], 1 << 30), END):
        with bomb.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw) as packed:
            packed.write(header("manifest.json", len(held[0][1])) + held[0][1] + bytes(-len(held[0][1]) % 512) + start)
            for _ in range(64):
                packed.write(zeros)
        refused(tmp_path, bomb, "has 1073741824 bytes, and the manifest says|follows the end")


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"{}", b"[" * 200_000, b'{"format":' + b"9" * 5000 + b"}", b"\xff\xfe", b'{"format":true}'],
)
def test_manifests_that_are_none(tmp_path, text):
    refused(tmp_path, archive(tmp_path / "b.tar", [("manifest.json", text)]), "manifest")


def test_things_that_are_no_bundle(tmp_path):
    for data in (b"", b"PK\x03\x04", b"\x1f\x8b", b"\x1f\x8b\x08", bytes(10_000), b"x" * 10_000):
        (tmp_path / "b").write_bytes(data)
        refused(tmp_path, tmp_path / "b", ".")
    refused(tmp_path, tmp_path / "none", "cannot be read")
    refused(tmp_path, tmp_path, "cannot be read")
