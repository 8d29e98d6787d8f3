"""How an sm_90a grouped GEMM is cut up: the dense template's tiles, and the order of all groups' tiles."""

from __future__ import annotations

from dataclasses import dataclass

from templates.gemm.sm90a_config import Sm90aConfig


@dataclass(frozen=True)
class GroupedSm90aConfig(Sm90aConfig):
    """See Sm90aConfig; workgroups stay (`persistent`), split_k, stream_k, cluster and warm are not used.

    lines  places in the line of all groups' tiles that are worked on at a time. Where groups differ, tiles that wait
           for memory and tiles that wait for the tensor cores then run side by side"""

    persistent: bool = True
    lines: int = 1

    def __str__(self) -> str:
        return super().__str__() + (f", {self.lines} lines" if self.lines > 1 else "")
