"""Entries and code objects: what is written comes back, what is damaged never does, no process loses anything."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.codeobject import Argument, CodeObject, CodeObjectError, Extent
from tuning_cache import FAILED, Entry, EntryError, Key, NewerFormat, Store, Timing, canonical, export
from tuning_cache.entry import check_line, entry_of, sealed

VERSIONS = {"plugin": "1", "templates": "abc", "mlir": "flydsl 0.5.0"}


def key(n: int = 1, **versions) -> Key:
    return Key("mm", {"n": n, "k": 3, "m": "symbolic"}, {"arch": "x86-64", "threads": 2}, {**VERSIONS, **versions})


def entry(k: Key) -> Entry:
    fast = Timing("flykernels mr=6", 12.5, {"mr": 6}, "f" * 64)
    bad = Timing("flykernels mr=4", FAILED, {"mr": 4}, None, "ValueError: no")
    return Entry(k).with_timing(fast).with_timing(bad).with_timing(Timing("aten mm", 20.0))


def code(binary: bytes = b"\x7fELF" + bytes(range(256))) -> CodeObject:
    arguments = (Argument("a", "pointer", "f32"), Argument("m", "i32", "i32"))
    grid = ((Extent("m", 64), Extent(4096, 128)), (Extent(2),))
    return CodeObject("x86", "avx2,fma", "gemm", arguments, grid, 1, source={"template": "gemm"}, binary=binary)


# -- one entry, one code object


def test_entry_round_trip():
    before = replace(entry(key()), winner="flykernels mr=6")
    after = Entry.from_json(before.to_json())
    assert after == before
    assert after.best().microseconds == 12.5
    assert after.timings["flykernels mr=4"].microseconds == FAILED


def test_entry_is_readable_json():
    data = json.loads(entry(key()).to_json())
    assert data["entry"]["key"]["problem"] == {"n": 1, "k": 3, "m": "symbolic"}


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data())
def test_no_changed_byte_of_an_entry_is_taken(data):
    text = entry(key()).to_json().encode()
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.integers(0, 255).filter(lambda b: b != text[at]))
    changed = text[:at] + bytes([new]) + text[at + 1 :]
    try:
        got = Entry.from_json(changed.decode())
    except (EntryError, UnicodeDecodeError):
        return
    assert got == entry(key())  # white space outside strings may change; meaning may not


def test_newer_format_is_told_apart():
    data = json.loads(entry(key()).to_json())
    data["format"] = 2
    with pytest.raises(NewerFormat):
        Entry.from_json(json.dumps(data))


def test_code_object_round_trip(tmp_path):
    c = code()
    c.save(tmp_path / "k.fko")
    again = CodeObject.load(tmp_path / "k.fko")
    assert again == c and again.digest == c.digest
    assert again.grid_for({"m": 65}) == (64, 2)
    assert list(tmp_path.iterdir()) == [tmp_path / "k.fko"]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data())
def test_no_changed_byte_of_a_code_object_is_taken(data):
    """The header too: a changed header changes the content's digest, which is the name it is loaded by."""
    raw = code().to_bytes()
    at = data.draw(st.integers(0, len(raw) - 1))
    new = data.draw(st.integers(0, 255).filter(lambda b: b != raw[at]))
    try:
        got = CodeObject.from_bytes(raw[:at] + bytes([new]) + raw[at + 1 :])
    except CodeObjectError:
        return
    assert got.digest != code().digest


@pytest.mark.parametrize("cut", [0, 5, 40, -200, -1])
def test_cut_code_object(cut):
    with pytest.raises(CodeObjectError):
        CodeObject.from_bytes(code().to_bytes()[:cut])


def test_grid_of_nothing():
    assert code().grid_for({"m": 0}) == (0, 2)


# -- the store


def test_store_keeps_entries_for_the_next_process(tmp_path):
    Store([tmp_path]).update(key(), lambda e: replace(entry(key()), winner="aten mm"))
    assert Store([tmp_path]).lookup(key()).winner == "aten mm"
    assert Store([tmp_path]).lookup(key(2)) is None


def test_store_finds_entries_without_a_compiler_but_not_another_compilers(tmp_path):
    Store([tmp_path]).update(key(), lambda e: entry(key()))
    assert Store([tmp_path]).lookup(key(mlir=None)) is not None
    assert Store([tmp_path]).lookup(key(mlir="flydsl 0.6.0")) is None
    assert Store([tmp_path]).lookup(key(templates="def")) is None


