"""`flykernels sim FILE`: runs a code object on the simulator, prints findings, counters and simulated times."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from .convert import bf16_bits
from .errors import SimulatorError
from .findings import Finding, Waiver, failing
from .load import load
from .run import BUDGET, run_on_sim

TYPES: dict[str, Any] = {
    "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "f64": np.float64, "u8": np.uint8, "i8": np.int8,
    "u16": np.uint16, "i16": np.int16, "u32": np.uint32, "i32": np.int32, "u64": np.uint64, "i64": np.int64,
}  # fmt: skip
FILLS = ("random", "zeros", "ones", "range", "nan")


class Argument(click.ParamType):
    """One kernel argument: `128` or `1e-5` by value (`7:i64` with a type), `f32[4,256]` a buffer (`=zeros`, `=ones`,
    `=range`, `=nan`; random by default), `@file.npy` an array from a file."""

    name = "argument"

    def convert(self, value, param, ctx):
        try:
            return parse_argument(value)
        except (ValueError, OSError, OverflowError, MemoryError, EOFError) as e:
            said = str(e)
            self.fail(said if said.startswith(value) else f"{value}: {said}", param, ctx)


def parse_argument(text: str):
    """One --args word -> array or value. ValueError says what is wrong."""
    if text.startswith("@"):
        return np.load(text[1:], allow_pickle=False)
    if m := re.fullmatch(r"(\w+)\[([\d,x ]+)\](?:=(\w+))?", text):
        if m[1] not in TYPES:
            raise ValueError(f"{text}: no type {m[1]}; types are {', '.join(TYPES)}")
        shape = tuple(int(n) for n in re.split(r"[,x]", m[2]))
        return fill(m[1], shape, m[3] or "random")
    if m := re.fullmatch(r"([-+.\w]+):(\w+)", text):
        if m[2] not in TYPES:
            raise ValueError(f"{text}: no type {m[2]}; types are {', '.join(TYPES)}")
        if m[2] == "bf16":
            return np.uint16(bf16_bits(np.array([float(m[1])], np.float32))[0])
        number: Any = float(m[1]) if m[2].startswith("f") else int(m[1], 0)
        return TYPES[m[2]](number)
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text}: not a number, TYPE[SHAPE][=FILL] or @file.npy") from None


def fill(kind: str, shape: tuple[int, ...], how: str) -> np.ndarray:
    """A buffer for a trial run, the same every time."""
    if how not in FILLS:
        raise ValueError(f"no fill {how!r}; fills are {', '.join(FILLS)}")
    dtype, r = TYPES[kind], np.random.default_rng(0)
    count = int(np.prod(shape))
    if kind == "bf16":
        values = fill("f32", shape, how)
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if how == "nan":
        return np.full(shape, np.nan, dtype) if np.issubdtype(dtype, np.floating) else np.full(shape, -1).astype(dtype)
    if how in ("zeros", "ones"):
        return np.full(shape, how == "ones", dtype)
    if how == "range":
        return np.arange(count).reshape(shape).astype(dtype)
    if np.issubdtype(dtype, np.floating):
        return r.standard_normal(shape).astype(dtype)
    info = np.iinfo(dtype)
    return r.integers(0, min(info.max, 255) + 1, shape).astype(dtype)


class Triple(click.ParamType):
    name = "x[,y[,z]]"

    def convert(self, value, param, ctx):
        try:
            counts = tuple(int(n) for n in re.split(r"[,x]", value))
        except ValueError:
            self.fail(f"{value}: give 1 to 3 numbers, as in 4,2,1", param, ctx)
        if not 1 <= len(counts) <= 3:
            self.fail(f"{value}: give 1 to 3 numbers", param, ctx)
        return counts + (1,) * (3 - len(counts))


def parse_waiver(text: str, kernel: str) -> Waiver:
    """`KIND:reason` -> Waiver for this kernel."""
    kind, _, reason = text.partition(":")
    return Waiver(kernel, kind.strip(), reason.strip())


class Words(click.Command):
    """A command whose `--args` takes all words up to the next option: `--args f32[64] f32[64] 64`, and again."""

    def parse_args(self, ctx, args):
        out: list[str] = []
        taking = False
        for word in args:
            if word.startswith("--"):
                taking = word == "--args"
                out += [] if taking else [word]
            else:
                out += ["--args", word] if taking else [word]
        return super().parse_args(ctx, out)


@click.command("sim", cls=Words, help=__doc__)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--args", "arguments", multiple=True, type=Argument(), metavar="WORD...", help=Argument.__doc__)
@click.option("--grid", type=Triple(), default="1,1,1", show_default=True, help="workgroups along x, y, z")
@click.option("--block", type=Triple(), default=None, help="work-items along x, y, z; the code object's by default")
@click.option("--entry", default=None, help="kernel name, where there are several")
@click.option("--shared", "shared_bytes", default=0, show_default=True, help="dynamic LDS bytes")
@click.option("--output", "outputs", multiple=True, type=int, help="position of a buffer that may be written")
@click.option("--workgroup", "workgroups", multiple=True, type=Triple(), help="run only this one (repeatable)")
@click.option("--budget", default=BUDGET, show_default=True, help="instructions a wave")
@click.option(
    "--waive", multiple=True, metavar="KIND:REASON", help="excuse a kind of finding in this kernel, and say why"
)
@click.option("--check/--no-check", default=True, help="look for races, hazards and stray accesses")
@click.option("--profile", "profiled", is_flag=True, help="counters and simulated times of the first workgroup")
@click.option("--timeline", type=click.Path(dir_okay=False), default=None, help="draw its waves (.svg or .png)")
@click.option(
    "--save", "save", type=click.Path(file_okay=False), default=None, help="folder for the buffers afterwards"
)
def sim(
    file,
    arguments,
    grid,
    block,
    entry,
    shared_bytes,
    outputs,
    workgroups,
    budget,
    waive,
    check,
    profiled,
    timeline,
    save,
):
    out = Console(highlight=False, soft_wrap=True)
    try:
        loaded = load(Path(file), entry)
        waivers = tuple(parse_waiver(w, loaded.kernel.name) for w in waive)
        options = {"block": block, "shared_bytes": shared_bytes, "budget": budget}
        result = run_on_sim(
            Path(file), list(arguments), grid, check, entry, waivers, workgroups=workgroups or None,
            outputs=outputs or None, **options,
        )  # fmt: skip
    except (SimulatorError, ValueError, OSError) as e:
        out.print(f"error: {e}", markup=False)
        sys.exit(2)
    for f in result.findings:
        out.print(str(f), markup=False)
    c = result.counters
    out.print(
        f"{result.kernel}: {c.instructions} wave-instructions of {c.waves} waves in {c.seconds:.2f} s "
        f"({c.rate:.0f}/s), {describe(result.findings)}", markup=False,
    )  # fmt: skip
    try:
        if profiled or timeline:
            from .report import profile

            report = profile(Path(file), list(arguments), grid, entry=entry, check=False, **options)
            if profiled:
                out.print("\n".join(report.lines()), markup=False)
            if timeline:
                from .timeline import draw

                out.print(f"timeline (simulated): {draw(report, timeline)}", markup=False)
        if save:
            _save(save, arguments)
    except (ValueError, OSError, ImportError) as e:
        out.print(f"error: {e}", markup=False)
        sys.exit(2)
    sys.exit(0 if result.ok else 1)


def describe(findings: list[Finding]) -> str:
    """ "no findings", or how many of which severity."""
    if not findings:
        return "no findings"
    bad, waived = len(failing(findings)), sum(bool(f.waived) for f in findings)
    return f"{len(findings)} findings, {bad} errors, {waived} waived"


def _save(folder: str, arguments) -> None:

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for k, a in enumerate(arguments):
        if isinstance(a, np.ndarray):
            np.save(place / f"argument{k}.npy", a, allow_pickle=False)
