"""The command `flykernels`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from . import __version__
from .cache_cli import cache
from .consoles import console_here, escape_what_cannot_be_encoded


class Commands(click.Group):
    """Those below, and `sim`, imported when asked for: it reads ELF files and draws, with packages of its own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "sim"])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name != "sim":
            return super().get_command(ctx, name)
        try:
            from flykernels.sim.cli import sim
        except ImportError as e:
            raise click.ClickException(f"the simulator needs more packages: pip install 'flykernels[sim]' ({e})") from e
        return sim

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as e:
            if e.name != "torch":
                raise
            needs = f"`flykernels {ctx.invoked_subcommand}` needs PyTorch here, and it is not installed"
            raise click.ClickException(f"{needs}: pip install 'flykernels[torch]'") from e


@click.group(cls=Commands)
@click.version_option(__version__)
@click.option("--remote", metavar="URL", help="a store behind the cache's directories; default: FLYKERNELS_REMOTE")
def main(remote: str | None) -> None:
    """Kernel templates for TorchInductor: what is chosen and why."""
    escape_what_cannot_be_encoded()
    if remote is not None:
        os.environ["FLYKERNELS_REMOTE"] = remote


main.add_command(cache)


@main.command()
@click.argument("op")
@click.option("--m", "m", default=None, type=int, help="rows; leave out for a symbolic M")
@click.option(
    "--hint", type=click.IntRange(1), default=128, show_default=True, help="the M that a symbolic one is tuned for"
)
@click.option("--n", "n", required=True, type=int, help="columns; the width of rows for rms_norm and topk")
@click.option("--k", "k", default=None, type=int)
@click.option("--dtype", default="f32", show_default=True)
@click.option("--layout", type=click.Choice(["NN", "NT", "TN", "TT"]), default="NT", show_default=True)
@click.option("--batch", default=1, show_default=True)
@click.option("--bias", type=click.Choice(["none", "row", "full"]), default=None, help="default: row for addmm")
@click.option("--residual", is_flag=True)
@click.option("--frozen", is_flag=True, help="B is constant, so it is packed ahead")
@click.option("--weight-dtype", default=None, help="of rms_norm; default: --dtype; none: no weight")
@click.option("--gradient", is_flag=True, help="of rms_norm: a call whose gradient is wanted")
@click.option("--smallest", is_flag=True, help="of topk")
@click.option("--groups", type=click.IntRange(0), default=8, show_default=True, help="of grouped_mm")
@click.option(
    "--form", type=click.Choice(["m", "n", "k", "batch"]), default="m", show_default=True,
    help="of grouped_mm: the axis that groups share out; its size is all groups' together",
)  # fmt: skip
@click.option("--scaling", type=click.Choice(["block", "tensor", "row"]), default="block", help="of _scaled_mm")
@click.option("--out-dtype", default="bf16", help="of _scaled_mm")
@click.option("--target", type=click.Choice(["x86", "gfx950", "sm90a"]), default="x86", show_default=True)
def explain(
    op: str, bias: str | None, weight_dtype: str | None, gradient: bool, smallest: bool, groups: int, form: str,
    scaling: str, out_dtype: str, **options,
) -> None:  # fmt: skip
    """Is OP (mm, addmm, bmm, baddbmm, addmm+gelu, ...; _scaled_mm; grouped_mm; of eager operators: rms_norm, topk)
    eligible, what are its candidates, what won and from where. For an eager operator --m are the rows. Of _scaled_mm
    --dtype is mxfp8, mxfp4, or the types of A and B, such as f8E4M3FN,f4E2M1FN."""
    base, _, activation = op.partition("+")
    if op in ("rms_norm", "topk"):
        from . import eager_explain

        if options["m"] is None or (base == "topk" and options["k"] is None):
            raise click.BadParameter(f"{op} needs --m, its rows{', and --k' if base == 'topk' else ''}")
        asked = eager_explain.Question(
            base, options["m"], options["n"], options["k"] or 0, options["dtype"], weight_dtype or options["dtype"],
            gradient, not smallest, options["target"],
        )  # fmt: skip
        sys.exit(0 if eager_explain.answer(asked) else 1)
    from .explain import Question, answer

    if options["k"] is None:
        raise click.BadParameter(f"{op} needs --k")
    if op in ("grouped_mm", "_grouped_mm"):
        from .explain_grouped import GroupedQuestion

        if form in ("n", "k") and options["m"] is None:
            raise click.BadParameter(f"grouped_mm of form {form} needs --m")
        sys.exit(0 if answer(GroupedQuestion("_grouped_mm", **options, form=form, groups=groups)) else 1)
    if op == "_scaled_mm":
        from .scaled_explain import ScaledQuestion

        if min(options["n"], options["k"], options["m"] if options["m"] is not None else 0) < 0:
            raise click.BadParameter("sizes are not negative")
        kind = options.pop("dtype")
        kind = "mxfp8" if kind == "f32" else kind  # f32: the option's default
        scaled = ScaledQuestion(op, dtype=kind, bias=bias or "none", scaling=scaling, out=out_dtype, **options)
        sys.exit(0 if answer(scaled) else 1)
    known = ("mm", "addmm", "bmm", "baddbmm", "_mkl_linear")
    if base not in known or op.endswith("+") or activation not in ("", "none", "relu", "gelu", "gelu_tanh", "silu"):
        raise click.BadParameter(f"{op!r}: one of {', '.join(known)}, with or without +relu, +gelu, +gelu_tanh, +silu")
    if min(options["n"], options["k"], options["batch"], options["m"] if options["m"] is not None else 0) < 0:
        raise click.BadParameter("sizes are not negative")
    if options["batch"] > 1 and base not in ("bmm", "baddbmm"):
        raise click.BadParameter(f"{op} has no batch")
    if bias is None:
        bias = "row" if base in ("addmm", "baddbmm") else "none"
    sys.exit(0 if answer(Question(op, bias=bias, **options)) else 1)


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        found = tuple(int(x) for x in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r}: whole numbers, separated by commas") from None
    if any(n < 1 for n in found):
        raise click.BadParameter(f"{value!r}: sizes are at least 1")
    return found


