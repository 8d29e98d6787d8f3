"""A process that is forked while another thread is at the cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys, threading
from tests.cache.making import fill, key
from tuning_cache import Key, Remote, Store, record

folder = sys.argv[1]
store = Store([folder], remote=Remote(f"file://{folder}/far"))
fill(store, 2)
assert store.remote.flush(30)
held, done = threading.Event(), threading.Event()

def at_it():
    lock = getattr(Key.__dict__["digest"], "lock", threading.Lock())
    with lock, store._mutex, store.layers[0]._mutex, store.remote._mutex, store.remote._waiting.mutex, record._lock:
        held.set()
        done.wait()

threading.Thread(target=at_it, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    store.forget_all()
    store.layers[0]._listed = None
    assert store.lookup(key(1)).winner
    store.update(key(3), lambda e: e)
    record.note(key(4), f"{folder}/record")
    os._exit(0 if store.remote.flush(20) and os.path.getsize(f"{folder}/record") else 1)
sys.exit(os.waitpid(child, 0)[1] != 0)
"""


def test_the_child_waits_for_nothing_that_a_thread_of_its_parent_held(tmp_path):
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=root, timeout=60)
    assert run.returncode == 0
    assert len(list((tmp_path / "far").glob("entries/*/*"))) == 3


def test_a_child_does_not_write_what_its_parent_is_to_write(tmp_path):
    """Nor does it wait for that when it ends."""
    program = """
import os, sys, threading, time
from tests.cache.making import code
from tuning_cache import Remote
remote, go = Remote(f"file://{sys.argv[1]}/far"), threading.Event()
remote._later("slow", go.wait)
remote.keep_object(code(1).digest, code(1).to_bytes())
child = os.fork()
if child == 0:
    sys.exit(0 if remote.flush(0) else 1)
ended = os.waitpid(child, 0)[1]
go.set()
sys.exit(ended != 0 or not remote.flush(30))
"""
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, timeout=60).returncode == 0
    assert len(list((tmp_path / "far").glob("objects/*/*"))) == 1
