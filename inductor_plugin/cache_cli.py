"""The command `flykernels cache`: look at the tuning cache, and let it travel. Needs neither torch nor MLIR, except
where `import` asks what this machine is."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

import tuning_cache
from tuning_cache import Accept, BundleError, Entry, Limits, Store
from tuning_cache.layer import Layer, damage
from tuning_cache.segment import SegmentError

from . import __version__, settings
from .consoles import console_here, plain

FILE = click.Path(dir_okay=False, path_type=Path)
OLD = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@click.group()
def cache() -> None:
    """The tuning cache: what it knows, and bundles of it (FLYKERNELS_CACHE_DIR says where it lies)."""


def _refused(path: Path | str, error: BundleError) -> click.ClickException:
    return click.ClickException(plain(f"{path} is refused: {error}. Nothing was written."))


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return tuning_cache.size_in_bytes(value) if value is not None else None
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


def _age(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value[:-1]) * OLD[value[-1]]
        if not 0 <= seconds < math.inf:
            raise ValueError
        return seconds
    except (ValueError, KeyError, IndexError):
        raise click.BadParameter(f"{value!r} is not a time such as 12h, 30d or 8w") from None


def _patterns(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[dict]:
    """Of "arch=gfx950,compute_units=256" the dict; numbers as numbers."""
    found = []
    for value in values:
        pairs = [part.partition("=") for part in value.split(",")]
        if not all(name and sign and text for name, sign, text in pairs):
            raise click.BadParameter(f"{value!r} is not of the form arch=gfx950,compute_units=256")
        found.append({name.strip(): _value(text.strip()) for name, _, text in pairs})
    return found


def _value(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 20 else text


def _here() -> tuple[dict, ...]:
    """Patterns of this machine's targets. The number of threads is a process's, not the machine's."""
    from . import devices

    try:
        import torch  # noqa: F401
    except ImportError:
        raise click.ClickException(
            "without torch this machine is not known: say --target arch=...,compute_units=... or --any-target"
        ) from None
    found = [devices.DEVICES["cpu"].description()]
    found += [d.description() for t in ("sm90a", "gfx950") if (d := devices.here(t)) is not None]
    return tuple({k: v for k, v in target.items() if k != "threads"} for target in found)


def _versions() -> tuple[dict, ...]:
    from .fingerprint import TEMPLATES, versions

    by_digest = {held["templates"]: held for held in map(versions, TEMPLATES)}
    return tuple(by_digest.values())


def _accept(patterns: list[dict], any_target: bool, any_versions: bool) -> Accept:
    targets = None if any_target else tuple(patterns) if patterns else _here()
    return Accept(targets, None if any_versions else _versions())


