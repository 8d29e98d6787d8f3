"""One-change mutations of a kernel: what a slip in a schedule or an address looks like. Each must be noticed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flykernels.sim.asm import M0, Code, Instruction, Operand
from flykernels.sim.delay import run_delayed
from flykernels.sim.errors import SimulatorError
from flykernels.sim.findings import failing
from flykernels.sim.load import Loaded, load
from flykernels.sim.run import Simulation

from .case import Case


@dataclass
class Mutant:
    """A kernel with one instruction changed."""

    kind: str  # one of ORDERING, "wait state removed", "M0 kept", "swizzle broken", "bound off by one"
    what: str
    loaded: Loaded
    at: int
    budget: int = 200_000  # instructions a wave: an endless loop is refused
    covers: frozenset[int] | None = None  # instructions whose memory operations the changed wait retired


ORDERING = ("wait removed", "wait weakened", "barrier removed", "flush removed")
NOP = Instruction("s_nop", (Operand("c", 0),), {}, "s_nop 0", 0)
WIDTH = {"vmcnt": 63, "lgkmcnt": 15}


def _with(loaded: Loaded, at: int, new: Instruction) -> Loaded:
    instructions = list(loaded.code.instructions)
    instructions[at] = new
    return Loaded(Code(instructions, loaded.code.labels), loaded.kernel, loaded.data)


def _changed(i: Instruction, **mods) -> Instruction:
    new = copy.copy(i)
    new.mods = {**i.mods, **mods}
    return new


def mutants(loaded: Loaded, hits: np.ndarray, watch: Watch) -> Iterator[Mutant]:
    """Every mutation of the instructions that ran and where it can matter: waits that had something to wait for,
    comparisons that met equal values."""
    waits = watch.retired
    for at, i in enumerate(loaded.code.instructions):
        if not hits[at]:
            continue
        if i.name == "s_waitcnt":
            for counter in ("vmcnt", "lgkmcnt"):
                if counter not in i.mods or not waits.get((at, counter)):
                    continue
                bare = _changed(i)
                del bare.mods[counter]
                what = f"{i.where}: {i.text} minus {counter}"
                covers = frozenset(watch.covered[at, counter])
                yield Mutant("wait removed", what, _with(loaded, at, bare), at, watch.budget, covers)
                if waits[at, counter] > 1:
                    weak = _changed(i, **{counter: i.mods[counter] + 1})
                    what = f"{i.where}: {i.text}, {counter} + 1"
                    yield Mutant("wait weakened", what, _with(loaded, at, weak), at, watch.budget, covers)
        elif i.name == "s_barrier":
            bare = _with(loaded, at, replace(NOP, where=i.where))
            yield Mutant("barrier removed", f"{i.where}: {i.text}", bare, at, watch.budget)
        elif i.name in ("buffer_wbl2", "buffer_inv"):
            bare = _with(loaded, at, replace(NOP, where=i.where))
            yield Mutant("flush removed", f"{i.where}: {i.text}", bare, at, watch.budget)
        elif i.name == "s_nop":
            shorter = replace(i, operands=(Operand("c", i.operands[0].index - 1),))  # -1: no wait state at all
            yield Mutant("wait state removed", f"{i.where}: {i.text}", _with(loaded, at, shorter), at, watch.budget)
        elif i.name.startswith("s_") and i.operands and i.operands[0].kind == "s" and i.operands[0].index == M0:
            bare = _with(loaded, at, replace(NOP, where=i.where))
            yield Mutant("M0 kept", f"{i.where}: {i.text}", bare, at, watch.budget)
    for mutant in (*_swizzles(loaded, hits, watch.both), *_bounds(loaded, watch.equal)):
        yield replace(mutant, budget=watch.budget)


def _swizzles(loaded: Loaded, hits, both: set[int]) -> Iterator[Mutant]:
    """An exclusive or that an LDS address comes from: make it a plain or (of a three-way one, change its table). Where
    its sources never share a bit (`both` has those that do), the two are the same."""
    instructions = loaded.code.instructions
    address: set[int] = set()
    for i in instructions:
        if i.name.startswith("ds_read"):
            address.add(i.operands[1].index)
        elif i.name.startswith("ds_write"):
            address.add(i.operands[0].index)
    for _ in range(3):  # and what the address is computed from
        for i in instructions:
            plain = i.name.startswith("v_") and not i.name.startswith("v_mfma") and bool(i.operands)
            if plain and i.operands[0].kind == "v" and i.operands[0].index in address:
                address |= {o.index for o in i.operands[1:] if o.kind == "v"}
    for at, i in enumerate(instructions):
        if not hits[at] or i.name not in ("v_xor_b32", "v_bitop3_b32") or i.operands[0].index not in address:
            continue
        if i.name == "v_xor_b32" and at not in both:
            continue
        if i.name == "v_xor_b32":
            new = copy.copy(i)
            new.name, new.text = "v_or_b32", i.text.replace("v_xor", "v_or")
        else:
            new = _changed(i, bitop3=i.mods["bitop3"] ^ 0x18)
        yield Mutant("swizzle broken", f"{i.where}: {i.text}", _with(loaded, at, new), at)


def _bounds(loaded: Loaded, equal: set[int]) -> Iterator[Mutant]:
    """A comparison lets one more through, or one less: lt -> le, gt -> ge and back."""
    swap = {"_lt_": "_le_", "_gt_": "_ge_", "_le_": "_lt_", "_ge_": "_gt_"}
    for at, i in enumerate(loaded.code.instructions):
        if at not in equal:
            continue
        for old, new_name in swap.items():
            if old in i.name:
                new = copy.copy(i)
                new.name, new.text = i.name.replace(old, new_name), i.text.replace(old, new_name)
                yield Mutant("bound off by one", f"{i.where}: {i.text}", _with(loaded, at, new), at)
                break


class Watch:
    """Notes what each wait retires, which comparisons ever compare equal values, and which exclusive ors have a bit in
    both sources, in an active lane: where none of this happens, a mutation of the instruction cannot matter."""

    def __init__(self) -> None:
        self.retired: dict[tuple[int, str], int] = {}
        self.covered: dict[tuple[int, str], set[int]] = {}
        self.equal: set[int] = set()
        self.both: set[int] = set()
        self.budget = 0  # for mutants: several times what the kernel as it is takes

    def watch(self, simulation: Simulation) -> None:
        self.instructions = simulation.loaded.code.instructions
        b = simulation.program.binder
        self.compare, self.xor = {}, {}
        for pc, i in enumerate(self.instructions):
            if i.name.startswith("v_cmp_") and i.name.endswith(("i32", "u32", "i64", "u64")):
                kind = i.name.split("_")[-1]
                self.compare[pc] = tuple(b.typed(o, kind) for o in i.operands[1:3])
            elif i.name == "v_xor_b32":
                self.xor[pc] = tuple(b.raw(o) for o in i.operands[1:3])

    def step(self, g, pc: int) -> None:
        if pc in self.compare and pc not in self.equal:
            x, y = (r(g) for r in self.compare[pc])
            if (np.broadcast_to(x == y, g.exec.shape) & g.exec).any():
                self.equal.add(pc)
        if pc in self.xor and pc not in self.both:
            x, y = (r(g) for r in self.xor[pc])
            if (np.broadcast_to(x & y != 0, g.exec.shape) & g.exec).any():
                self.both.add(pc)
        i = self.instructions[pc]
        if i.name != "s_waitcnt":
            return
        if "vmcnt" in i.mods:
            self._note(pc, "vmcnt", g.vm[: max(0, len(g.vm) - i.mods["vmcnt"])])
        if "lgkmcnt" in i.mods:
            done = g.ds[: max(0, len(g.ds) - i.mods["lgkmcnt"])]
            self._note(pc, "lgkmcnt", [*done, *g.sm] if i.mods["lgkmcnt"] == 0 else done)

    def _note(self, pc: int, counter: str, done: list) -> None:
        key = pc, counter
        self.covered.setdefault(key, set()).update(p.pc for p in done)
        if len(done) > self.retired.get(key, 0):
            self.retired[key] = len(done)

    def lds(self, *args) -> None: ...

    def memory(self, *args, **more) -> None: ...


def run(case: Case, loaded: Loaded, watch: Watch | None = None, **options):
    """(result, largest error over its bound) of one run of a case with some code."""
    arguments = case.arguments()
    simulation = Simulation(loaded, arguments, case.grid, trace=watch, **{**case.options, **options})
    if watch is not None:
        watch.watch(simulation)
    result = simulation.run()
    return result, case.wrong(arguments)


def survey(case: Case) -> tuple[Loaded, np.ndarray, Watch]:
    """Runs a case as it is: (code, hits of each instruction, what was watched). AssertionError if it is not clean."""
    loaded = load(case.text or case.binary, case.entry)
    watch = Watch()
    result, wrong = run(case, loaded, watch)
    result.raise_for_findings()
    assert wrong <= 1, f"{case.name} is wrong as it is: {wrong}"
    watch.budget = 2000 + 4 * result.counters.instructions // result.counters.waves
    return loaded, result.counters.hits, watch


@functools.lru_cache(maxsize=1)
def as_it_is(case: Case) -> tuple[bytes, ...]:
    """What the unchanged kernel leaves in its arrays, as run by `verdict`; kept for the case in hand."""
    arguments = case.arguments()
    Simulation(load(case.text or case.binary, case.entry), arguments, case.grid, **case.options).run()
    return tuple(x.tobytes() for x in arguments if isinstance(x, np.ndarray))


def verdict(case: Case, mutant: Mutant, limit: int = 8) -> str:
    """How a mutant fares: "found" (by the checker), "wrong" (result), "refused" (an error); else "harmless" or
    "missed".

    Harmless is what is shown to change nothing: every result is bit for bit that of the kernel as it is, with all loads
    as late as the waits allow and the checker silent. Where a wait, a barrier or a flush was changed, moreover no
    operation of the first workgroup that it concerns (those that the wait retired), delayed alone to its wait, changes
    a result; `limit` operations are tried. A wait state less changes no result here: it is found, or no rule needs it
    (LLVM keeps some for loops' alignment, for registers that another instruction has set since, within clauses of
    loads, after empty inline assembly, and after packed instructions, whose op_sel_hi it takes for a destination's).
    """
    arguments = case.arguments()
    try:
        simulation = Simulation(mutant.loaded, arguments, case.grid, **{**case.options, "budget": mutant.budget})
        if mutant.kind == "wait state removed":
            return "found" if failing(simulation.collector.findings) else "harmless"
        result = simulation.run()
        wrong = case.wrong(arguments)
    except SimulatorError:
        return "refused"
    except IndexError:
        return "wrong"
    if not result.ok:
        return "found"
    if wrong > 1:
        return "wrong"
    if tuple(x.tobytes() for x in arguments if isinstance(x, np.ndarray)) != as_it_is(case):
        return "missed"
    if mutant.kind in ORDERING:
        options = {k: v for k, v in case.options.items() if k != "waivers"}
        late = run_delayed(
            mutant.loaded, case.arguments(), case.grid, only=mutant.covers, limit=limit, **options
        )  # fmt: skip
        if late.corruptions:
            return "missed"
    return "harmless"
