"""Signed bundles: who signed, what a change does, and what is said where the library is absent."""

from __future__ import annotations

import json
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519

from tests.cache.making import archive, files, fill, parts
from tuning_cache import BundleError, Store, export, import_, verify
from tuning_cache.signature import public_key


@pytest.fixture
def keys(tmp_path):
    """(private PEM, public PEM) twice."""
    made = []
    for name in ("one", "two"):
        key = ed25519.Ed25519PrivateKey.generate()
        pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password))
        public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
        made.append((private, public))
    return made


@pytest.fixture
def signed(tmp_path, keys):
    store = Store([tmp_path / "source"])
    fill(store, 1)
    return export(store, tmp_path / "b.tar", key_file=keys[0][0]).path


def test_a_signature_that_is_trusted(tmp_path, keys, signed):
    mine = public_key(keys[0][1])
    assert verify(signed, trusted=[public_key(keys[1][1]), mine]).signer == mine
    assert verify(signed).signer == mine
    assert import_(Store([tmp_path / "target"]), signed, trusted=[mine]).added == 1


def test_another_signer_or_none(tmp_path, keys, signed):
    store = Store([tmp_path / "target"])
    with pytest.raises(BundleError, match="not a trusted key"):
        import_(store, signed, trusted=[public_key(keys[1][1])])
    unsigned = export(Store([tmp_path / "source"]), tmp_path / "u.tar").path
    with pytest.raises(BundleError, match="not signed"):
        import_(store, unsigned, trusted=[public_key(keys[0][1])])
    assert not files(tmp_path / "target")


def test_every_changed_byte_of_the_signature_is_refused(tmp_path, signed):
    held = parts(signed)
    signature = held[1][1]
    assert held[1][0] == "manifest.sig"
    for at in range(len(signature)):
        changed = signature[:at] + bytes([signature[at] ^ 0x01]) + signature[at + 1 :]
        archive(tmp_path / "c.tar", [held[0], ("manifest.sig", changed), *held[2:]])
        with pytest.raises(BundleError, match="signature"):
            verify(tmp_path / "c.tar")


def test_a_signature_of_another_bundle(tmp_path, keys, signed):
    store = Store([tmp_path / "other"])
    fill(store, 2)
    other = parts(export(store, tmp_path / "o.tar").path)
    archive(tmp_path / "c.tar", [other[0], parts(signed)[1], *other[1:]])
    with pytest.raises(BundleError, match="does not fit the manifest"):
        verify(tmp_path / "c.tar")


def test_a_signature_by_a_key_that_says_it_is_another(tmp_path, keys, signed):
    held = parts(signed)
    forged = {**json.loads(held[1][1]), "public_key": public_key(keys[1][1])}
    text = json.dumps(forged, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    archive(tmp_path / "c.tar", [held[0], ("manifest.sig", text), *held[2:]])
    with pytest.raises(BundleError, match="does not fit the manifest"):
        verify(tmp_path / "c.tar", trusted=[public_key(keys[1][1])])


def test_files_that_are_no_keys(tmp_path, keys):
    store = Store([tmp_path / "source"])
    fill(store, 1)
    other = tmp_path / "x.pem"
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    other.write_bytes(
        x25519.X25519PrivateKey.generate().private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password)
    )
    for file, reason in (
        (keys[0][1], "not a private key"),
        (other, "not an Ed25519"),
        (tmp_path / "none", "none is not"),
    ):
        with pytest.raises(BundleError, match=reason):
            export(store, tmp_path / "b.tar", key_file=file)
    with pytest.raises(BundleError, match="not a public key"):
        public_key(keys[0][0])
    assert not (tmp_path / "b.tar").exists()


def test_without_the_library(tmp_path, keys, signed, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(BundleError, match=r"pip install 'flykernels\[sign\]'"):
        verify(signed)
    unsigned = export(Store([tmp_path / "source"]), tmp_path / "u.tar").path
    assert verify(unsigned).signer is None