def _options(*options: Callable) -> Callable:
    def all_of(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return all_of


_trust = click.option(
    "--trust", type=FILE, multiple=True, help="public key (PEM); one of those named must have signed the bundle"
)
_most = click.option("--max-size", callback=_size, default="64GiB", show_default=True, help="read no more than this")
_let_in = _options(
    click.option("--target", "patterns", callback=_patterns, multiple=True, metavar="NAME=VALUE,...",
                 help="take entries of this target, such as arch=gfx950,compute_units=256; default: of this machine"),
    click.option("--any-target", is_flag=True, help="take entries of whatever target"),
    click.option("--any-versions", is_flag=True, help="take entries of other versions of flykernels or MLIR"),
    click.option("--leave-out", is_flag=True, help="pass over what is not for here, instead of refusing the bundle"),
)  # fmt: skip


def _keys(files: tuple[Path, ...]) -> list[str]:
    from tuning_cache.signature import public_key

    try:
        return [public_key(f) for f in files]
    except BundleError as e:
        raise click.ClickException(str(e)) from None


@cache.command("export")
@click.argument("file", type=FILE)
@click.option("--target", "patterns", callback=_patterns, multiple=True, metavar="NAME=VALUE,...", help="only of these")
@click.option("--op", "ops", multiple=True, help="only these operations: mm, addmm+gelu, ...")
@click.option("--winners", is_flag=True, help="only the winners' code objects")
@click.option("--sign", "key_file", type=FILE, help="private key (PEM, Ed25519) to sign with")
def export(file: Path, patterns: list[dict], ops: tuple[str, ...], winners: bool, key_file: Path | None) -> None:
    """Write the cache to one FILE (.tar, or .tar.gz: compressed). Unpacked, it is a read-only layer of a cache."""

    def wanted(entry: Entry) -> bool:
        held = entry.key.target
        return (not ops or entry.key.op in ops) and (
            not patterns or any(all(k in held and held[k] == v for k, v in p.items()) for p in patterns)
        )

    try:
        made = tuning_cache.export(
            settings.store(), file, wanted=wanted, winners_only=winners, key_file=key_file, made_by=__version__
        )
    except BundleError as e:
        raise click.ClickException(str(e)) from None
    _said(made)


def _said(made: tuning_cache.Exported) -> None:
    m = made.manifest
    click.echo(f"{made.path}: {m.entries} entries, {m.objects} code objects, {made.path.stat().st_size} bytes")
    if made.missing:
        click.echo(f"{made.missing} code objects that entries name are not in the cache: they will be compiled again")


@cache.command("import")
@click.argument("file", type=FILE)
@_let_in
@_trust
@_most
def import_(file: Path, patterns: list[dict], any_target: bool, any_versions: bool, leave_out: bool,
            trust: tuple[Path, ...], max_size: int) -> None:  # fmt: skip
    """Take the bundle FILE into the cache: all of it or, with the reason, nothing.

    What was measured here stays; what is new, or measured there and not here, is added."""
    keys, accept = _keys(trust), _accept(patterns, any_target, any_versions)
    try:
        done = tuning_cache.import_(settings.store(), file, accept, keys, Limits(total=max_size), leave_out)
    except BundleError as e:
        raise _refused(file, e) from None
    click.echo(
        f"{settings.store().directories[0]}: {done.added} entries added, {done.merged} merged, {done.kept} kept as "
        f"they were, {done.objects} code objects; {done.left_out} entries left out; {_signed(done.signer)}"
    )


def _signed(signer: str | None) -> str:
    return f"signed by {signer}" if signer else "not signed"


@cache.command("verify")
@click.argument("file", type=FILE, required=False)
@_let_in
@_trust
@_most
def verify(file: Path | None, patterns: list[dict], any_target: bool, any_versions: bool, leave_out: bool,
           trust: tuple[Path, ...], max_size: int) -> None:  # fmt: skip
    """Is the bundle FILE whole (and, with --target, for that one)? Without FILE: is the cache? Writes nothing."""
    if file is None:
        raise SystemExit(_verify_store(settings.store()))
    keys = _keys(trust)
    accept = Accept(None if any_target or not patterns else tuple(patterns))
    try:
        found = tuning_cache.verify(file, accept, keys, Limits(total=max_size), leave_out)
    except BundleError as e:
        raise _refused(file, e) from None
    m = found.manifest
    click.echo(
        f"{file}: whole; {m.entries} entries, {m.objects} code objects, {m.total_bytes} bytes; {_signed(found.signer)}"
    )
    for target in m.targets:
        click.echo(plain("for " + ", ".join(f"{k} {v}" for k, v in target.items())))
    for v in m.versions:
        click.echo(plain("made by " + ", ".join(f"{k} {x}" for k, x in v.items())))


def _verify_store(store: Store) -> int:
    """Prints what is damaged; 1 if anything is."""
    counts = {"entries": 0, "objects": 0}
    bad = 0
    unread: dict[str, None] = {}
    for layer in (Layer(folder, unread.setdefault, notes=False) for folder in store.directories):
        for kind in counts:
            for part in layer.segments(kind):
                try:
                    part.check()
                except (OSError, SegmentError) as e:
                    click.echo(f"{part.path}: {e}")
                    bad += 1
            for address, _, found in layer.every(kind):
                counts[kind] += 1
                why = damage(kind, address, found.content)
                if why:
                    click.echo(plain(f"{found}: {why}"))
                    bad += 1
    for message in unread:
        click.echo(message)
    bad += len(unread)
    entries, objects = counts.values()
    click.echo(f"{entries} entries, {objects} code objects: {bad} damaged")
    if bad:
        click.echo("they are never loaded; `flykernels cache prune` removes what is damaged from the first directory")
    return 1 if bad else 0


@cache.command("merge")
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option("--output", "-o", type=FILE, required=True)
@click.option("--sign", "key_file", type=FILE, help="private key (PEM, Ed25519) to sign with")
@_trust
@_most
def merge(files: tuple[Path, ...], output: Path, key_file: Path | None, trust: tuple[Path, ...], max_size: int) -> None:
    """Make one bundle of several. Measured goes before not measured; of two measured, the one named first."""
    keys = _keys(trust)
    try:
        made = tuning_cache.join(
            files, output, trusted=keys, key_file=key_file, limits=Limits(total=max_size), made_by=__version__
        )
    except BundleError as e:
        raise click.ClickException(plain(f"{e}. Nothing was written.")) from None
    _said(made)


@cache.command("list")
@click.option("--op", "ops", multiple=True, help="only these operations")
@click.option("--json", "as_json", is_flag=True, help="one JSON object a line")
def list_(ops: tuple[str, ...], as_json: bool) -> None:
    """What the cache knows: one line an entry."""
    store = settings.store()
    table = Table(title="tuning cache: " + ", ".join(map(str, store.directories)), title_justify="left")
    for column in ("entry", "operation", "problem", "target", "winner", "us", "source"):
        table.add_column(column, justify="right" if column == "us" else "left", overflow="fold")
    count = 0
    for key in store.all_keys():
        entry = store.newest(key)
        if entry is None or (ops and key.op not in ops):
            continue
        count += 1
        best = entry.best()
        us = best.microseconds if best and best.microseconds not in (None, math.inf) else None
        if as_json:
            found = {name: getattr(key, name) for name in ("op", "problem", "target", "versions")}
            line = {"entry": key.digest, **found, "winner": entry.winner, "microseconds": us, "source": entry.source}
            click.echo(json.dumps(line))
        else:
            target = " ".join(str(v) for k, v in key.target.items() if k != "product")
            name = entry.winner or f"undecided, {len(entry.timings)} candidates"
            table.add_row(key.digest[:12], key.op, _problem(key.problem), target, name,
                          f"{us:.1f}" if us is not None else "-", entry.source)  # fmt: skip
    if not as_json:
        console_here().print(table if count else "the cache is empty")


def _problem(problem: dict) -> str:
    sizes = [f"{k.upper()}={problem[k]}" for k in ("m", "n", "k", "rows", "width") if k in problem]
    kinds = [str(problem[k]) for k in ("dtype", "a", "b") if k in problem]
    return " ".join(sizes + kinds) or json.dumps(problem)


@cache.command("show")
@click.argument("entry")
@click.option("--json", "as_json", is_flag=True, help="the entry's file as it is")
def show(entry: str, as_json: bool) -> None:
    """One ENTRY in full: its name in `list`, or the beginning of it."""
    store = settings.store()
    found = {k.digest: k for k in store.all_keys() if k.digest.startswith(entry.lower())}
    if len(found) != 1:
        raise click.ClickException(f"{len(found)} entries begin with {entry!r}; `flykernels cache list` names them")
    held = store.newest(next(iter(found.values())))
    if held is None:
        raise click.ClickException("it has just been removed")
    if as_json:
        click.echo(held.to_json(), nl=False)
        return
    out = console_here()
    for name in ("op", "problem", "target", "versions"):
        out.print(f"{name}: {json.dumps(getattr(held.key, name))}", highlight=False, markup=False, soft_wrap=True)
    table = Table(title=f"source: {held.source}", title_justify="left")
    for column in ("candidate", "us", "code object", "quarantined"):
        table.add_column(column, justify="right" if column == "us" else "left", overflow="fold")
    rank = lambda t: (t.microseconds is None, t.microseconds or 0)
    for t in sorted(held.timings.values(), key=rank):
        us = "-" if t.microseconds is None else "failed" if math.isinf(t.microseconds) else f"{t.microseconds:.1f}"
        mark = " (winner)" if t.name == held.winner else ""
        there = " ".join(d[:12] + ("" if store.content(d) is not None else " (lost)") for d in t.artefacts)
        table.add_row(t.name + mark, us, there, t.quarantined or "")
    out.print(table)


@cache.command("prune")
@click.option("--max-size", callback=_size, help="such as 2GiB: what was used longest ago goes until no more is left")
@click.option("--unused", "unused_seconds", callback=_age, help="such as 30d: what was not used for so long goes")
@click.option("--dry-run", is_flag=True, help="say what would go")
def prune(max_size: int | None, unused_seconds: float | None, dry_run: bool) -> None:
    """Remove damaged files and code objects without an entry and, if asked, what was used longest ago."""
    start = time.monotonic()
    done: Any = tuning_cache.prune(settings.store(), max_size, unused_seconds, dry_run)
    would = "would remove" if dry_run else "removed"
    click.echo(
        f"{settings.store().directories[0]}: {would} {done.entries} entries, {done.objects} code objects and "
        f"{done.damaged} damaged files, {done.freed} bytes; {done.left} bytes left ({time.monotonic() - start:.1f} s)"
    )


@cache.command("compact")
def compact() -> None:
    """Put what has a file of its own, and is not being tuned, into few files (segments) that hold many each."""
    start = time.monotonic()
    try:
        done = tuning_cache.fold(settings.store())
    except OSError as e:
        raise click.ClickException(f"{settings.store().directories[0]} cannot be written: {e.strerror}") from None
    click.echo(
        f"{settings.store().directories[0]}: {done.entries} entries and {done.objects} code objects in segments, "
        f"{done.files} files went into them ({time.monotonic() - start:.1f} s)"
    )


@cache.command("push")
@click.option("--wait", callback=_age, default="1h", show_default=True, help="give up after so long")
def push(wait: float) -> None:
    """Write all that the cache knows to the remote store (FLYKERNELS_REMOTE), merged with what is there."""
    store = settings.store()
    if store.remote is None:
        raise click.ClickException("no remote store is named: flykernels --remote URL cache push")
    if not store.remote.writes:
        raise click.ClickException(f"FLYKERNELS_REMOTE_WRITE says that {store.remote.url} is only read")
    count, end = 0, time.monotonic() + wait
    for _, entry in store.entries():
        for digest in (d for t in entry.timings.values() for d in t.artefacts):
            content = store.content(digest)
            if content is not None:
                store.remote.keep_object(digest, content)
        store.remote.keep_entry(entry)
        count += 1
        if not store.remote.flush(end - time.monotonic()):
            raise click.ClickException(f"{store.remote.url}: given up after {wait:.0f} s, at entry {count}")
    if store.remote.failures:
        raise click.ClickException(f"{store.remote.url}: {store.remote.failures} calls failed; run it again to go on")
    click.echo(f"{store.remote.url}: {count} entries")
