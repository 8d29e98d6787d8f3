"""Bundles: what goes out comes in again, what is not whole or not for here is refused, and nothing is written then."""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cache.making import MI350, code, files, fill, key
from tuning_cache import Accept, BundleError, Entry, Limits, Store, Timing, export, import_, join, prune, verify
from tuning_cache.archive import END, header
from tuning_cache.manifest import Manifest, each_once


def bundle(folder: Path, name: str = "b.tar", **fill_options) -> Path:
    store = Store([folder / "source"])
    fill(store, **fill_options)
    return export(store, folder / name).path


def archive(path: Path, members: list[tuple[str, bytes]], end: bytes = END) -> Path:
    path.write_bytes(b"".join(header(n, len(d)) + d + bytes(-len(d) % 512) for n, d in members) + end)
    return path


def parts(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar]


def rewritten(path: Path, change) -> Path:
    """The bundle with changed files, and a manifest that fits them: what a forger without a key would make."""
    held = change(dict(parts(path)[1:]))
    entries = [Entry.from_json(d.decode()) for n, d in held.items() if n.startswith("entries")]
    sums = {n: (len(d), hashlib.sha256(d).hexdigest()) for n, d in sorted(held.items())}
    known = each_once(e.key.target for e in entries), each_once(e.key.versions for e in entries)
    return archive(path, [("manifest.json", Manifest(sums, *known).to_bytes()), *sorted(held.items())])


def refused(tmp_path: Path, path: Path, match: str, **options) -> None:
    target = tmp_path / "target"
    store = Store([target])
    fill(store, 1, measured=False)
    before = files(target)
    with pytest.raises(BundleError, match=match):
        import_(store, path, **options)
    with pytest.raises(BundleError, match=match):
        verify(path, **options)
    assert files(target) == before
    assert not list(target.glob(".staging-*"))


# -- there and back


@pytest.mark.parametrize("name", ["b.tar", "b.tar.gz"])
def test_what_goes_out_comes_in(tmp_path, name):
    path = bundle(tmp_path, name)
    store = Store([tmp_path / "target"])
    done = import_(store, path)
    assert (done.added, done.merged, done.kept, done.objects, done.missing) == (3, 0, 0, 3, 0)
    assert files(tmp_path / "target") == files(tmp_path / "source")
    entry = Store([tmp_path / "target"]).lookup(key(2))
    assert entry.best().microseconds == 12 and store.load(entry.best().artefact).binary == code(2).binary
    again = import_(store, path)
    assert (again.added, again.merged, again.kept) == (0, 0, 3)


def test_the_same_content_gives_the_same_bytes(tmp_path):
    one = bundle(tmp_path).read_bytes()
    store = Store([tmp_path / "target"])
    import_(store, tmp_path / "b.tar")
    assert export(store, tmp_path / "c.tar").path.read_bytes() == one


def test_a_bundle_that_is_unpacked_is_a_layer(tmp_path):
    with tarfile.open(bundle(tmp_path)) as tar:
        tar.extractall(tmp_path / "layer", filter="data")
    store = Store([tmp_path / "mine", tmp_path / "layer"])
    entry = store.lookup(key(1))
    assert entry.winner and store.load(entry.best().artefact) is not None


def test_winners_only_and_a_selection(tmp_path):
    store = Store([tmp_path / "source"])
    made = fill(store, 2)
    other = store.add(code(9))
    store.update(key(1), lambda e: e.with_timing(Timing("flykernels t=3", 30.0, {"t": 3}, other)))
    assert export(store, tmp_path / "all.tar").manifest.objects == 3
    assert export(store, tmp_path / "won.tar", winners_only=True).manifest.objects == 2
    assert verify(tmp_path / "won.tar").missing == 0
    one = export(store, tmp_path / "one.tar", wanted=lambda e: e.key == made[0].key)
    assert (one.manifest.entries, one.manifest.targets) == (1, (MI350,))


def test_artefacts_that_are_lost_are_counted(tmp_path):
    store = Store([tmp_path / "source"])
    fill(store, 2)
    next((tmp_path / "source").glob("objects/*/*")).unlink()
    assert export(Store([tmp_path / "source"]), tmp_path / "b.tar").missing == 1
    assert import_(Store([tmp_path / "target"]), tmp_path / "b.tar").missing == 1


def test_a_candidate_of_several_code_objects(tmp_path):
    """As eager operators have: forward, and what the backward pass needs."""
    store = Store([tmp_path / "source"])
    one, two, three = (store.add(code(n)) for n in (1, 2, 3))
    store.update(key(1), lambda e: e.with_timing(Timing("flykernels", 1.0, {}, f"{one}|{two}+{three}")))
    assert export(store, tmp_path / "b.tar").manifest.objects == 3
    target = Store([tmp_path / "target"])
    assert import_(target, tmp_path / "b.tar").objects == 3 and target.load(three) is not None
    assert prune(target, 10**9).objects == 0 and prune(target, 0).objects == 3


