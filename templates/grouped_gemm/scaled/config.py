"""One way to do a scaled grouped GEMM on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from templates.scaled_gemm.gfx950_config import ScaledConfig

from ..config import GroupedConfig


@dataclass(frozen=True)
class ScaledGroupedConfig(GroupedConfig):
    """tile  a ScaledConfig: how a tile is done; split_k must be 1
    workgroups  that stay and walk the tiles"""

    def __post_init__(self):
        given: Any = self.tile
        if not isinstance(given, ScaledConfig):  # JSON has a mapping
            object.__setattr__(self, "tile", ScaledConfig(**given))
        super().__post_init__()
