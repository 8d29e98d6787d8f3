"""How an sm_90a grouped GEMM is cut up: as the dense template's tiles are."""

from __future__ import annotations

from dataclasses import dataclass

from templates.gemm.sm90a_config import Sm90aConfig


@dataclass(frozen=True)
class GroupedSm90aConfig(Sm90aConfig):
    """See Sm90aConfig; workgroups stay (`persistent`), split_k, stream_k, cluster and keep are not used.

    queued  who is free takes the next tile; else each workgroup does as many tiles as the others, or one less
    """

    persistent: bool = True
    queued: bool = True

    def __str__(self) -> str:
        return super().__str__() + ("" if self.queued else ", dealt out")