def _seconds(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """Of "90", "90s", "10m" or "2h"."""
    if value is None:
        return None
    unit = {"s": 1, "m": 60, "h": 3600}.get(value[-1:], 0)
    number = value[:-1] if unit else value
    if not number.isdecimal() or not 0 < int(number) < 10**7:
        raise click.BadParameter(f"{value!r} is not a time such as 90s, 10m or 2h")
    return int(number) * (unit or 1)


@main.command()
@click.argument("files", metavar="[FILE]...", type=click.Path(dir_okay=False, path_type=Path), nargs=-1)
@click.option("--model", metavar="MODULE:FACTORY", help="instead of FILE: all that a model's graphs ask for")
@click.option("--training", is_flag=True, help="of --model: forward and backward; else inference")
@click.option("--dynamic", is_flag=True, help="of --model: sizes are symbolic")
@click.option("--freezing", is_flag=True, help="of --model: weights are constants, which takes their memory")
@click.option(
    "--target", "targets", type=click.Choice(["x86", "gfx950", "sm90a"]), multiple=True,
    help="default: x86; of a record: what it was recorded on",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(1, 1024), help="compilers at a time; default: one a core")
@click.option("--ray", metavar="ADDRESS", help="work on a ray cluster: auto, ray://host:10001, or local")
@click.option("--budget", callback=_seconds, help="such as 10m: begin nothing after that; run it again to go on")
@click.option("--dry-run", is_flag=True, help="say what would be compiled and measured")
@click.option("--compile-only", is_flag=True, help="measure nothing, although a target's device is here")
@click.option("--product", help="a GPU that is not here, as torch names it; default: MI350X, H200")
@click.option("--compute-units", type=click.IntRange(1, 4096), help="of that GPU; default: 256, 132")
@click.option(
    "--eager", is_flag=True, help="eager operators, rms_norm and topk: those of FILE, or the usual, or as follows"
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--op", "ops", type=click.Choice(["rms_norm", "topk"]), multiple=True, help="default: both")
@click.option("--dtype", "dtypes", type=click.Choice(["f32", "bf16", "f16"]), multiple=True, help="default: all three")
@click.option("--rows", callback=_numbers, help="numbers of rows, such as 1,64,1024; default: a usual range")
@click.option("--width", "widths", callback=_numbers, help="sizes of a row")
@click.option("--k", "ks", callback=_numbers, help="of topk")
@click.option("--inference", is_flag=True, help="leave out rms_norm with gradients")
def warmup(
    files: tuple[Path, ...], model: str | None, training: bool, dynamic: bool, freezing: bool, targets: tuple[str, ...],
    jobs: int | None, ray: str | None, budget: float | None, dry_run: bool, compile_only: bool, product: str | None,
    compute_units: int | None, eager: bool, **options,
) -> None:  # fmt: skip
    """Fill the cache ahead. Of FILEs, which name matrix products (.yaml, .json or .csv) or were written by
    FLYKERNELS_RECORD, or of a model: compile every candidate, for GPUs that are not here too, and measure where a
    target's device is here. With --eager, measure eager operators against ATen's; those of a record are measured with
    the rest of it.

    MODULE:FACTORY is a function that returns (model, example inputs); it runs without weights or a GPU.
    What the cache knows already is not done again: a run that was stopped goes on where it was."""
    if bool(files or eager) + (model is not None) != 1:
        raise click.UsageError("name files, or --model, or --eager: one of them")
    if model is None and (training or dynamic or freezing):
        raise click.UsageError("--training, --dynamic and --freezing are of --model")
    if eager and not files:
        from . import eager_warmup

        sys.exit(eager_warmup.run(**options))
    from templates.gemm.workers import Workers

    pool = Workers(jobs or len(os.sched_getaffinity(0))) if ray is None else _fleet(ray)
    if not eager:
        pool.start()  # they import a compiler while this process imports torch
    with pool:
        from tuning_cache.record import RecordError
        from tuning_cache.shapes import ShapesError

        from . import warmup as ahead
        from . import warmup_asked

        console = console_here()
        if not ahead.able(dry_run, console):
            sys.exit(1)
        try:
            if files:
                asked = warmup_asked.from_files(files, targets, product, compute_units)
            else:
                asked = warmup_asked.from_model(
                    str(model), targets, training, dynamic, freezing, product, compute_units
                )
        except (ShapesError, RecordError, warmup_asked.NothingAsked, warmup_asked.lowering.ModelError) as e:
            raise click.ClickException(f"{e}. Nothing was compiled.") from None
        if eager:
            asked = replace(asked, units=[])
            if not asked.eager:
                raise click.ClickException("; ".join([*asked.notes, "there is no eager operator to measure"]))
        sys.exit(ahead.run(asked, pool, budget, dry_run, compile_only, console))


def _fleet(address: str) -> Any:
    from . import fleet

    try:
        return fleet.RayWorkers(address)
    except fleet.NoFleet as e:
        raise click.ClickException(str(e)) from None


@main.command()
@click.argument("page", type=click.Path(dir_okay=False, path_type=Path), default="flykernels-report.html")
@click.option("--no-page", is_flag=True, help="only the table")
@click.option("--most", type=click.IntRange(1, 100_000), default=500, show_default=True, help="problems to list")
@click.option(
    "--figures", type=click.Path(dir_okay=False, path_type=Path), multiple=True,
    help="what a bench's --json wrote (such as simulated times): shown with its label",
)  # fmt: skip
def report(page: Path, no_page: bool, most: int, figures: tuple[Path, ...]) -> None:
    """What the cache knows: a table, and PAGE, one HTML file that needs no network (flykernels-report.html)."""
    from . import report as known
    from . import settings

    try:
        found = known.collect(settings.store(), most, figures)
    except known.FiguresError as e:
        raise click.ClickException(str(e)) from None
    known.show(found, console_here(200))
    if no_page:
        return
    try:
        from .report_page import page as made

        page.write_text(made(found), encoding="utf-8", errors="backslashreplace")
    except ImportError as e:
        raise click.ClickException(f"the page's pictures need more: pip install 'flykernels[report]' ({e})") from e
    except OSError as e:
        raise click.ClickException(f"{page} cannot be written: {e.strerror}") from None
    click.echo(f"wrote {page}")


if __name__ == "__main__":
    main()
