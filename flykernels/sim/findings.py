"""What the checker says: findings with a severity, and waivers that excuse a kind of finding in a kernel for a
reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SEVERITIES = ("error", "warning", "note")

# kind -> severity. An error is a wrong or undefined result; a warning depends on what is done with the value.
KINDS = {
    "register-in-flight": "error",  # a register is read or overwritten while a load into it is outstanding
    "scalar-load-wait": "error",  # a scalar load's result is used after a wait other than lgkmcnt(0)
    "lds-race": "error",  # an LDS access is not ordered after a conflicting one
    "memory-race": "error",  # waves or workgroups share memory without order, or without flushing caches
    "lds-in-flight": "error",  # LDS is touched while this wave's own direct load into it is outstanding
    "lds-bounds": "error",
    "out-of-bounds": "error",  # memory outside every argument
    "write-outside-output": "error",
    "misaligned": "error",
    "exec-not-full": "error",  # at an instruction that needs all lanes
    "mfma-hazard": "error",  # too few wait states between a matrix instruction and a dependent one
    "wait-states": "error",  # too few between two other instructions that the hardware does not interlock
    "barrier-divergence": "error",
    "uninitialised-lds": "error",
    "uninitialised-memory": "error",
    "uninitialised-register": "warning",
    "bounds-ambiguous": "warning",  # the scalar offset decides whether a buffer access is in range
    "denormal-flush": "note",  # the kernel asks for it
}


@dataclass(frozen=True)
class Waiver:
    """Excuses findings. `kernel` and `kind` must equal the finding's; `reason` says why it is harmless."""

    kernel: str
    kind: str
    reason: str
    contains: str = ""  # and the message holds this

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"waiver for unknown kind {self.kind!r}; kinds are {', '.join(KINDS)}")
        if not self.reason.strip() or not self.kernel.strip():
            raise ValueError("a waiver needs the kernel's name and a reason")


@dataclass(frozen=True)
class Finding:
    """One thing found.

    severity   "error", "warning" or "note"
    kind       a key of KINDS
    message    a whole sentence with registers, ranges, waves
    waves      wave numbers within the workgroup
    pc         index of the instruction; `where` its line (text) or byte offset (code object)
    other      text and place of the other instruction of a race
    count      how often it happened in this run
    waived     the waiver's reason, if one excuses it
    """

    severity: str
    kind: str
    message: str
    kernel: str = ""
    workgroup: tuple[int, ...] = ()
    waves: tuple[int, ...] = ()
    pc: int = -1
    where: int = -1
    instruction: str = ""
    source: str = ""
    other: str = ""
    other_pc: int = -1
    count: int = 1
    waived: str = ""

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        who = f" workgroup {self.workgroup}" if self.workgroup else ""
        if self.waves:
            who += f" wave{'s' if len(self.waves) > 1 else ''} {','.join(map(str, self.waves))}"
        place = f"[{self.where}: {self.instruction}{at}]"
        text = f"{self.severity}: {self.kind}:{who}{':' if who else ''} {self.message} {place}{times}"
        if self.other:
            text += f"\n    other: {self.other}"
        return text + (f"\n    waived: {self.waived}" if self.waived else "")


@dataclass
class Collector:
    """Gathers findings, one for each kind, instruction and other instruction; repeats are counted."""

    kernel: str
    waivers: tuple[Waiver, ...] = ()
    found: dict[tuple, Finding] = field(default_factory=dict)

    def add(self, kind: str, message: str, instruction=None, pc: int = -1, other_pc: int = -1, **more) -> None:
        key = (kind, pc, other_pc)
        if key in self.found:
            old = self.found[key]
            self.found[key] = Finding(**{**vars(old), "count": old.count + 1})
            return
        if instruction is not None:
            more.setdefault("instruction", instruction.text)
            more.setdefault("where", instruction.where)
            more.setdefault("source", instruction.source)
        waived = next(
            (w.reason for w in self.waivers if w.kernel == self.kernel and w.kind == kind and w.contains in message),
            "",
        )
        self.found[key] = Finding(
            KINDS[kind], kind, message, self.kernel, pc=pc, other_pc=other_pc, waived=waived, **more
        )

    @property
    def findings(self) -> list[Finding]:
        return sorted(self.found.values(), key=lambda f: (SEVERITIES.index(f.severity), f.pc))


def failing(findings: Iterable[Finding]) -> list[Finding]:
    """The errors that no waiver excuses."""
    return [f for f in findings if f.severity == "error" and not f.waived]
