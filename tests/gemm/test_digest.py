"""The source digest changes with any source it covers, and with nothing else."""

from __future__ import annotations

import shutil

import pytest

from templates import digest as module
from templates.digest import digest, of_folders


def test_it_is_stable_and_covers_templates_and_core(tmp_path, monkeypatch):
    before = digest("gemm")
    assert before == digest("gemm") and len(before) == 64
    shutil.copytree(module.HERE / "gemm", tmp_path / "gemm")
    monkeypatch.setattr(module, "HERE", tmp_path)
    fresh = digest.__wrapped__
    assert fresh("gemm") == before
    (tmp_path / "gemm" / "notes.txt").write_text("not a source")
    assert fresh("gemm") == before
    (tmp_path / "gemm" / "problem.py").write_text("# changed\n")
    assert fresh("gemm") != before


def test_folders_are_told_apart_by_names_and_contents(tmp_path):
    one, other = tmp_path / "one", tmp_path / "two"
    for folder in (one, other):
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "a.py").write_text("x = 1\n")
    before = of_folders(one)
    assert before == of_folders(one) != of_folders(other)
    (one / "inner" / "a.py").rename(one / "a.py")
    assert of_folders(one) != before


def test_an_unknown_template_is_an_error():
    with pytest.raises(ValueError, match="no template 'nothing'"):
        digest("nothing")
