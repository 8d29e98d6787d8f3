"""Work in many small pieces: done by several processes, saved as each is done, gone on with by the next run.

The file has one JSON line a piece. Lines of several machines, one after the other, are one file too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

LINE_EVERY = 25  # pieces, where there is no terminal to draw a bar on


def resumed(
    work: Mapping[str, tuple], do: Callable[..., Any], sources: str, file: Path | None = None, jobs: int = 1,
    what: str = "pieces",
) -> dict[str, Any]:  # fmt: skip
    """do(*arguments) of each piece by name, in the order of `work`; results are what JSON holds.

    sources  a digest of what results depend on: lines of other sources are not taken
    file     where results are kept, and looked for
    jobs     processes"""
    known = {name: found for name, found in saved(file, sources) if name in work}
    left = {name: arguments for name, arguments in work.items() if name not in known}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=len(work), completed=len(known))
        for name, found in _done(left, do, jobs):
            known[name] = found
            if file is not None:
                with file.open("a") as f:
                    f.write(json.dumps({"sources": sources, "piece": name, "found": found}) + "\n")
            progress.update(task, completed=len(known))
            if not progress.console.is_terminal and len(known) % LINE_EVERY == 0:
                progress.console.print(f"{what}: {len(known)} of {len(work)}")
    return {name: known[name] for name in work}


def saved(file: Path | None, sources: str) -> Iterator[tuple[str, Any]]:
    """(piece, result) of the lines from the same sources."""
    if file is None or not file.exists():
        return
    for line in file.read_text().splitlines():
        try:
            found = json.loads(line)
            if found["sources"] == sources:
                yield found["piece"], found["found"]
        except (ValueError, KeyError, TypeError):
            continue  # half a line of a run that was stopped


def _done(work: Mapping[str, tuple], do: Callable[..., Any], jobs: int) -> Iterator[tuple[str, Any]]:
    if jobs == 1:
        yield from ((name, do(*arguments)) for name, arguments in work.items())
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        names = {pool.submit(do, *arguments): name for name, arguments in work.items()}
        for future in as_completed(names):
            yield names[future], future.result()
