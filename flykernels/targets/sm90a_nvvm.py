"""Operations of MLIR's nvvm dialect, made by name: the bindings have no module for it."""

from __future__ import annotations

from ..dtypes import DType, i32
from ..lang.values import Value, mlir_type
from ..mlir import ir


def nvvm(name: str, *operands, result=None, segments=None, **attributes):
    """The operation nvvm.`name`; its result (an SSA value), or None.

    operands    SSA values or Values
    result      the result's MLIR type, where it has one
    segments    how many operands belong to each of the operation's operand groups, where it has several
    attributes  MLIR's text of each; True for one that is only there or not"""
    given = {n: ir.UnitAttr.get() if a is True else ir.Attribute.parse(a) for n, a in attributes.items()}
    if segments is not None:
        given["operandSegmentSizes"] = ir.DenseI32ArrayAttr.get(list(segments))
    op = ir.Operation.create(
        f"nvvm.{name}",
        results=[] if result is None else [result],
        operands=[getattr(v, "ssa", v) for v in operands],
        attributes=given,
    )
    return None if result is None else op.result


def struct(dtype: DType, count: int):
    """LLVM's struct of `count` elements of one type: what instructions with several results give."""
    return ir.Type.parse(f"!llvm.struct<({', '.join([dtype.mlir] * count)})>")


def pointer(space: int):
    """LLVM's pointer type of an address space: 3 is this workgroup's shared memory, 7 that of its cluster."""
    return ir.Type.parse(f"!llvm.ptr<{space}>")


def special_register(name: str) -> Value:
    """A 32-bit special register by the nvvm dialect's name ("tid.x", "cluster.ctarank")."""
    return Value(nvvm(f"read.ptx.sreg.{name}", result=mlir_type(i32)), i32)