def test_an_empty_cache_makes_an_empty_bundle(tmp_path):
    path = export(Store([tmp_path / "none"]), tmp_path / "b.tar").path
    assert import_(Store([tmp_path / "target"]), path).added == 0


# -- merging


def test_measured_is_never_lowered(tmp_path):
    compiled = bundle(tmp_path, "compiled.tar", measured=False)
    store = Store([tmp_path / "target"])
    fill(store)
    before = [store.newest(key(n)) for n in (1, 2, 3)]
    assert import_(store, compiled).kept == 3
    assert [store.newest(key(n)) for n in (1, 2, 3)] == before


def test_measured_goes_over_compiled(tmp_path):
    measured = bundle(tmp_path)
    store = Store([tmp_path / "target"])
    fill(store, 1, measured=False)
    assert not store.lookup(key(1)).winner
    done = import_(store, measured)
    assert (done.added, done.merged) == (2, 1)
    assert store.lookup(key(1)).winner == "flykernels t=1"  # also in a process that has looked before
    assert store.lookup(key(1)).source == "measured"


def test_of_two_measured_entries_the_one_here_stays_and_learns(tmp_path):
    other = Store([tmp_path / "source"])
    fill(other, 1)
    other.update(key(1), lambda e: replace(e.with_timing(Timing("triton", 1.0)), winner="triton"))
    export(other, tmp_path / "b.tar")
    store = Store([tmp_path / "target"])
    fill(store, 1)
    assert import_(store, tmp_path / "b.tar").merged == 1
    entry = store.newest(key(1))
    assert entry.winner == "flykernels t=1" and entry.timings["triton"].microseconds == 1.0


def test_what_is_quarantined_here_does_not_win(tmp_path):
    path = bundle(tmp_path)
    store = Store([tmp_path / "target"])
    wrong = Timing("flykernels t=1", float("inf"), {"t": 1}, None, "Wrong: 3 results differ")
    store.update(key(1), lambda e: e.with_timing(wrong))
    import_(store, path)
    entry = store.newest(key(1))
    assert entry.winner is None and entry.timings["flykernels t=1"] == wrong


def test_compilers_do_not_mix(tmp_path):
    path = bundle(tmp_path, mlir="another 9")
    store = Store([tmp_path / "target"])
    fill(store, 1)
    fill(store, 2, measured=False)  # 1 becomes compiled only
    before = store.newest(key(2), any_compiler=True)
    assert before.source == "compiled"
    import_(store, path)
    after = store.newest(key(2), any_compiler=True)
    assert after.key.versions["mlir"] == "another 9" and after.winner
    measured_here = bundle(tmp_path / "x", mlir="a third")
    import_(store, measured_here)
    assert store.newest(key(2), any_compiler=True) == after


def test_bundles_join(tmp_path):
    one, two = bundle(tmp_path / "a", count=2, measured=False), bundle(tmp_path / "b", count=3)
    made = join([one, two], tmp_path / "c.tar")
    assert made.manifest.entries == 3
    store = Store([tmp_path / "target"])
    import_(store, tmp_path / "c.tar")
    assert all(store.lookup(key(n)).winner for n in (1, 2, 3))
    with pytest.raises(BundleError, match=r"none\.tar"):
        join([one, tmp_path / "none.tar"], tmp_path / "d.tar")
    assert not (tmp_path / "d.tar").exists()


# -- refused: every byte


def test_every_changed_byte_is_refused(tmp_path):
    """Manifest, entry, code object, tar headers, padding and end: each byte in turn."""
    path = bundle(tmp_path, count=1, size=16)
    data = path.read_bytes()
    damaged = tmp_path / "damaged.tar"
    for at in range(len(data)):
        flip = (0x01, 0x20, 0x80, 0xFF)[at % 4]
        damaged.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
        with pytest.raises(BundleError):
            verify(damaged)
    store = Store([tmp_path / "target"])
    for at in range(0, len(data), 97):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
        with pytest.raises(BundleError):
            import_(store, damaged)
    assert not files(tmp_path / "target")


def test_every_changed_byte_of_a_compressed_bundle_is_refused_or_changes_nothing(tmp_path):
    path = bundle(tmp_path, "b.tar.gz", count=1, size=16)
    data, whole = path.read_bytes(), verify(path)
    damaged, same = tmp_path / "damaged.tar.gz", 0
    for at in range(len(data)):
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
        for at in range(len(data)):
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
    assert {Entry.from_json(p.read_text()).key.target["arch"] for p in (tmp_path / "target2").glob("entries/*/*")} == {
        "gfx950"
    }
    assert done.objects == 2  # of the three that the other entries name


