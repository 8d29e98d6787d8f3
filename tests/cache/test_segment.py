"""Segments: found as fast as they are many, hidden by what is newer, folded and pruned without a loss."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.making import bundle, code, files, fill, held, key
from tuning_cache import Store, Timing, export, fold, import_, prune, segment
from tuning_cache.bringing import SEGMENTS_MOST
from tuning_cache.layer import Layer
from tuning_cache.prune import STALE_SECONDS, YOUNG_SECONDS, _Pruning

HOUR = segment.HOUR


def address(n: int) -> bytes:
    return hashlib.sha256(b"%d" % n).digest()


def written(folder: Path, rows: dict[bytes, bytes]) -> segment.Segment:
    ((path, digest),) = segment.write(folder, "entries", sorted(rows.items()))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    return segment.Segment(path)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 700), st.integers(0, 10**6), st.binary(max_size=20))
def test_what_is_written_is_found(tmp_path_factory, count, start, extra):
    rows = {address(start + n): b"%d" % n + extra for n in range(count)}
    part = written(tmp_path_factory.mktemp("s"), rows)
    part.check()
    assert {a: c for a, _, c in part.records()} == rows and part.count == count
    for a, content in rows.items():
        assert part.read(part.find(a)) == content
    assert all(part.find(address(-1 - n)) is None for n in range(50))
    assert (part.first(), part.last()) == (min(rows), max(rows))


def test_addresses_that_are_not_spread(tmp_path):
    """No SHA-256s: found, or not found, and nothing worse."""
    rows = {bytes(28) + n.to_bytes(4, "big"): b"x" for n in range(1, 3000)}
    assert written(tmp_path, rows).find(bytes(28) + (7).to_bytes(4, "big")) is not None
    with pytest.raises(ValueError, match="rising"):
        segment.write(tmp_path, "entries", [(address(1), b""), (address(1), b"")])
    assert len(list(tmp_path.iterdir())) == 1


def test_records_are_divided_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(segment, "PART_BYTES", 1000)
    source = Store([tmp_path / "source"])
    fill(source, 12)
    path = export(source, tmp_path / "b.tar").path
    store = Store([tmp_path / "target"])
    assert import_(store, path).added == 12
    assert len(store.layers[0].segments("entries")) > 3 and held(tmp_path / "target") == held(tmp_path / "source")


def test_a_file_of_its_own_hides_a_segment_and_a_newer_segment_an_older(tmp_path):
    import_(Store([tmp_path / "mine"]), bundle(tmp_path, count=2))
    store = Store([tmp_path / "mine"])
    store.update(key(1), lambda e: replace(e.with_timing(Timing("triton", 1.0)), winner="triton"))
    assert Store([tmp_path / "mine"]).lookup(key(1)).winner == "triton"
    assert "flykernels t=1" in Store([tmp_path / "mine"]).lookup(key(1)).timings
    assert Store([tmp_path / "mine"]).lookup(key(2)).winner == "flykernels t=1"
    fold(store)
    assert Store([tmp_path / "mine"]).lookup(key(1)).winner == "triton"


def test_an_open_store_sees_what_is_imported_and_folded_elsewhere(tmp_path):
    store = Store([tmp_path / "mine"])
    assert store.lookup(key(1)) is None
    import_(Store([tmp_path / "mine"]), bundle(tmp_path))
    assert store.lookup(key(1)).winner
    fill(Store([tmp_path / "mine"]), 4)
    fold(Store([tmp_path / "mine"]))
    assert store.lookup(key(4)).winner and store.load(store.lookup(key(4)).best().artefact) is not None


def test_what_an_import_brings_is_merged_into_files_that_hide_it(tmp_path):
    path = bundle(tmp_path, count=2)
    store = Store([tmp_path / "mine"])
    store.update(key(1), lambda e: e.with_timing(Timing("triton", 5.0)))
    done = import_(store, path)
    assert (done.added, done.merged) == (1, 1)
    entry = Store([tmp_path / "mine"]).lookup(key(1))
    assert entry.winner == "flykernels t=1" and entry.timings["triton"].microseconds == 5.0


def test_segments_that_become_many_are_folded(tmp_path):
    store = Store([tmp_path / "mine"])
    for n in range(1, SEGMENTS_MOST + 3):
        one = Store([tmp_path / f"source{n}"])
        fill(one, 1, target={"arch": f"x{n}"})
        assert import_(store, export(one, tmp_path / "b.tar").path).added == 1
    assert len(store.layers[0].segments("entries")) < SEGMENTS_MOST
    assert len(list(store.all_keys())) == SEGMENTS_MOST + 2


def test_folding_keeps_what_is_damaged_newer_or_being_tuned_where_it_is(tmp_path):
    made = fill(Store([tmp_path]), 4)
    path = {n: next(tmp_path.glob(f"entries/*/{key(n).digest}.json")) for n in (1, 2, 3)}
    path[1].write_text("{")
    path[2].write_text(path[2].read_text().replace('"format": 1', '"format": 9'))
    before = [path[n].read_bytes() for n in (1, 2)]
    with Store([tmp_path]).lock(made[2].key):
        import threading

        other = threading.Thread(target=fold, args=(Store([tmp_path]),))
        other.start()
        other.join()
    assert [path[n].read_bytes() for n in (1, 2)] == before and path[3].exists()
    assert not list(tmp_path.glob(f"entries/*/{key(4).digest}.json")) and Store([tmp_path]).lookup(key(4)) == made[3]
    assert not list(tmp_path.glob("objects/*/*"))


def test_every_changed_byte_of_segments_in_a_store_is_never_loaded(tmp_path):
    """Every third byte (`bench cache`: every one) of records, rows, fan-out and footer: skipped, or as it was."""
    made = fill(Store([tmp_path]), 2, size=16)
    fold(Store([tmp_path]))
    digest = made[0].timings["flykernels t=1"].artefact
    for path in tmp_path.glob("segments/*.fks"):
        data = path.read_bytes()
        for at in range(0, len(data), 3):
            path.write_bytes(data[:at] + bytes([data[at] ^ (0x01, 0x20, 0x80, 0xFF)[at % 4]]) + data[at + 1 :])
            store = Store([tmp_path])
            assert [store.lookup(e.key) in (None, e) for e in made] == [True, True]
            code_object = store.load(digest)
            assert code_object is None or code_object.digest == digest
        path.write_bytes(data)
    assert Store([tmp_path]).lookup(made[0].key) == made[0]


@pytest.mark.parametrize("where", [1 << 63, (1 << 64) - 1, 1 << 40])
def test_a_row_that_leads_far_out_of_its_file_has_no_content(tmp_path, where):
    made = written(tmp_path, {address(n): b"content %d" % n for n in range(4)})
    data = bytearray(made.path.read_bytes())
    at = data.rindex(address(2)) + 32  # of its row: where the content lies
    data[at : at + 8] = where.to_bytes(8, "little")
    made.path.write_bytes(data)
    opened = segment.Segment(made.path)
    assert opened.read(opened.find(address(2))) == b""
    contents = {a: content for a, _, content in opened.records()}
    assert contents == {address(n): b"" if n == 2 else b"content %d" % n for n in range(4)}


def test_segments_cut_off_or_gone_are_passed_over(tmp_path, caplog):
    made = fill(Store([tmp_path]), 2)
    fold(Store([tmp_path]))
    path = next(tmp_path.glob("segments/entries*.fks"))
    data = path.read_bytes()
    for size in (0, 1, 30, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert Store([tmp_path]).lookup(made[0].key) is None
    assert "skipped" in caplog.text
    path.write_bytes(data)
    store = Store([tmp_path])
    assert store.lookup(made[0].key) == made[0]
    os.truncate(path, 40)  # under an open store
    assert store.lookup(made[1].key) is None
    path.unlink()
    assert store.lookup(made[1].key) is None


# -- pruning


def test_what_was_used_longest_ago_goes_first_from_segments_too(tmp_path):
    store = Store([tmp_path])
    fill(store, 4)
    fold(store)
    for path in tmp_path.glob("segments/*"):
        os.utime(path, (time.time() - 5 * YOUNG_SECONDS,) * 2)
    for path in tmp_path.glob("segments/*.used"):
        path.unlink()
    store = Store([tmp_path])
    assert store.load(store.lookup(key(2)).best().artefact) is not None  # a use
    one = sum(len(d) for n, d in files(tmp_path).items() if n.endswith(".fks")) // 4
    assert prune(store, int(2.2 * one), dry_run=True).entries == 2 and len(list(Store([tmp_path]).all_keys())) == 4
    done = prune(store, int(2.2 * one))
    assert (done.entries, done.objects) == (2, 2) and done.left <= 2.2 * one
    assert Store([tmp_path]).lookup(key(2)) is not None and len(list(Store([tmp_path]).all_keys())) == 2
    part = Store([tmp_path]).layers[0].segments("entries")[0]
    part.check()
    record = part.find(bytes.fromhex(key(2).digest))
    assert part.used()[record.row] >= time.time() - 2 * HOUR  # kept in the new segment
    assert prune(Store([tmp_path]), unused_seconds=0).entries == 2
    assert not list(tmp_path.glob("segments/*"))


def test_what_is_hidden_or_damaged_goes(tmp_path):
    store = Store([tmp_path])
    fill(store, 3)
    fold(store)
    store.update(key(1), lambda e: e.with_timing(Timing("triton", 1.0)))
    part = next(tmp_path.glob("segments/entries*.fks"))
    data = bytearray(part.read_bytes())
    record = Store([tmp_path]).layers[0].segments("entries")[0].find(bytes.fromhex(key(2).digest))
    data[record.offset + 30] ^= 1
    part.write_bytes(data)
    done = prune(Store([tmp_path]))
    assert (done.entries, done.damaged) == (0, 1)
    assert Store([tmp_path]).layers[0].segments("entries")[0].count == 1
    assert Store([tmp_path]).lookup(key(1)).timings["triton"].microseconds == 1.0


def test_an_entry_in_a_segment_that_is_being_tuned_stays(tmp_path):
    made = fill(Store([tmp_path]), 2)
    fold(Store([tmp_path]))
    import threading

    with Store([tmp_path]).lock(made[0].key):
        other = threading.Thread(target=prune, args=(Store([tmp_path]), 0))
        other.start()
        other.join()
    assert [k.digest for k in Store([tmp_path]).all_keys()] == [made[0].key.digest]


@pytest.mark.parametrize("seconds", [-5e6, 4e12])
def test_files_of_a_clock_that_was_wrong_are_folded(tmp_path, seconds, monkeypatch):
    fill(Store([tmp_path]), 3)
    monkeypatch.setattr(
        sys.modules["tuning_cache.fold"], "_changed", lambda path: seconds
    )  # not every file system takes such times
    assert fold(Store([tmp_path])).files == 6
    assert all(Store([tmp_path]).lookup(key(n)) for n in (1, 2, 3)) and fold(Store([tmp_path])).entries == 3


@pytest.mark.parametrize("work", [prune, fold])
def test_what_is_imported_meanwhile_is_no_surprise(tmp_path, work, monkeypatch):
    """Where locks do not hold, or another process is at it."""
    path, every = bundle(tmp_path, count=3), Layer.every
    fill(Store([tmp_path / "here"]), 1)

    def late(self, kind):
        monkeypatch.setattr(Layer, "every", every)
        import_(Store([tmp_path / "here"]), path)
        return every(self, kind)

    monkeypatch.setattr(Layer, "every", late)
    work(Store([tmp_path / "here"]))
    assert all(Store([tmp_path / "here"]).lookup(key(n)) for n in (1, 2, 3))


def test_what_is_written_while_files_are_folded_is_not_lost(tmp_path, monkeypatch):
    """Between the reading of a file and its removal, however coarse the file system's clock is."""
    fill(Store([tmp_path]), 2)
    first = min(key(1), key(2), key=lambda k: k.digest)
    is_locked = Store.is_locked

    def late(self, address):
        monkeypatch.setattr(Store, "is_locked", is_locked)
        path = self.layers[0].file("entries", first.digest)
        before = path.stat().st_mtime_ns
        Store([tmp_path]).update(first, lambda e: e.with_timing(Timing("aten late", 1.0)))
        os.utime(path, ns=(before, before))
        return is_locked(self, address)

    monkeypatch.setattr(Store, "is_locked", late)
    fold(Store([tmp_path]))
    assert "aten late" in Store([tmp_path]).lookup(first).timings


