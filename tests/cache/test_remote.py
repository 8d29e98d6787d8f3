"""A store behind the directories: read through, written in the background, and never in the way."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from inductor_plugin import settings
from inductor_plugin.cli import main
from tests.cache.making import code, fill, held, key
from tuning_cache import Remote, Store, Timing, remote

number = itertools.count()
QUICK = 0.2  # seconds of timeout where a call is made to hang


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """An empty place."""
    return f"memory://bucket{next(number)}/flykernels" if request.param == "memory" else f"file://{tmp_path}/far"


def store(folder: Path, url: str, **options) -> Store:
    return Store([folder], remote=Remote(url, **options))


def written(filled: Store) -> None:
    assert filled.remote.flush(30) and not filled.remote.failures


class Broken(MemoryFileSystem):
    """A file system that fails, or hangs until it is let go."""

    protocol = "broken"
    how = "fail"
    calls = 0
    let_go = threading.Event()

    def cat_file(self, path, start=None, end=None, **kwargs):
        type(self).calls += 1
        if self.how == "hang":
            self.let_go.wait(60)
        raise ConnectionError("no route to host")

    def pipe_file(self, path, value, **kwargs):
        self.cat_file(path)

    def size(self, path):
        self.cat_file(path)


@pytest.fixture
def broken():
    fsspec.register_implementation("broken", Broken, clobber=True)
    Broken.how, Broken.calls, Broken.let_go = "fail", 0, threading.Event()
    yield Broken
    Broken.let_go.set()


def test_what_one_machine_finds_another_has(tmp_path, url):
    made = fill(one := store(tmp_path / "one", url), 3)
    written(one)
    two = store(tmp_path / "two", url)
    assert two.lookup(key(2)) == made[1] and two.load(made[1].best().artefact) == code(2)
    alone = Store([tmp_path / "two"])  # kept: the next process needs no remote
    assert alone.lookup(key(2)) == made[1] and alone.load(made[1].best().artefact) == code(2)
    assert alone.lookup(key(3)) is None


def test_nothing_is_tuned_that_was_tuned_elsewhere(tmp_path, url):
    one = store(tmp_path / "one", url)
    assert one.timed(key(1), "a", lambda: Timing("a", 3.0)).microseconds == 3.0
    written(one)
    two = store(tmp_path / "two", url)
    assert two.timed(key(1), "a", lambda: pytest.fail("measured twice")).microseconds == 3.0


def test_two_machines_entries_are_merged(tmp_path, url):
    one, two = store(tmp_path / "one", url), store(tmp_path / "two", url)
    one.update(key(1), lambda e: e.with_timing(Timing("a", 1.0)))
    written(one)
    two.remote._missed[f"entries/{key(1).digest[:2]}/{key(1).digest}.json"] = time.monotonic() + 60  # it looked before
    two.update(key(1), lambda e: replace(e.with_timing(Timing("b", 2.0)), winner="b"))
    written(two)
    three = store(tmp_path / "three", url)
    assert set(three.lookup(key(1)).timings) == {"a", "b"} and three.lookup(key(1)).winner == "b"


def test_a_winner_there_is_better_than_none_here(tmp_path, url):
    fill(one := store(tmp_path / "one", url), 1)
    written(one)
    fill(Store([tmp_path / "two"]), 1, measured=False)
    assert store(tmp_path / "two", url).lookup(key(1)).winner == "flykernels t=1"


def test_a_remote_that_is_only_read(tmp_path, url):
    fill(one := store(tmp_path / "one", url, write=False), 1)
    written(one)
    assert store(tmp_path / "two", url).lookup(key(1)) is None


def test_nothing_damaged_forged_or_too_large_is_taken(tmp_path, caplog, monkeypatch):
    far = tmp_path / "far"
    made = fill(one := store(tmp_path / "one", f"file://{far}"), 1, size=16)
    written(one)
    digest = made[0].best().artefact
    entry_file, object_file = next(far.glob("entries/*/*")), next(far.glob("objects/*/*"))
    assert not list(far.rglob("*.part"))
    for path in (entry_file, object_file):
        data = path.read_bytes()
        for at in range(0, len(data), 29):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
            two = store(tmp_path / f"{path.name}{at}", f"file://{far}")
            if path is entry_file:
                assert two.lookup(key(1)) in (None, made[0])
            else:
                assert two.load(digest) is None
                assert not list((tmp_path / f"{path.name}{at}").glob("objects/*/*"))
        path.write_bytes(b"")
        assert store(tmp_path / "two", f"file://{far}").remote.object(digest) is None or path is entry_file
        path.write_bytes(data)
    other = far / "entries" / key(2).digest[:2] / f"{key(2).digest}.json"
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(entry_file.read_bytes())
    assert store(tmp_path / "three", f"file://{far}").lookup(key(2)) is None
    assert "passed over" in caplog.text
    monkeypatch.setattr(remote, "LIMITS", replace(remote.LIMITS, entry=100, object=100))
    assert store(tmp_path / "four", f"file://{far}").lookup(key(1)) is None
    assert store(tmp_path / "four", f"file://{far}").load(digest) is None


def test_half_an_object_there_is_written_again(tmp_path):
    far = f"memory://bucket{next(number)}"
    made = fill(one := store(tmp_path / "one", far), 1)
    written(one)
    there, root = fsspec.core.url_to_fs(far)
    name = f"{root}/{remote._object_name(made[0].best().artefact)}"
    there.pipe_file(name, there.cat_file(name)[:100])
    assert store(tmp_path / "two", far).load(made[0].best().artefact) is None
    one.add(code(1))
    written(one)
    assert store(tmp_path / "three", far).load(made[0].best().artefact) == code(1)


def test_a_full_disk_there_leaves_no_half_file(tmp_path, monkeypatch):
    def full(self, path, value, **_):
        Path(path).write_bytes(value[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "pipe_file", full)
    fill(one := store(tmp_path / "one", f"file://{tmp_path}/far"), 1)
    assert one.remote.flush(30) and one.remote.failures
    assert not [p for p in (tmp_path / "far").rglob("*") if p.is_file()]


@pytest.mark.parametrize("bad", ["nonsense://x", "broken://x", "file:///proc/none", "http://127.0.0.1:9/x", "::::"])
def test_offline_is_a_miss_and_said_once(tmp_path, bad, broken, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)  # fsspec takes some of it to be names of files
    with caplog.at_level(logging.WARNING):
        here = store(tmp_path, bad)
        made = fill(here, 2)
        assert here.lookup(key(3)) is None and here.load("ab" * 32) is None
        here.remote.flush(30)
    assert here.lookup(key(2)) == made[1] and Store([tmp_path]).lookup(key(2)) == made[1]
    assert sum("left alone" in r.message for r in caplog.records) <= 2  # once for reading, once for writing


def test_a_failing_remote_is_left_alone_for_a_while(tmp_path, broken, monkeypatch):
    here = store(tmp_path, "broken://x")
    for n in range(20):
        assert here.lookup(key(n)) is None
    assert broken.calls == 1
    here.remote._down_until = 0.0
    here.lookup(key(100))
    assert broken.calls == 2


def test_a_hanging_remote_costs_one_timeout(tmp_path, broken):
    broken.how = "hang"
    here = store(tmp_path, "broken://x", timeout=QUICK)
    start = time.monotonic()
    made = fill(here, 10)
    assert [here.lookup(e.key) for e in made] == made and all(here.lookup(key(n)) is None for n in range(100, 150))
    assert time.monotonic() - start < 10 * QUICK
    for _ in range(5):  # calls that hang are not heaped up
        here.remote._down_until = 0.0
        here.lookup(key(next(number) + 1000))
    assert broken.calls <= remote.HANGING_MOST + 1
    broken.let_go.set()


def test_a_process_ends_although_its_remote_hangs(tmp_path):
    program = f"""
