"""The command `flykernels`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from . import __version__
from .cache_cli import cache


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


@click.group(cls=Commands)
@click.version_option(__version__)
def main() -> None:
    """Kernel templates for TorchInductor: what is chosen and why."""


main.add_command(cache)


@main.command()
@click.argument("op")
@click.option("--m", "m", default=None, type=int, help="rows; leave out for a symbolic M")
@click.option("--hint", default=128, show_default=True, help="the M that a symbolic one is tuned for")
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
    if base in ("rms_norm", "topk"):
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
    if base not in known or activation not in ("", "none", "relu", "gelu", "gelu_tanh", "silu"):
        raise click.BadParameter(f"{op!r}: one of {', '.join(known)}, with or without +relu, +gelu, +gelu_tanh, +silu")
    if min(options["n"], options["k"], options["batch"], options["m"] if options["m"] is not None else 0) < 0:
        raise click.BadParameter("sizes are not negative")
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
@click.argument("shapes", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option(
    "--target", "targets", type=click.Choice(["x86", "gfx950"]), multiple=True, help="of SHAPES; default: x86"
)
@click.option("--jobs", type=click.IntRange(1, 1024), help="compilers at a time; default: one a core")
@click.option("--budget", callback=_seconds, help="such as 10m: begin nothing after that; run it again to go on")
@click.option("--dry-run", is_flag=True, help="say what would be compiled")
@click.option("--product", help="a GPU that is not here, as torch names it; default: AMD Instinct MI350X")
@click.option("--compute-units", type=click.IntRange(1, 4096), help="of that GPU; default: 256")
@click.option(
    "--eager", is_flag=True, help="instead of SHAPES, eager operators: rms_norm and topk; what follows is theirs"
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--op", "ops", type=click.Choice(["rms_norm", "topk"]), multiple=True, help="default: both")
@click.option("--dtype", "dtypes", type=click.Choice(["f32", "bf16", "f16"]), multiple=True, help="default: all three")
@click.option("--rows", callback=_numbers, help="numbers of rows, such as 1,64,1024; default: a usual range")
@click.option("--width", "widths", callback=_numbers, help="sizes of a row")
@click.option("--k", "ks", callback=_numbers, help="of topk")
@click.option("--inference", is_flag=True, help="leave out rms_norm with gradients")
def warmup(
    shapes: Path | None, targets: tuple[str, ...], jobs: int | None, budget: float | None, dry_run: bool,
    product: str | None, compute_units: int | None, eager: bool, **options,
) -> None:  # fmt: skip
    """Fill the cache ahead: compile every candidate of the matrix products in SHAPES (.yaml, .json or .csv), for GPUs
    that are not here too; or, with --eager, measure eager operators against ATen's.

    What the cache knows already is not done again: a run that was stopped goes on where it was."""
    if eager == (shapes is not None):
        raise click.UsageError("name a file of shapes, or --eager: one of them")
    if eager:
        from . import eager_warmup

        sys.exit(eager_warmup.run(**options))
    assert shapes is not None
    from tuning_cache.shapes import ShapesError, read

    try:
        asked = read(shapes)
    except ShapesError as e:
        raise click.ClickException(f"{e}. Nothing was compiled.") from None
    from . import warmup as ahead

    jobs = jobs or len(os.sched_getaffinity(0))
    sys.exit(ahead.run(asked, targets or ("x86",), jobs, budget, dry_run, product, compute_units))


if __name__ == "__main__":
    main()
