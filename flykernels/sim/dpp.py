"""Data-parallel primitives: which lane each lane reads (CDNA3 ISA, "DPP operand": DPP_CTRL table)."""

from __future__ import annotations

import numpy as np

from .asm import Instruction
from .errors import UnknownInstruction
from .state import LANE, LANES

CONTROLS = (
    "quad_perm", "row_shl", "row_shr", "row_ror", "wave_shl", "wave_rol", "wave_shr", "wave_ror", "row_mirror",
    "row_half_mirror", "row_bcast", "row_newbcast",
)  # fmt: skip


def lane_map(control: str, value) -> tuple[np.ndarray, np.ndarray]:
    """(source lane of each lane, whether it has one) for a DPP control."""
    row, i = LANE & ~15, LANE & 15
    every = np.ones(LANES, bool)
    match control:
        case "quad_perm":
            return (LANE & ~3) + np.array(value)[LANE & 3], every
        case "row_shl":  # lane i reads lane i + n of its row
            return row + np.minimum(i + value, 15), i + value < 16
        case "row_shr":
            return row + np.maximum(i - value, 0), i - value >= 0
        case "row_ror":
            return row + (i - value) % 16, every
        case "wave_shl":
            return np.minimum(LANE + 1, 63), LANE < 63
        case "wave_rol":
            return (LANE + 1) % 64, every
        case "wave_shr":
            return np.maximum(LANE - 1, 0), LANE > 0
        case "wave_ror":
            return (LANE - 1) % 64, every
        case "row_mirror":
            return row + 15 - i, every
        case "row_half_mirror":
            return (LANE & ~7) + 7 - (LANE & 7), every
        case "row_bcast" if value == 15:  # lane 15 of each row to the whole next row
            return np.maximum(row - 1, 0), row > 0
        case "row_bcast" if value == 31:  # lane 31 to rows 2 and 3
            return np.full(LANES, 31), LANE >= 32
        case "row_newbcast":  # lane n of a row to the whole row
            return row + value, every
    raise UnknownInstruction(f"DPP control {control}:{value}")


def dpp_lanes(i: Instruction) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(source lanes, has a source, enabled by row_mask and bank_mask) of an instruction."""
    control = next((c for c in CONTROLS if c in i.mods), None)
    if control is None:
        raise UnknownInstruction(f"{i.where}: {i.text}: no known DPP control")
    lanes, valid = lane_map(control, i.mods[control])
    rows, banks = i.mods.get("row_mask", 15), i.mods.get("bank_mask", 15)
    enabled = ((rows >> (LANE // 16)) & 1 == 1) & ((banks >> ((LANE % 16) // 4)) & 1 == 1)
    return lanes, valid, enabled
