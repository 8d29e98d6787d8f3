"""Where a cache lies, as the environment names it, and who may read what is written there."""

from __future__ import annotations

import os

import pytest

from tests.cache.making import fill, key
from tuning_cache import Store, default_directories, export, fold, import_


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_who_may_read_what_is_written_is_said_by_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        fill(store := Store([tmp_path / "a"]), 2)
        own = {p: p.stat().st_mode & 0o777 for p in (tmp_path / "a").glob("[eo]*/*/*")}
        fold(store)
        import_(Store([tmp_path / "b"]), export(store, tmp_path / "b.tar").path)
        Store([tmp_path / "b"])
    finally:
        os.umask(before)
    packed = {p: p.stat().st_mode & 0o777 for p in tmp_path.glob("?/segments/*")}
    assert len(own) == 4 and len(packed) == 8 and {*own.values(), *packed.values()} == {mode}


def test_places_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    for nothing in ("", ":", " : "):
        monkeypatch.setenv("FLYKERNELS_CACHE_DIR", nothing)
        assert default_directories() == [tmp_path / "home" / ".cache" / "flykernels"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", "here:~/there")
    store = Store()
    monkeypatch.chdir(tmp_path / "elsewhere")  # as launchers of experiments do
    fill(store, 1)
    assert store.directories == [tmp_path / "here", tmp_path / "home" / "there"]
    assert Store([tmp_path / "here"]).lookup(key(1)) and not list((tmp_path / "elsewhere").iterdir())


def test_without_a_home_nothing_is_kept_and_nothing_fails(monkeypatch, caplog):
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", "~nobody-of-that-name/x")
    store = Store()
    fill(store, 1)
    assert store.lookup(key(1)).winner and Store().lookup(key(1)) is None
    assert "may name another place" in caplog.text