import sys, time
sys.path[:0] = {sys.path!r}
from tuning_cache import remote
remote.EXIT_SECONDS = 0.5
from tests.cache.test_remote import *
fsspec.register_implementation("broken", Broken, clobber=True)
Broken.how = "hang"
fill(store({str(tmp_path)!r}, "broken://x", timeout={QUICK}), 3)
print("done", flush=True)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n"
    assert len(held(tmp_path)) == 6


def test_what_is_still_to_be_written_is_when_the_process_ends(tmp_path):
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from tests.cache.test_remote import *
fill(store({str(tmp_path / "one")!r}, "file://{tmp_path}/far"), 5)
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, check=True)
    assert len(list((tmp_path / "far").glob("entries/*/*"))) == 5 == len(list((tmp_path / "far").glob("objects/*/*")))


def test_settings_and_the_command_line(tmp_path, monkeypatch):
    far = f"file://{tmp_path}/far"
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path / "one"))
    fill(Store([tmp_path / "one"]), 2)
    run = lambda *args: CliRunner().invoke(main, args, catch_exceptions=False)
    monkeypatch.delenv("FLYKERNELS_REMOTE", raising=False)
    assert "no remote store is named" in run("cache", "push").output
    monkeypatch.setenv("FLYKERNELS_REMOTE", "file:///proc/none")
    assert run("cache", "push").exit_code == 1
    done = run("--remote", far, "cache", "push")
    assert done.exit_code == 0 and "2 entries" in done.output
    waits: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(Remote, "flush", lambda self, seconds: not waits.append(seconds))
        run("--remote", far, "cache", "push", "--wait", "9s")
    assert 9 > waits[0] > waits[1]  # of all entries together
    monkeypatch.setenv("FLYKERNELS_REMOTE", far)
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path / "two"))
    monkeypatch.setenv("FLYKERNELS_REMOTE_WRITE", "0")
    monkeypatch.setenv("FLYKERNELS_REMOTE_TIMEOUT", "0.5")
    assert "is only read" in (pushed := run("cache", "push")).output and pushed.exit_code == 1
    found = settings.store()
    assert (found.remote.writes, found.remote.timeout) == (False, 0.5) and found.lookup(key(1)).winner
    monkeypatch.setenv("FLYKERNELS_REMOTE_TIMEOUT", "soon")
    assert settings.store().remote.timeout == remote.TIMEOUT_SECONDS
    assert json.loads(run("cache", "list", "--json").output.splitlines()[0])["entry"] == key(1).digest
