"""Shapes files: which problems a warmup is to prepare. YAML, JSON or CSV, by the name's end.

A list of problems (CSV: a line each, under a line of names), or an object {"defaults": {...}, "shapes": [...]}:

    - {op: mm, m: [1, 16, 128], n: 4096, k: 4096, dtype: bf16, layout: NT}
    - {op: addmm+gelu, m: symbolic, hint: 512, n: [4096, 14336], k: 4096}
    - {op: scaled_mm, m: 512, n: 4096, k: 4096, dtype: [f8E4M3FN, f4E2M1FN]}

Lists stand for each of their values, with each value of other lists. A file is data from outside: what is not of this
form is refused, with the place, before anything is compiled.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FILE_MOST = 8 << 20  # bytes
PROBLEMS_MOST = 100_000
NUMBER_MOST = 40  # characters; YAML's 1:30 (ninety) takes time by the square of its length
OPS = ("mm", "addmm", "bmm", "baddbmm")
ACTIVATIONS = ("", "relu", "gelu", "gelu_tanh", "silu")
SCALED, GROUPED = ("scaled_mm",), ("grouped_mm",)
GROUPS_MOST = 512
SCALED_DTYPES, SCALINGS = ("f8E4M3FN", "f8E5M2", "f4E2M1FN"), ("block", "tensor", "row")
DTYPES, LAYOUTS, BIASES = ("f32", "bf16", "f16"), ("NN", "NT", "TN", "TT"), ("none", "row", "full")
SIZE_MOST = 2**31 - 1


class ShapesError(ValueError):
    """Why a shapes file is refused, and where."""


@dataclass(frozen=True)
class Shape:
    """One problem.

    op       mm, addmm, bmm or baddbmm, with an activation or without: addmm+gelu; or scaled_mm
    m        rows; None: symbolic, prepared for `hint`
    layout   BLAS's two letters for A and B: N row-major, T column-major (a Linear layer's weight is T)
    bias     none, row or full; by default row for addmm and baddbmm
    frozen   B is constant, so it is packed ahead (x86)
    Of grouped_mm: groups, of `m` rows each on average; layout NT or NN (an MoE layer's forward); out_dtype none.
    Of scaled_mm: dtype of A and b_dtype of B (default: the same), scaling block, tensor or row, out_dtype, layout NT.
    """

    op: str = "mm"
    m: int | None = None
    n: int = 0
    k: int = 0
    dtype: str = "bf16"
    layout: str = "NT"
    batch: int = 1
    bias: str = ""
    residual: bool = False
    frozen: bool = False
    hint: int = 128
    b_dtype: str = ""
    scaling: str = ""
    out_dtype: str = ""
    groups: int = 0

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{self.op} {batch}{self.m or f'(symbolic, {self.hint})'}x{self.n}x{self.k} {self.dtype} {self.layout}"


NAMES = tuple(f.name for f in fields(Shape))


def read(path: Path) -> list[Shape]:
    """The problems of a file, each once, in its order. ShapesError if it is not a shapes file."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_MOST + 1)
        if len(data) > FILE_MOST:
            raise ShapesError(f"{path.name} has more than {FILE_MOST} bytes")
        rows, defaults = _rows(path.suffix.lower(), data.decode("utf-8-sig"))
        found: dict[Shape, None] = {}
        each = (shape for number, row in enumerate(rows, 1) for shape in _shapes(row, defaults, number))
        for count, shape in enumerate(each, 1):
            if count > PROBLEMS_MOST:  # also of those that are there again: a line may stand for as many
                raise ShapesError(f"more than {PROBLEMS_MOST} problems")
            found[shape] = None
    except OSError as e:
        raise ShapesError(f"{path} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ShapesError(f"{path.name} is not UTF-8 text") from None
    except RecursionError:
        raise ShapesError(f"{path.name} is nested without end") from None
    except ShapesError as e:
        raise ShapesError(f"{path.name}: {e}") from None
    if not found:
        raise ShapesError(f"{path.name} names no problem")
    return list(found)


def _rows(suffix: str, text: str) -> tuple[list[Any], dict]:
    if suffix == ".csv":
        try:
            reader = csv.DictReader(io.StringIO(text), strict=True, skipinitialspace=True)
            lines = list(reader)
        except csv.Error as e:
            raise ShapesError(f"not CSV: {e}") from None
        _each_once([name.strip() for name in reader.fieldnames or ()])
        if any(None in line or None in line.values() for line in lines):
            raise ShapesError("a line has more or fewer fields than the line of names")
        return [{k.strip(): _plain(v) for k, v in line.items() if v.strip()} for line in lines], {}
    if suffix == ".json":
        try:
            held = json.loads(text, object_pairs_hook=_object)
        except ShapesError:
            raise
        except ValueError as e:
            raise ShapesError(f"not JSON: {e}") from None
    elif suffix in (".yaml", ".yml"):
        held = _yaml(text)
    else:
        raise ShapesError("the name ends in none of .yaml, .yml, .json, .csv")
    defaults: Any = {}
    if isinstance(held, dict):
        if not set(held) <= {"shapes", "defaults"}:
            raise ShapesError("an object has the members `shapes` and `defaults`, and no others")
        defaults, held = held.get("defaults", {}), held.get("shapes")
    if not isinstance(held, list) or not isinstance(defaults, dict):
        raise ShapesError("it holds no list of problems")
    return held, defaults


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ShapesError("YAML needs the package `pyyaml`: pip install 'flykernels[shapes]', or write JSON") from None

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is eight times as fast, where it is

    class Loader(base):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            if isinstance(node, yaml.MappingNode):  # before `<<` brings in more, which is to be overridden
                _each_once([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            return node.value if len(node.value) > NUMBER_MOST else super().construct_yaml_int(node)

        def construct_yaml_float(self, node: Any) -> Any:
            return node.value if len(node.value) > NUMBER_MOST else super().construct_yaml_float(node)

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", getattr(Loader, f"construct_yaml_{kind}"))
    try:
        return yaml.load(text, Loader)
    except ShapesError:
        raise
    except (yaml.YAMLError, ValueError) as e:
        raise ShapesError(f"not YAML, or more than plain data: {' '.join(str(e).split())}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict:
    _each_once([name for name, _ in pairs])
    return dict(pairs)


def _each_once(names: list[str]) -> None:
    """ShapesError where one of them would silently go before another of the same name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ShapesError(f"{_short(name)} is there twice")
        seen.add(name)


def _plain(text: str) -> Any:
    """A CSV field's value: a number, yes or no, or the text."""
    text = text.strip()
    if text.removeprefix("-").isdecimal() and len(text) < 20:
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _shapes(row: Any, defaults: dict, number: int) -> Iterator[Shape]:
    where = f"problem {number}"
    if not isinstance(row, dict):
        raise ShapesError(f"{where} is not an object with op, m, n, k, ...")
    row = {**defaults, **row}
    unknown = [str(name)[:40] for name in row if name not in NAMES]
    if unknown:
        raise ShapesError(f"{where}: unknown {', '.join(unknown[:5])}; known are {', '.join(NAMES)}")
    values = {name: v if isinstance(v, list) else [v] for name, v in row.items()}
    count = 1
    for listed in values.values():
        count *= len(listed)
    if count > PROBLEMS_MOST:
        raise ShapesError(f"{where} stands for {count} problems; at most {PROBLEMS_MOST} are taken")
    for chosen in itertools.product(*values.values()):
        yield _shape(dict(zip(values, chosen)), where)


def _shape(row: dict, where: str) -> Shape:
    def whole(name: str, least: int = 1, default: int = 0) -> int:
        value = row.get(name, default)
        if type(value) is not int or not least <= value <= SIZE_MOST:
            raise ShapesError(f"{where}: {name} is {_short(value)}, not a whole number from {least} to {SIZE_MOST}")
        return value

    def one_of(name: str, known: tuple[str, ...], default: str) -> str:
        value = row.get(name, default)
        if value not in known or not isinstance(value, str):
            raise ShapesError(f"{where}: {name} is {_short(value)}, not one of {', '.join(filter(None, known))}")
        return value

    def flag(name: str) -> bool:
        value = row.get(name, False)
        if type(value) is not bool:
            raise ShapesError(f"{where}: {name} is {_short(value)}, not true or false")
        return value

    op = row.get("op", "mm")
    if op in SCALED:
        return _scaled_shape(row, where, whole, one_of)
    if op in GROUPED:
        return _grouped_shape(row, where, whole, one_of)
    stray = [name for name in ("b_dtype", "scaling", "out_dtype", "groups") if name in row]
    if stray:
        raise ShapesError(f"{where}: {', '.join(stray)}: of {', '.join((*SCALED, *GROUPED))} only")
    base, _, activation = op.partition("+") if isinstance(op, str) else ("", "", "")
    if base not in OPS or activation not in ACTIVATIONS or op.endswith("+"):
        more, own = ", ".join("+" + a for a in ACTIVATIONS[1:]), ", ".join((*SCALED, *GROUPED))
        raise ShapesError(f"{where}: op is {_short(op)}; known are {', '.join(OPS)}, also with {more}; and {own}")
    m = None if row.get("m", "symbolic") in ("symbolic", None) else whole("m")
    with_bias = "row" if base in ("addmm", "baddbmm") else "none"
    batch = whole("batch", default=1)
    if batch > 1 and base not in ("bmm", "baddbmm"):
        raise ShapesError(f"{where}: {op} has no batch")
    return Shape(
        op, m, whole("n"), whole("k"), one_of("dtype", DTYPES, "bf16"), one_of("layout", LAYOUTS, "NT"), batch,
        one_of("bias", BIASES, with_bias), flag("residual"), flag("frozen"), whole("hint", default=128),
    )  # fmt: skip


def _scaled_shape(row: dict, where: str, whole: Callable, one_of: Callable) -> Shape:
    stray = [name for name in ("batch", "residual", "frozen", "groups") if name in row]
    if stray:
        raise ShapesError(f"{where}: {row['op']} has no {', '.join(stray)}")
    one_of("layout", ("NT",), "NT")
    m = None if row.get("m", "symbolic") in ("symbolic", None) else whole("m")
    dtype = one_of("dtype", SCALED_DTYPES, SCALED_DTYPES[0])
    return Shape(
        row["op"], m, whole("n"), whole("k"), dtype, "NT", bias=one_of("bias", ("none", "row"), "none"),
        hint=whole("hint", default=128), b_dtype=one_of("b_dtype", SCALED_DTYPES, dtype),
        scaling=one_of("scaling", SCALINGS, SCALINGS[0]), out_dtype=one_of("out_dtype", DTYPES, "bf16"),
    )  # fmt: skip


def _grouped_shape(row: dict, where: str, whole: Callable, one_of: Callable) -> Shape:
    stray = sorted(set(row) - {"op", "m", "n", "k", "dtype", "layout", "groups", "hint"})
    if stray:
        raise ShapesError(f"{where}: {row['op']} has no {', '.join(stray)}")
    m = None if row.get("m", "symbolic") in ("symbolic", None) else whole("m")
    groups = whole("groups")
    if groups > GROUPS_MOST:
        raise ShapesError(f"{where}: groups is {groups}; at most {GROUPS_MOST}")
    return Shape(
        row["op"], m, whole("n"), whole("k"), one_of("dtype", DTYPES, "bf16"), one_of("layout", ("NT", "NN"), "NT"),
        bias="none", hint=whole("hint", default=128), groups=groups,
    )  # fmt: skip


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 1 << 64 else f"a number of {value.bit_length()} bits"
    text = value if isinstance(value, str) else type(value).__name__
    return repr(text if len(text) < 40 else text[:40] + "...")
