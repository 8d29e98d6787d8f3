"""Several directories in order, a limit to their size, and what is used least goes first."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.cache.making import code, files, fill, key
from tuning_cache import Entry, EntryError, Store, Timing, prune, size_in_bytes
from tuning_cache.prune import STALE_SECONDS, YOUNG_SECONDS


def age(folder, seconds, pattern="*/*/*"):
    for path in folder.glob(pattern):
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_winner_in_a_lower_layer_hides_an_undecided_entry_above(tmp_path):
    fill(Store([tmp_path / "base"]), 1)
    fill(Store([tmp_path / "mine"]), 1, measured=False)
    store = Store([tmp_path / "mine", tmp_path / "base"])
    assert store.lookup(key(1)).winner == "flykernels t=1"
    assert store.content_digest() == Store([tmp_path / "base"]).content_digest()
    store.update(key(1), lambda e: replace(e.with_timing(Timing("aten mm", 1.0)), winner="aten mm"))
    assert Store([tmp_path / "mine", tmp_path / "base"]).lookup(key(1)).winner == "aten mm"
    assert Store([tmp_path / "base"]).lookup(key(1)).winner == "flykernels t=1"


def test_lower_layers_are_never_written(tmp_path):
    fill(Store([tmp_path / "base"]), 3)
    age(tmp_path / "base", 10 * YOUNG_SECONDS)
    before, times = files(tmp_path / "base"), {p: p.stat().st_mtime for p in (tmp_path / "base").glob("*/*/*")}
    store = Store([tmp_path / "mine", tmp_path / "base"], max_bytes=1)
    for n in (1, 2, 3):
        assert store.load(store.lookup(key(n)).best().artefact) is not None
    store.update(key(1), lambda e: e.with_timing(Timing("triton", 5.0)))
    prune(store, 0)
    assert files(tmp_path / "base") == before and all(p.stat().st_mtime == t for p, t in times.items())


def test_a_damaged_entry_above_does_not_hide_a_whole_one_below(tmp_path):
    fill(Store([tmp_path / "base"]), 1)
    fill(Store([tmp_path / "mine"]), 1)
    next((tmp_path / "mine").glob("entries/*/*")).write_text("{}")
    assert Store([tmp_path / "mine", tmp_path / "base"]).lookup(key(1)).winner


def test_what_was_used_longest_ago_goes_first(tmp_path):
    fill(Store([tmp_path]), 4)
    age(tmp_path, 5 * YOUNG_SECONDS)
    store = Store([tmp_path])
    store.lookup(key(2))  # a use: the file's time is now
    one = sum(len(d) for d in files(tmp_path).values()) // 4
    done = prune(store, int(2.5 * one))
    assert (done.entries, done.objects) == (2, 2) and done.left <= 2.5 * one
    assert Store([tmp_path]).lookup(key(2)) is not None
    assert sum(len(d) for d in files(tmp_path).values()) == done.left
    assert prune(store, int(2.5 * one)).entries == 0


def test_pruned_entries_are_forgotten_and_can_come_again(tmp_path):
    store = Store([tmp_path])
    fill(store, 1)
    assert prune(store, 0).entries == 1 and store.lookup(key(1)) is None
    fill(store, 1)
    assert Store([tmp_path]).lookup(key(1)) is not None


def test_an_artefact_that_two_entries_name_stays_with_the_last(tmp_path):
    store = Store([tmp_path])
    shared = store.add(code(50))
    for n in (1, 2):
        store.update(key(n), lambda e: e.with_timing(Timing("flykernels", 1.0, {}, shared)))
    old = next(tmp_path.glob(f"entries/*/{key(1).digest}.json"))
    os.utime(old, (1, 1))
    assert prune(store, unused_seconds=3600).entries == 1
    assert Store([tmp_path]).load(shared) is not None
    assert prune(store, 0).objects == 1 and Store([tmp_path]).load(shared) is None


def test_an_entry_that_is_being_tuned_stays(tmp_path):
    made = fill(Store([tmp_path]), 2)
    program = f"""
import sys
from tests.cache.making import key
from tuning_cache import Store
with Store([{str(tmp_path)!r}]).lock(key(1)):
    print("held", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"held\n"
        assert prune(Store([tmp_path]), 0).entries == 1
        assert Store([tmp_path]).lookup(made[0].key) is not None and Store([tmp_path]).lookup(made[1].key) is None
    assert prune(Store([tmp_path]), 0).entries == 1


def test_objects_without_an_entry_go_once_they_are_not_young(tmp_path):
    store = Store([tmp_path])
    store.add(code(1))
    assert prune(store).objects == 0
    age(tmp_path, 2 * YOUNG_SECONDS)
    assert prune(store).objects == 1


def test_newer_formats_stay_and_leavings_of_the_dead_go(tmp_path):
    store = Store([tmp_path])
    made = fill(store, 1)[0]
    path = next(tmp_path.glob("entries/*/*"))
    path.write_text(made.to_json().replace('"format": 1', '"format": 9'))
    (tmp_path / ".staging-x" / "entries").mkdir(parents=True)
    part = path.with_name(".abc.part")
    part.write_text("half")
    assert prune(store, 0).entries == 0 and path.exists() and part.exists()
    for left in (tmp_path / ".staging-x", part):
        os.utime(left, (time.time() - 2 * STALE_SECONDS,) * 2)
    prune(store)
    assert path.exists() and not part.exists() and not (tmp_path / ".staging-x").exists()


def test_a_store_with_a_limit_keeps_to_it(tmp_path):
    store = Store([tmp_path], max_bytes=20_000)
    for n in range(40):
        fill(store, 1, target={"arch": f"x{n}"}, size=1000)
        assert sum(len(d) for d in files(tmp_path).values()) < 20_000 * (1 + 1 / 8)
    assert len(list(tmp_path.glob("entries/*/*"))) > 3


def test_timed_measures_once_and_reuses_what_another_process_found(tmp_path):
    one, two = Store([tmp_path]), Store([tmp_path])
    assert two.lookup(key(1)) is None
    two.update(key(1), lambda e: e.with_timing(Timing("other", 1.0)))  # `two` now remembers an entry of its own
    assert one.timed(key(1), "a", lambda: Timing("a", 3.0)).microseconds == 3.0
    assert two.timed(key(1), "a", lambda: pytest.fail("measured twice")).microseconds == 3.0
    assert set(Store([tmp_path]).lookup(key(1)).timings) == {"a", "other"}
    assert one.timed(key(1), "b", lambda: Timing("b", None)).microseconds is None
    assert one.timed(key(1), "b", lambda: Timing("b", 4.0)).microseconds == 4.0


def test_a_digest_that_is_a_path_is_never_opened(tmp_path):
    (tmp_path / "secret.fko").write_bytes(code(1).to_bytes())
    assert Store([tmp_path / "cache"]).load("../../secret") is None
    assert Store([tmp_path / "cache"]).content("../../secret") is None
    with pytest.raises(EntryError, match="not a SHA-256"):
        Entry.from_json(Entry(key(1)).with_timing(Timing("x", 1.0, {}, "../../secret")).to_json())


@pytest.mark.parametrize(
    "text, size", [("5", 5), ("10MB", 10**7), ("1.5GiB", 3 << 29), ("2k", 2000), (" 1 TiB", 1 << 40)]
)
def test_sizes(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1PB", "1e9", "i", "5i"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="not a size"):
        size_in_bytes(text)
