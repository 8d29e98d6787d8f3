"""Forged contents under a manifest that fits them: refused as well."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from tests.cache.making import archive, bundle, code, packed, parts, records, refused, rewritten, signed_off
from tuning_cache import BundleError, Store, export, import_, segment, verify
from tuning_cache.manifest import Manifest


def forged_entry(held: dict, change) -> dict:
    name = next(n for n in held if n.startswith("entries"))
    body = json.loads(held[name])["entry"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {**held, name: b'{"entry":%s,"format":1,"sha256":"%s"}\n' % (text.encode(), digest.encode())}


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["timings"]["aten mm"].update(microseconds="fast"),
        lambda b: b["timings"]["aten mm"].update(microseconds=-1.0),
        lambda b: b["timings"]["aten mm"].update(microseconds=True),
        lambda b: b["timings"]["aten mm"].update(name="other"),
        lambda b: b["timings"]["flykernels t=1"].update(artefact="../../../../etc/passwd"),
        lambda b: b["timings"]["flykernels t=1"].update(config=[1]),
        lambda b: b.update(winner=3),
        lambda b: b.update(source="rumour"),
        lambda b: b.update(timings=[]),
    ],
)
def test_entries_of_wrong_types(tmp_path, change):
    path = bundle(tmp_path, count=1)
    refused(tmp_path, packed(path, forged_entry(records(path), change)), "not an entry")


def test_an_entry_under_another_keys_name(tmp_path):
    path = bundle(tmp_path, count=2)

    def swap(held):
        one, two = [n for n in held if n.startswith("entries")]
        return {**held, one: held[two], two: held[one]}

    refused(tmp_path, rewritten(path, swap), "entry of another key")


def test_a_code_object_under_another_name_or_that_nobody_wants(tmp_path):
    path = bundle(tmp_path, count=1)

    def replaced(held):
        name = next(n for n in held if n.startswith("objects"))
        return {**held, name: code(77).to_bytes()}

    def extra(held):
        other = code(78)
        return {**held, f"objects/{other.digest}": other.to_bytes()}

    refused(tmp_path, rewritten(path, replaced), "has the digest")
    refused(tmp_path, rewritten(bundle(tmp_path, count=1), extra), "no entry of the bundle names")


@pytest.mark.parametrize("kind", ["entries", "objects"])
def test_every_changed_byte_of_a_segment_is_refused_even_if_the_manifest_fits(tmp_path, kind):
    """Rows that lead elsewhere, a fan-out or footer that lies, records of another form. A changed record may be one
    that is whole in itself (white space does not matter): then it comes in as it was."""
    path = bundle(tmp_path, count=2, size=16)
    held, forged = parts(path)[1:], tmp_path / "forged.tar"
    at = next(n for n, (name, _) in enumerate(held) if kind in name)
    data = held[at][1]
    digest_at = len(data) - segment.FOOTER.size + 17  # the footer's SHA-256: read by `cache verify`
    taken = []
    for byte in range(0, len(data), 5):
        changed = data[:byte] + bytes([data[byte] ^ (0x01, 0x20, 0x80, 0xFF)[byte % 4]]) + data[byte + 1 :]
        forged.write_bytes(path.read_bytes())
        signed_off(forged, [(n, changed if i == at else d) for i, (n, d) in enumerate(held)])
        try:
            verify(forged)
            taken.append(byte)
        except BundleError:
            pass
    assert all(digest_at <= byte < digest_at + 32 for byte in taken)


def test_a_manifest_that_lies_about_targets(tmp_path):
    path = bundle(tmp_path)
    held = parts(path)
    manifest = replace(Manifest.from_bytes(held[0][1]), targets=({"arch": "sm_90"},))
    refused(tmp_path, archive(path, [("manifest.json", manifest.to_bytes()), *held[1:]]), "not those of the entries")


def test_a_place_that_cannot_be_written(tmp_path):
    path = bundle(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BundleError, match="cannot be written"):
        import_(Store([tmp_path / "file"]), path)
    with pytest.raises(BundleError, match="cannot be written"):
        export(Store([tmp_path / "source"]), tmp_path / "none" / "b.tar")
    assert (tmp_path / "file").read_text() == "in the way" and not list(tmp_path.glob(".*.part"))