def test_an_entry_cut_in_half_is_skipped_with_one_warning(tmp_path, caplog):
    Store([tmp_path]).update(key(), lambda e: entry(key()))
    (path,) = tmp_path.glob("entries/*/*.json")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    store = Store([tmp_path])
    with caplog.at_level(logging.WARNING):
        assert store.lookup(key()) is None
        assert store.lookup(key()) is None
    assert len(caplog.records) == 1
    store.update(key(), lambda e: entry(key()))  # and it is replaced
    assert Store([tmp_path]).lookup(key()) == entry(key())


def test_an_entry_under_a_wrong_name_is_skipped(tmp_path):
    store = Store([tmp_path])
    store.update(key(1), lambda e: entry(key(1)))
    (path,) = tmp_path.glob("entries/*/*.json")
    other = tmp_path / "entries" / key(2).digest[:2] / f"{key(2).digest}.json"
    other.parent.mkdir(exist_ok=True)
    os.replace(path, other)
    assert Store([tmp_path]).lookup(key(2)) is None


def test_objects_are_addressed_by_content(tmp_path):
    store = Store([tmp_path])
    digest = store.add(code())
    assert Store([tmp_path]).load(digest) == code()
    (path,) = tmp_path.glob("objects/*/*.fko")
    path.write_bytes(code(b"other").to_bytes())
    assert Store([tmp_path]).load(digest) is None


def test_second_directory_is_read_and_never_written(tmp_path):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    Store([shipped]).update(key(), lambda e: replace(entry(key()), winner="aten mm"))
    before = sorted(shipped.rglob("*"))
    store = Store([own, shipped])
    assert store.lookup(key()).winner == "aten mm"
    store.update(key(), lambda e: replace(e, winner="flykernels mr=6"))
    assert Store([own, shipped]).lookup(key()).winner == "flykernels mr=6"
    assert sorted(shipped.rglob("*")) == before


def test_content_digest_follows_winners(tmp_path):
    store = Store([tmp_path])
    empty = store.content_digest()
    store.update(key(), lambda e: replace(entry(key()), winner="aten mm"))
    one = store.content_digest()
    store.update(key(), lambda e: replace(e, winner="flykernels mr=6"))
    assert len({empty, one, store.content_digest()}) == 3


def test_an_unwritable_place_costs_a_warning_and_nothing_else(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    store = Store([blocked])
    with caplog.at_level(logging.WARNING):
        store.update(key(), lambda e: entry(key()))
        digest = store.add(code())
    assert store.lookup(key()) == entry(key()) and store.load(digest) == code()
    assert caplog.records and blocked.read_text() == "in the way"


def test_a_full_disk_costs_a_warning_and_leaves_no_torn_file(tmp_path):
    """RLIMIT_FSIZE stands for the full disk: the write itself fails half-way."""
    program = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.path[:0] = {sys.path!r}
from tests.cache.test_store import *
store = Store([{str(tmp_path)!r}])
store.add(code(b"small"))
resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
digest = store.add(code(bytes(100_000)))
store.update(key(), lambda e: entry(key()))
assert store.lookup(key()) == entry(key()) and store.load(digest) is not None
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)
    assert len(list(tmp_path.glob("objects/*/*"))) == 1
    assert not list(tmp_path.glob("entries/*/*"))


def _add_timings(directory: Path, name: str, count: int) -> None:
    store = Store([directory])
    for i in range(count):
        store.update(key(), lambda e: e.with_timing(Timing(f"{name} {i}", float(i))))