def test_a_newer_format(tmp_path):
    path = bundle(tmp_path)
    held = parts(path)
    manifest = json.loads(held[0][1])
    manifest["format"] = 2
    archive(path, [("manifest.json", json.dumps(manifest).encode()), *held[1:]])
    refused(tmp_path, path, "format 2; this version reads up to 1")


def test_an_entry_of_a_newer_format(tmp_path):
    def newer(held):
        return {n: d.replace(b'"format": 1', b'"format": 2') if n[0] == "e" else d for n, d in held.items()}

    path = bundle(tmp_path, count=1)
    held = newer(dict(parts(path)[1:]))
    sums = {n: (len(d), hashlib.sha256(d).hexdigest()) for n, d in held.items()}
    archive(path, [("manifest.json", Manifest(sums, (MI350,), (key().versions,)).to_bytes()), *sorted(held.items())])
    refused(tmp_path, path, "format 2")


# -- refused: hostile archives

NAMES = {
    "../../etc/passwd": "leads out", "/etc/passwd": "leads out", "entries/../../x": "leads out",
    "entries/ab/x.json": "no name", "entries\\ab\\x": "no name", "C:/x": "no name", "": "no name|damaged",
    "entries/aa/" + "b" * 64 + ".json": "no name", "./manifest.json": "no name", "evil.py": "no name",
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
    refused(tmp_path, path, "says that it has 8589934591 bytes")
    info = tarfile.TarInfo(held[1][0])
    info.size = 2**70
    path.write_bytes(header("manifest.json", 0)[:0] + info.tobuf(tarfile.GNU_FORMAT))
    refused(tmp_path, path, "bytes; at most|header")
    sums = {held[1][0]: (2**60, "ab" * 32)}
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
        refused(tmp_path, bomb, "says that it has 1073741824 bytes|follows the end")


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


# -- refused: forged contents under a manifest that fits


def forged_entry(held: dict, change) -> dict:
    name = next(n for n in held if n.startswith("entries"))
    body = json.loads(held[name])["entry"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    file = {"format": 1, "sha256": hashlib.sha256(text.encode()).hexdigest(), "entry": body}
    return {**held, name: json.dumps(file).encode()}


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["timings"]["aten mm"].update(microseconds="fast"),
        lambda b: b["timings"]["aten mm"].update(microseconds=-1.0),
        lambda b: b["timings"]["aten mm"].update(microseconds=True),
        lambda b: b["timings"]["aten mm"].update(name="other"),
        lambda b: b["timings"]["flykernels t=1"].update(artefact="../../../../etc/passwd"),
        lambda b: b["timings"]["flykernels t=1"].update(config=[1]),
        lambda b: b.update(winner=3),
        lambda b: b.update(source="rumour"),
        lambda b: b.update(timings=[]),
    ],
)
def test_entries_of_wrong_types(tmp_path, change):
    path = bundle(tmp_path, count=1)
    held = forged_entry(dict(parts(path)[1:]), change)
    sums = {n: (len(d), hashlib.sha256(d).hexdigest()) for n, d in sorted(held.items())}
    archive(path, [("manifest.json", Manifest(sums, (MI350,), (key().versions,)).to_bytes()), *sorted(held.items())])
    refused(tmp_path, path, "not an entry")


def test_an_entry_under_another_keys_name(tmp_path):
    path = bundle(tmp_path, count=2)

    def swap(held):
        one, two = [n for n in held if n.startswith("entries")]
        return {**held, one: held[two], two: held[one]}

    refused(tmp_path, rewritten(path, swap), "entry of another key")


def test_a_code_object_under_another_name_or_that_nobody_wants(tmp_path):
    path = bundle(tmp_path, count=1)

    def replaced(held):
        name = next(n for n in held if n.startswith("objects"))
        return {**held, name: code(77).to_bytes()}

    def extra(held):
        other = code(78)
        return {**held, f"objects/{other.digest[:2]}/{other.digest}.fko": other.to_bytes()}

    refused(tmp_path, rewritten(path, replaced), "holds a code object of the digest")
    refused(tmp_path, rewritten(bundle(tmp_path, count=1), extra), "no entry of the bundle names")


def test_a_manifest_that_lies_about_targets(tmp_path):
    path = bundle(tmp_path)
    held = parts(path)
    manifest = replace(Manifest.from_bytes(held[0][1]), targets=({"arch": "sm_90"},))
    refused(tmp_path, archive(path, [("manifest.json", manifest.to_bytes()), *held[1:]]), "not those of the entries")


def test_a_place_that_cannot_be_written(tmp_path):
    path = bundle(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BundleError, match="cannot be written"):
        import_(Store([tmp_path / "file"]), path)
    with pytest.raises(BundleError, match="cannot be written"):
        export(Store([tmp_path / "source"]), tmp_path / "none" / "b.tar")
    assert (tmp_path / "file").read_text() == "in the way" and not list(tmp_path.glob(".*.part"))
