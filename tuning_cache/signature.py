"""Who made a bundle: an Ed25519 signature over its manifest, which in turn holds the SHA-256 of every file.

Keys are PEM files, as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them. The package
`cryptography` does the work; it is asked for only where something is signed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .archive import BundleError

DOMAIN = b"flykernels bundle manifest 1\n"  # so that a signature of something else never fits
MOST = 4096  # bytes of a signature's file


class NoCryptography(BundleError):
    """A signature is to be made or checked, and the package that does it is not installed."""

    def __init__(self) -> None:
        super().__init__("signatures need the package `cryptography`: pip install 'flykernels[sign]'")


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise NoCryptography from None
    return serialization, ed25519


def sign(manifest: bytes, key_file: Path) -> bytes:
    """The content of manifest.sig. BundleError if the file is not an unencrypted Ed25519 private key."""
    serialization, ed25519 = _library()
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as e:
        raise BundleError(f"{key_file.name} is not a private key in PEM without a password: {e}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise BundleError(f"{key_file.name} is not an Ed25519 key: openssl genpkey -algorithm ed25519 makes one")
    public = key.public_key().public_bytes_raw().hex()
    text = {"algorithm": "ed25519", "public_key": public, "signature": key.sign(DOMAIN + manifest).hex()}
    return json.dumps(text, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def public_key(key_file: Path) -> str:
    """A public key's 32 bytes in hex, from its PEM file. BundleError if it is none."""
    serialization, ed25519 = _library()
    try:
        key = serialization.load_pem_public_key(key_file.read_bytes())
    except (OSError, ValueError, TypeError) as e:
        raise BundleError(f"{key_file.name} is not a public key in PEM: {e}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise BundleError(f"{key_file.name} is not an Ed25519 key")
    return key.public_bytes_raw().hex()


def check(manifest: bytes, signature: bytes | None, trusted: Sequence[str]) -> str | None:
    """The signer's public key in hex; None for a bundle without a signature, where none is asked for.

    trusted  public keys in hex, one of which must have signed (empty: any valid signature, or none, will do)

    BundleError if the signature does not verify, or is of nobody trusted."""
    if signature is None:
        if trusted:
            raise BundleError("it is not signed, and a signature of a trusted key is asked for")
        return None
    try:
        held = json.loads(signature)
        signer, value = held["public_key"], bytes.fromhex(held["signature"])
        public = bytes.fromhex(signer)
        known = held["algorithm"] == "ed25519" and set(held) == {"algorithm", "public_key", "signature"}
        exact = json.dumps(held, sort_keys=True, separators=(",", ":")).encode() + b"\n" == signature
        if not known or not exact or public.hex() != signer or value.hex() != held["signature"]:
            raise ValueError("not the form that export writes")
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise BundleError(f"the signature cannot be read: {e}") from None
    if trusted and signer not in trusted:
        raise BundleError(f"it is signed by {signer}, which is not a trusted key")
    _, ed25519 = _library()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(value, DOMAIN + manifest)
    except (InvalidSignature, ValueError):
        raise BundleError("the signature does not fit the manifest: one of them was changed") from None
    return signer