def test_what_was_damaged_and_is_written_anew_is_not_pruned(tmp_path, monkeypatch):
    fill(Store([tmp_path]), 1)
    path = Store([tmp_path]).layers[0].file("entries", key(1).digest)
    path.write_text("{")
    named = _Pruning._named

    def late(self, found):
        fill(Store([tmp_path]), 1)
        return named(self, found)

    monkeypatch.setattr(_Pruning, "_named", late)
    assert prune(Store([tmp_path])).damaged == 0 and Store([tmp_path]).lookup(key(1)).winner


def test_what_a_killed_fold_has_left_goes(tmp_path):
    fill(Store([tmp_path]), 1)
    (tmp_path / "segments").mkdir()
    part = tmp_path / "segments" / ".entries-x.part"
    part.write_text("half")
    os.utime(part, (time.time() - 2 * STALE_SECONDS,) * 2)
    prune(Store([tmp_path]))
    assert not part.exists() and Store([tmp_path]).lookup(key(1)) is not None


def test_a_full_disk_while_folding_or_importing_changes_nothing(tmp_path, monkeypatch):
    """What is written goes beside the cache first: where that fails, everything is as it was."""
    path = bundle(tmp_path)
    store = Store([tmp_path / "mine"])
    fill(store, 2)
    store.add(code(9))
    before = files(tmp_path / "mine")

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment.Writer, "_put", full)
    with pytest.raises(OSError, match="No space"):
        fold(store)
    assert files(tmp_path / "mine") == before
    from tuning_cache import BundleError

    with pytest.raises(BundleError, match="cannot be written: No space"):
        import_(store, path)
    assert files(tmp_path / "mine") == before