def test_processes_that_update_one_key_lose_nothing(tmp_path):
    workers = [
        multiprocessing.get_context("spawn").Process(target=_add_timings, args=(tmp_path, f"w{i}", 20))
        for i in range(3)
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
        assert w.exitcode == 0
    assert len(Store([tmp_path]).lookup(key()).timings) == 60


def _hold_for_ever(directory: Path, ready) -> None:
    with Store([directory]).lock(key()):
        ready.set()
        ready.wait()
        import time

        time.sleep(60)


def test_a_dead_owner_does_not_keep_the_lock_and_a_live_one_is_waited_for_only_so_long(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    owner = context.Process(target=_hold_for_ever, args=(tmp_path, ready))
    owner.start()
    assert ready.wait(60)
    with Store([tmp_path]).lock(key(), seconds=0.2) as held:
        assert not held
    owner.kill()
    owner.join()
    with Store([tmp_path]).lock(key(), seconds=30) as held:
        assert held


# -- entries as lines of a segment


def test_line_round_trip():
    before = replace(entry(key()), winner="flykernels mr=6")
    line = before.to_line()
    assert line.count(b"\n") == 1 and sealed(line) is not None
    after = Entry.from_json(line)
    assert after.best() == before.best() and after == before and before == after
    assert Entry.from_json(line) == before and dict(after.timings) == before.timings
    assert Entry.from_json(line).timings["aten mm"].microseconds == 20.0 and "none" not in Entry.from_json(line).timings
    assert check_line(line)[:3] == (key().digest, key(), ["f" * 64])
    assert replace(after, winner=None).with_timing(Timing("x", 1.0)).to_json()  # as any other entry


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data())
def test_no_changed_byte_of_a_line_is_taken(data):
    line = entry(key()).to_line()
    at = data.draw(st.integers(0, len(line) - 2))
    new = data.draw(st.integers(0, 255).filter(lambda b: b != line[at]))
    changed = line[:at] + bytes([new]) + line[at + 1 :]
    for read in (Entry.from_json, check_line):
        with pytest.raises((EntryError, UnicodeDecodeError)):
            read(changed)


@pytest.mark.parametrize(
    "problem",
    [
        {"x": {"y": 1}, "source": "measured", "timings": {}, "winner": None},
        {"x": {}, "source": '},"source":"measured","timings":{},"winner":null'},
        {"versions": {"mlir": "1"}, "n": '"versions":{"a":1}'},
    ],
)
def test_keys_that_look_like_the_rest_of_an_entry(problem):
    hard = replace(key(), problem=problem)
    before = replace(entry(hard), winner='a ","winner":"b')
    for text in (before.to_line(), before.to_json()):
        after = Entry.from_json(text)
        assert after == before and after.key == hard and after.winner == before.winner
    assert check_line(before.to_line())[0] == hard.digest


def test_a_name_within_a_configuration_is_no_timing():
    tricky = {"aten mm": vars(Timing("aten mm", 1.0))}
    before = Entry(key()).with_timing(Timing("a", 1.0, tricky)).with_timing(Timing("aten mm", 9.0))
    assert Entry.from_json(before.to_line()).timings["a"].config == tricky
    assert Entry.from_json(before.to_line()).timings["aten mm"].microseconds == 9.0


def test_sealed_timings_that_are_not_right_hold_nothing(tmp_path):
    line = entry(key()).to_line().replace(b"20.0", b'"x"')
    body = line[len(b'{"entry":') : line.index(b',"format":')]
    forged = b'{"entry":' + body + b',"format":1,"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    with pytest.raises(EntryError, match="microseconds"):
        check_line(forged)
    assert len(Entry.from_json(forged).timings) == 0


def test_a_full_disk_while_importing_writes_nothing(tmp_path):
    """RLIMIT_FSIZE again: the segment does not fit."""
    source = Store([tmp_path / "source"])
    digest = source.add(code(bytes(100_000)))
    source.update(key(), lambda e: e.with_timing(Timing("x", 1.0, {}, digest)))
    export(source, tmp_path / "b.tar")
    program = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from tuning_cache import *
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    import_(Store([{str(tmp_path / "full")!r}]), __import__("pathlib").Path({str(tmp_path / "b.tar")!r}))
except BundleError as e:
    print(e)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], check=True, cwd=root, capture_output=True, text=True)
    assert "cannot be written: File too large" in done.stdout
    assert not [p for p in (tmp_path / "full").rglob("*") if p.is_file() and p.suffix != ".lock"]


PLAIN_VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.text(max_size=5), PLAIN_VALUES | st.floats(allow_nan=False) | st.lists(PLAIN_VALUES, max_size=2)
    ),
    st.dictionaries(st.text(max_size=5), PLAIN_VALUES),
)
def test_an_address_is_that_of_the_canonical_key_whatever_writes_it(problem, target):
    """Also for what a faster writer of JSON would write in another way: large numbers, floats, names beyond ASCII."""
    k = Key("mm", problem, target, VERSIONS)
    named = {"op": "mm", "problem": problem, "target": target, "versions": {"plugin": "1", "templates": "abc"}}
    assert k.digest == hashlib.sha256(canonical(named).encode()).hexdigest()
    same = replace(k, target={name: 1 if value is True else value for name, value in target.items()})  # 1 == True
    assert (same.digest == k.digest) == (True not in target.values())
    line = entry(k).to_line()
    assert entry_of(line, k) == Entry.from_json(line) == entry(k)
    other = replace(k, versions={**VERSIONS, "mlir": "another"})
    assert entry_of(line, other).key == k and not other.agrees(entry_of(line, other).key)


def test_a_line_of_another_key_or_no_line_is_not_the_keys_entry():
    line = entry(key(1)).to_line()
    assert entry_of(line, key(1)) == entry(key(1))
    for other in (key(2), key(1, templates="def"), replace(key(1), op="bmm"), replace(key(1), target={})):
        assert entry_of(line, other) is None
    for text in (b"", b"{}", entry(key(1)).to_json().encode(), line[:-2], line.replace(b"20.0", b"21.0")):
        assert entry_of(text, key(1)) is None
