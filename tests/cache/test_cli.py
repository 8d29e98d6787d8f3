"""`flykernels cache`: what a person types, and what is printed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from inductor_plugin import families, fingerprint, settings
from inductor_plugin.cli import main
from inductor_plugin.fingerprint import versions
from tests.cache.making import MI350, files, fill, held, key
from tuning_cache import FAILED, Store, Timing
from tuning_cache.record import CASES, EagerMiss


@pytest.fixture
def cli(tmp_path, monkeypatch):
    def run(*args, directory="cache"):
        monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path / directory))
        return CliRunner().invoke(main, ["cache", *map(str, args)], catch_exceptions=False)

    return run


@pytest.fixture
def filled(tmp_path):
    return fill(Store([tmp_path / "cache"]), 3, **versions())


def test_list_and_show(cli, filled, tmp_path):
    listed = cli("list")
    assert listed.exit_code == 0 and listed.output.count("flykernels t=1") == 3 and "N=2 K=3" in listed.output
    lines = [json.loads(line) for line in cli("list", "--json", "--op", "mm").output.splitlines()]
    assert {x["microseconds"] for x in lines} == {11, 12, 13} and {x["source"] for x in lines} == {"measured"}
    shown = cli("show", filled[0].key.digest[:12]).output
    assert "t=1 (winner)" in shown and "ValueError: no" in shown and "(lost)" not in shown
    assert json.loads(cli("show", filled[0].key.digest, "--json").output)["entry"]["winner"] == "flykernels t=1"
    assert cli("show", "zz").exit_code == 1 and "0 entries begin with" in cli("show", "zz").output
    assert "empty" in cli("list", directory="other").output


def test_export_verify_import(cli, filled, tmp_path):
    bundle = tmp_path / "b.tar.gz"
    assert "3 entries, 3 code objects" in cli("export", bundle).output
    told = cli("verify", bundle).output
    assert "whole; 3 entries" in told and "compute_units 256" in told and "not signed" in told
    refused = cli("import", bundle, directory="other")
    assert (
        refused.exit_code == 1 and "it is for arch gfx950" in refused.output and "Nothing was written" in refused.output
    )
    assert not files(tmp_path / "other")
    target = "arch=gfx950,compute_units=256"
    assert cli("import", bundle, "--target", "arch=gfx950,compute_units=304", directory="other").exit_code == 1
    done = cli("import", bundle, "--target", target, directory="other")
    assert done.exit_code == 0 and "3 entries added" in done.output
    assert held(tmp_path / "other") == held(tmp_path / "cache")
    assert cli("verify", directory="other").exit_code == 0
    part = next((tmp_path / "other" / "segments").glob("entries*.fks"))
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    told = cli("verify", directory="other")
    assert told.exit_code == 1 and "does not match its SHA-256" in told.output and "row 0" in told.output
    assert "0 entries, 0 code objects" in cli("export", tmp_path / "c.tar", "--target", "arch=sm_90").output
    assert cli("import", bundle, "--target", "gfx950").exit_code == 2


def test_other_versions_are_refused_unless_stated(cli, tmp_path):
    fill(Store([tmp_path / "cache"]), 1)
    bundle = tmp_path / "b.tar"
    cli("export", bundle)
    refused = cli("import", bundle, "--any-target", directory="other")
    assert refused.exit_code == 1 and "it was made by" in refused.output
    assert cli("import", bundle, "--any-target", "--any-versions", directory="other").exit_code == 0


@pytest.mark.parametrize("template", fingerprint.TEMPLATES)
def test_this_version_takes_what_it_has_made_of_every_template(cli, tmp_path, template):
    fill(Store([tmp_path / "cache"]), 1, **versions(template))
    cli("export", tmp_path / "b.tar")
    taken = cli("import", tmp_path / "b.tar", "--any-target", directory="other")
    assert taken.exit_code == 0 and "1 entries added" in taken.output


def test_every_template_that_keys_are_of_is_known():
    keyed = {
        "gemm",
        *(module.TEMPLATE for module in families.OWN.values()),
        *(EagerMiss(op, {}, {}).template for op in CASES),
    }
    assert keyed == set(fingerprint.TEMPLATES)


def test_without_torch_the_target_is_to_be_said(cli, filled, tmp_path, monkeypatch):
    cli("export", tmp_path / "b.tar")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "say --target" in cli("import", tmp_path / "b.tar", directory="other").output
    assert cli("import", tmp_path / "b.tar", "--target", "arch=gfx950", directory="other").exit_code == 0


def test_merge(cli, filled, tmp_path):
    one, two = tmp_path / "one.tar", tmp_path / "two.tar"
    cli("export", one)
    fill(Store([tmp_path / "cache2"]), 5, measured=False, **versions())
    cli("export", two, directory="cache2")
    merged = cli("merge", two, one, "-o", tmp_path / "both.tar")
    assert merged.exit_code == 0 and "5 entries" in merged.output
    cli("import", tmp_path / "both.tar", "--any-target", directory="other")
    lines = [json.loads(line) for line in cli("list", "--json", directory="other").output.splitlines()]
    assert sorted(x["source"] for x in lines) == ["compiled"] * 2 + ["measured"] * 3
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(one.read_bytes()[:-600])
    assert cli("merge", one, damaged, "-o", tmp_path / "x.tar").exit_code == 1 and not (tmp_path / "x.tar").exists()


def test_verify_and_prune_a_cache(cli, filled, tmp_path):
    assert cli("verify").exit_code == 0
    path = next((tmp_path / "cache").glob("objects/*/*"))
    path.write_bytes(path.read_bytes()[:-1])
    entry = next((tmp_path / "cache").glob("entries/*/*"))
    entry.write_text("{")
    told = cli("verify")
    assert told.exit_code == 1 and "2 damaged" in told.output
    before = files(tmp_path / "cache")
    assert "would remove 2 entries" in cli("prune", "--max-size", "0", "--dry-run").output
    assert files(tmp_path / "cache") == before
    assert "1 damaged" in cli("prune").output
    assert "removed 2 entries" in cli("prune", "--max-size", "0B").output
    assert not list((tmp_path / "cache").glob("entries/*/*"))
    assert cli("prune", "--max-size", "many").exit_code == 2 and cli("prune", "--unused", "3").exit_code == 2


def test_what_cannot_be_opened_is_damaged_too(cli, filled, tmp_path):
    cli("compact")
    settings._store.cache_clear()  # as another process sees it
    cut, other = sorted((tmp_path / "cache" / "segments").glob("*.fks"))
    newer = cut.with_name(cut.name.replace("-0000000", "-1000000"))
    newer.write_bytes(b"flykernels segment 2 entries\n")
    cut.write_bytes(cut.read_bytes()[:-1])
    told = cli("verify")
    assert told.exit_code == 1 and "2 damaged" in told.output and "it has no footer" in told.output
    assert "1 damaged files" in cli("prune", "--dry-run").output and cut.exists()
    assert "1 damaged files" in cli("prune").output
    assert not cut.exists() and newer.exists() and other.exists()


def test_files_that_cannot_be_read_are_said_by_verify(cli, filled, tmp_path, monkeypatch):
    path, whole = next((tmp_path / "cache").glob("entries/*/*")), Path.open
    denied = lambda self, *mode: (
        whole(self, *mode) if self != path else (_ for _ in ()).throw(PermissionError(13, "denied"))
    )
    monkeypatch.setattr(Path, "open", denied)
    told = cli("verify")
    assert told.exit_code == 1 and "denied" in told.output and "1 damaged" in told.output


def test_names_and_reasons_are_printed_as_they_are(cli, tmp_path):
    """Brackets are no styles, colons no emoji, and half a surrogate is no traceback."""
    store, why = Store([tmp_path / "a[/b]c"]), "OSError: [/usr/lib] is :heart: [red]x"
    wrong = Timing("flykernels [bold]w", FAILED, {"t": 2}, None, f"{why} \udcff")
    named = replace(key(), op="[/red]mm")
    store.update(
        named, lambda e: replace(e.with_timing(wrong).with_timing(Timing("aten \ud800", 3.0)), winner="aten \ud800")
    )
    assert "[/red]mm" in cli("list", directory="a[/b]c").output and "a[/b]c" in cli("list", directory="a[/b]c").output
    shown = cli("show", named.digest, directory="a[/b]c").output
    assert why in shown and "flykernels [bold]w" in shown and r"\udcff" in shown
    page = tmp_path / "page.html"
    told = CliRunner().invoke(main, ["report", str(page)], catch_exceptions=False)
    assert told.exit_code == 0 and "[/red]mm" in told.output and "aten \\ud800" in page.read_text()
    store.update(replace(key(2), op="\x1b[2J"), lambda e: e)
    assert r"\x1b[2J" in (listed := cli("list", directory="a[/b]c").output) and "\x1b" not in listed
    told = CliRunner().invoke(main, ["explain", "mm", "--m", "1", "--n", "8", "--k", "8", "--dtype", "[/f32]"])
    assert told.exit_code == 1 and "'[/f32]'" in told.output


@pytest.mark.parametrize("text", ["9" * 400, "", "1e3", "-1"])
def test_sizes_that_are_none(cli, text):
    assert cli("prune", f"--max-size={text}").exit_code == 2


def test_what_is_refused_moves_no_cursor(cli, tmp_path):
    fill(Store([tmp_path / "cache"]), 1, target={"arch": "\x1b[31m"})
    cli("export", tmp_path / "b.tar")
    for told in (cli("verify", tmp_path / "b.tar"), cli("import", tmp_path / "b.tar", directory="other")):
        assert r"arch \x1b[31m" in told.output and "\x1b" not in told.output


def test_digits_that_are_no_numbers(cli, filled, tmp_path):
    cli("export", tmp_path / "b.tar")
    for text in ("²", "1" * 5000):
        assert "is refused: entry" in cli("verify", tmp_path / "b.tar", "--target", f"compute_units={text}").output


def test_compact(cli, filled, tmp_path):
    before = held(tmp_path / "cache")
    told = cli("compact").output
    assert "3 entries and 3 code objects in segments, 6 files went into them" in told
    assert held(tmp_path / "cache") == before and not list((tmp_path / "cache").glob("*/*/*"))
    assert cli("list").output.count("flykernels t=1") == 3 and "(winner)" in cli("show", filled[0].key.digest).output
    assert "removed 3 entries, 3 code objects" in cli("prune", "--max-size", "0").output
    assert "empty" in cli("list").output


def test_the_target_of_the_tests_is_that_of_the_chip():
    from flykernels.targets import gfx950

    assert MI350["compute_units"] == gfx950.limits.compute_units
