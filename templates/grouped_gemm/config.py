"""One way to do a grouped GEMM on a GPU: a dense configuration for each tile, and how many workgroups walk the tiles."""

from __future__ import annotations

from dataclasses import dataclass

from templates.gemm.gfx950_config import Gfx950Config


@dataclass(frozen=True)
class GroupedConfig:
    """tile  how a tile is done; split_k must be 1
    workgroups  that stay and walk the tiles: compute units times those that fit on one"""

    tile: Gfx950Config
    workgroups: int

    def __post_init__(self):
        if not isinstance(self.tile, Gfx950Config):  # JSON has a mapping
            object.__setattr__(self, "tile", Gfx950Config(**self.tile))
        if self.tile.split_k != 1 or self.workgroups < 1:
            raise ValueError(f"{self}: tiles are not split along K, and at least one workgroup walks them")

    @property
    def workgroup_size(self) -> int:
        return self.tile.workgroup_size

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return {"tile": self.tile.key(), "workgroups": self.workgroups}

    def __str__(self) -> str:
        return f"{self.tile}; {self.workgroups} workgroups"
