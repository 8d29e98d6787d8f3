"""The one error of tracing and lowering: which kernel, which line of the user's, what is wrong, what to do."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from traceback import walk_tb

from .. import mlir

_OURS = str(Path(__file__).parents[1])  # the language, layouts and targets: never the line to show


class TraceError(Exception):
    """A kernel that cannot be traced or lowered.

    wrong   what is wrong, in words
    do      what to do about it ("" where the sentence above says it)
    kernel  the kernel's name
    file, line, source  the line of the kernel's text that asked for it ("" and 0 where unknown)"""

    def __init__(self, wrong: str, do: str = "", kernel: str = "", file: str = "", line: int = 0):
        self.wrong, self.do, self.kernel, self.file, self.line = wrong, do, kernel, file, line
        self.source = linecache.getline(file, line).strip() if file else ""
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f", {self.file}:{self.line}" if self.file else ""
        shown = f"\n    {self.source}" if self.source else ""
        todo = f"\n  do: {self.do}" if self.do else ""
        return f"kernel {self.kernel or '?'}{where}: {self.wrong}{shown}{todo}"

    def __reduce__(self):
        return TraceError, (self.wrong, self.do, self.kernel, self.file, self.line)


def located(error: Exception, kernel: str) -> TraceError:
    """The error as a TraceError of this kernel, at the innermost line that is not ours."""
    if isinstance(error, TraceError):
        if error.file:
            return error
        return TraceError(error.wrong, error.do, kernel, *_line_of(error))
    if isinstance(error, mlir.ir.MLIRError):
        return _from_mlir(error, kernel)
    kind = "" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: "
    return TraceError(f"{kind}{error}", "", kernel, *_line_of(error))


def _line_of(error: Exception) -> tuple[str, int]:
    theirs = ("", 0)
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, mlir.FOLDER, "<")):
            theirs = file, line
    return theirs


def _from_mlir(error, kernel: str) -> TraceError:
    """MLIR's diagnostics, with the advice that fits the usual mistake."""
    wrong, file, line = str(error), "", 0
    if error.error_diagnostics:
        first = error.error_diagnostics[0]
        wrong = first.message
        found = re.search(r'"([^"<]+)":(\d+)', str(first.location))
        file, line = (found[1], int(found[2])) if found else ("", 0)
    do = ""
    if "dominate" in wrong:
        wrong = "a value is used outside the loop or branch that makes it"
        do = "carry it: k.loop(..., carry=value), and return it from the body"
    return TraceError(wrong, do, kernel, file, line)
