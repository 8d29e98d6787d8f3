"""What a network file system does that a local one does not: handles go stale, locks are not there, renames are
reported twice, changes are seen late, names of removed files linger. Each is done here by hand; none loses or tears
anything, none is fatal."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import filelock
import pytest

from tests.cache.making import bundle, code, files, fill, held, key
from tuning_cache import BundleError, Store, Timing, fold, import_, prune, segment
from tuning_cache.layer import damage

STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def stale(*_: object, **__: object) -> bytes:
    raise STALE


def torn(folder) -> list[str]:
    """What in a cache is damaged."""
    store = Store([folder])
    every = ((kind, *rest) for kind in ("entries", "objects") for rest in store.layers[0].every(kind))
    return [str(found) for kind, address, _, found in every if damage(kind, address, found.content)]


def test_a_stale_handle_is_a_miss(tmp_path, monkeypatch, caplog):
    made = fill(Store([tmp_path]), 2)
    fold(Store([tmp_path]))
    store = Store([tmp_path])
    with monkeypatch.context() as patch:
        patch.setattr(segment.os, "pread", stale)
        assert store.lookup(key(1)) is None and store.load(made[0].best().artefact) is None
        assert not store.has(made[0].best().artefact)
    assert "skipped" in caplog.text and os.strerror(errno.ESTALE) in caplog.text
    assert store.lookup(key(1)) == made[0]  # the server is back


def test_a_segment_that_was_folded_away_elsewhere_and_went_stale_is_replaced(tmp_path, monkeypatch):
    import_(Store([tmp_path / "mine"]), bundle(tmp_path, count=3))
    store = Store([tmp_path / "mine"])
    old = store.layers[0].segments("entries")
    fill(Store([tmp_path / "mine"]), 4)
    fold(Store([tmp_path / "mine"]))
    for part in old:
        monkeypatch.setattr(part, "find", stale)
    assert all(store.lookup(key(n)).winner for n in (1, 2, 3, 4))


@pytest.mark.parametrize("error", [NotImplementedError("no flock"), OSError(errno.ENOLCK, "No locks available")])
def test_without_locks_work_is_done_twice_and_nothing_is_torn(tmp_path, monkeypatch, caplog, error):
    def none(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", none)
    one, two = Store([tmp_path]), Store([tmp_path])
    with one.lock(key(1)) as first, two.lock(key(1)) as second:  # both tune
        assert (first, second) == (False, False)
        one.update(key(1), lambda e: e.with_timing(Timing("a", 1.0)))
        two.update(key(1), lambda e: replace(e.with_timing(Timing("b", 2.0)), winner="b"))
    assert "cannot lock" in caplog.text
    assert set(Store([tmp_path]).lookup(key(1)).timings) == {"a", "b"} and not torn(tmp_path)
    with pytest.raises(BundleError, match="cannot be locked"):  # segments are not written by two at a time
        import_(one, bundle(tmp_path))
    assert fold(one).files == 0


def test_a_rename_that_happened_and_is_reported_as_failed(tmp_path, monkeypatch, caplog):
    """An answer that was lost on the way, and the question asked again: there is nothing left to rename."""
    replace_ = os.replace

    def lost(source, target):
        replace_(source, target)
        replace_(source, target)  # FileNotFoundError

    store = Store([tmp_path])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lost)
        made = fill(store, 2)
        with pytest.raises(BundleError, match="cannot be written"):
            import_(Store([tmp_path / "other"]), bundle(tmp_path))
    assert "cannot be written" in caplog.text and not torn(tmp_path)
    assert [store.lookup(e.key) for e in made] == made
    assert [Store([tmp_path]).lookup(e.key) for e in made] == made  # it had happened
    import_(Store([tmp_path / "other"]), tmp_path / "b.tar")
    assert Store([tmp_path / "other"]).lookup(key(1)) is not None and not torn(tmp_path / "other")


def test_a_change_that_the_folders_time_does_not_show(tmp_path):
    """Times of a second: what came within the same one as the last look at the folder is seen all the same."""
    folder = tmp_path / "mine"
    fill(Store([folder]), 1)
    fold(Store([folder]))
    store = Store([folder])
    assert store.lookup(key(2)) is None
    before = os.stat(folder / "segments").st_mtime_ns
    fill(Store([folder]), 2)
    fold(Store([folder]))
    os.utime(folder / "segments", ns=(before, before))
    assert store.lookup(key(2)) is not None


def test_names_that_a_client_leaves_for_open_files_are_no_entries(tmp_path):
    fill(Store([tmp_path]), 2)
    fold(Store([tmp_path]))
    fill(Store([tmp_path]), 3, target={"arch": "x"})
    before = held(tmp_path)
    for folder in (*tmp_path.glob("*/*"), tmp_path / "segments"):
        if folder.is_dir():
            (folder / ".nfs000000000001a2b300000001").write_bytes(b"\0" * 100)
    assert held(tmp_path) == before and not torn(tmp_path)
    left = prune(Store([tmp_path]))
    assert (left.entries, left.damaged) == (0, 0)
    fold(Store([tmp_path]))
    assert held(tmp_path) == before and sum(name.count(".nfs") for name in files(tmp_path)) > 2


def test_a_folder_that_cannot_be_searched_is_said_and_is_a_miss(tmp_path, monkeypatch, caplog):
    fill(Store([tmp_path]), 1)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # as for a folder without permission
    monkeypatch.setattr(os, "stat", stale)
    assert Store([tmp_path]).lookup(key(1)) is None
    assert "skipped" in caplog.text


def test_an_object_that_is_published_last_is_whole(tmp_path, monkeypatch):
    """Close-to-open: data is on the server before the name is, since what is renamed was written and synced."""
    seen, sync, replace_ = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append("sync"), sync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("rename"), replace_(a, b))[1])
    store = Store([tmp_path])
    store.add(code(1))
    fill(store, 1)
    assert seen and seen[::2] == ["sync"] * (len(seen) // 2) and seen[1::2] == ["rename"] * (len(seen) // 2)
    seen.clear()
    fold(store)
    assert seen.index("rename") > 0 and set(seen[: seen.index("rename")]) == {"sync"}
