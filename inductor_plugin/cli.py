"""The command `flykernels`."""

from __future__ import annotations

import sys

import click

from . import __version__


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


@main.command()
@click.argument("op")
@click.option("--m", "m", default=None, type=int, help="rows; leave out for a symbolic M")
@click.option("--hint", default=128, show_default=True, help="the M that a symbolic one is tuned for")
@click.option("--n", "n", required=True, type=int)
@click.option("--k", "k", required=True, type=int)
@click.option("--dtype", default="f32", show_default=True)
@click.option("--layout", type=click.Choice(["NN", "NT", "TN", "TT"]), default="NT", show_default=True)
@click.option("--batch", default=1, show_default=True)
@click.option("--bias", type=click.Choice(["none", "row", "full"]), default=None, help="default: row for addmm")
@click.option("--residual", is_flag=True)
@click.option("--frozen", is_flag=True, help="B is constant, so it is packed ahead")
@click.option("--target", type=click.Choice(["x86", "gfx950", "sm90a"]), default="x86", show_default=True)
def explain(op: str, bias: str | None, **options) -> None:
    """Is OP (mm, addmm, bmm, baddbmm, addmm+gelu, ...) eligible, what are its candidates, what won and from where."""
    from .explain import Question, answer

    base, _, activation = op.partition("+")
    known = ("mm", "addmm", "bmm", "baddbmm", "_mkl_linear")
    if base not in known or activation not in ("", "none", "relu", "gelu", "gelu_tanh", "silu"):
        raise click.BadParameter(f"{op!r}: one of {', '.join(known)}, with or without +relu, +gelu, +gelu_tanh, +silu")
    if min(options["n"], options["k"], options["batch"], options["m"] if options["m"] is not None else 0) < 0:
        raise click.BadParameter("sizes are not negative")
    if bias is None:
        bias = "row" if base in ("addmm", "baddbmm") else "none"
    sys.exit(0 if answer(Question(op, bias=bias, **options)) else 1)


if __name__ == "__main__":
    main()
