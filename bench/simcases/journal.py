"""A long bench's progress: a bar on a terminal, lines elsewhere, and a journal of what is done, so that a run can stop
and go on later."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

SAVE_EVERY = 5.0  # seconds
LINE_EVERY = 20.0  # seconds between lines where there is no terminal


class OutOfTime(Exception):
    """The time that a run was given is over; what it has done is saved."""


def digest(files: Iterable[Path]) -> str:
    """Of the contents of files: results of other code are not to be taken over."""
    seen = hashlib.sha256()
    for f in sorted(files):
        seen.update(f.name.encode() + b"\0" + f.read_bytes() + b"\0")
    return seen.hexdigest()


class Journal:
    """What steps gave, by name, in a file beside the results. Without a file it forgets.

    file    where to keep it, or None
    code    digest of the code under test: a journal of other code is discarded
    limit   seconds after which `done` raises OutOfTime, or None
    """

    def __init__(self, file: Path | None, code: str, limit: float | None = None) -> None:
        self.file, self.code = file, code
        self.end = None if limit is None else time.monotonic() + limit
        self.steps: dict[str, Any] = {}
        self.saved = time.monotonic()
        if file is not None and file.exists():
            found = json.loads(file.read_text())
            if found["code"] == code:
                self.steps = found["steps"]

    def get(self, step: str) -> Any:
        """What a step gave in an earlier run, or None."""
        return self.steps.get(step)

    def done(self, step: str, value: Any) -> None:
        """Notes what a step gave. OutOfTime if the run's time is over."""
        self.steps[step] = value
        late = self.end is not None and time.monotonic() > self.end
        if late or time.monotonic() - self.saved > SAVE_EVERY:
            self.save()
        if late:
            raise OutOfTime

    def save(self) -> None:
        if self.file is None:
            return
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"code": self.code, "steps": self.steps}, default=lambda value: value.item()))
        os.replace(new, self.file)
        self.saved = time.monotonic()

    def close(self) -> None:
        """All is done: the results have what the journal had."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


class Steps:
    """Shows how far a part of a bench is: `with Steps("mutations") as s: s.expect(12, "softmax"); s.step("found")`."""

    def __init__(self, what: str) -> None:
        self.what, self.label, self.count, self.total = what, "", 0, 0
        self.shown = self.start = time.monotonic()
        console = Console(stderr=True)
        self.bar = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=console, transient=True)
            self.task = self.bar.add_task(what, total=None)

    def __enter__(self) -> Steps:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *what: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def expect(self, total: int, label: str) -> None:
        """`total` steps of `label` come now."""
        self.label, self.count, self.total = label, 0, total
        if self.bar is not None:
            self.bar.reset(self.task, description=f"{self.what}: {label}", total=total)

    def step(self, text: str = "") -> None:
        self.count += 1
        if self.bar is not None:
            self.bar.advance(self.task)
        elif self.count == self.total or time.monotonic() - self.shown > LINE_EVERY:
            self.shown = time.monotonic()
            seconds = self.shown - self.start
            print(
                f"{seconds:6.0f} s  {self.what}: {self.label}: {self.count} of {self.total} {text}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
