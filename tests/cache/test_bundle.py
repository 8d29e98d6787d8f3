"""Bundles: what goes out comes in again, and what was measured is never lowered."""

from __future__ import annotations

import tarfile
from dataclasses import replace

import pytest

from tests.cache.making import MI350, bundle, code, fill, held, key
from tuning_cache import BundleError, Store, Timing, export, import_, join, prune, verify

# -- there and back


@pytest.mark.parametrize("name", ["b.tar", "b.tar.gz"])
def test_what_goes_out_comes_in(tmp_path, name):
    path = bundle(tmp_path, name)
    store = Store([tmp_path / "target"])
    done = import_(store, path)
    assert (done.added, done.merged, done.kept, done.objects, done.missing) == (3, 0, 0, 3, 0)
    assert held(tmp_path / "target") == held(tmp_path / "source")
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
