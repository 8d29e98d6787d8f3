"""One way to select the top k: what `space.py` proposes and the kernels are specialised for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

FAMILIES = ("scan", "rounds", "rows", "block", "select")
LAUNCH_ONLY = ("parts", "threads")  # arguments of a launch: no part of the code


@dataclass(frozen=True)
class TopKConfig:
    """How a kernel divides the work. One code object serves all rows, widths up to `most_width` and k up to `most_k`.

    family          "scan"    x86: a thread walks a row in chunks
                    "rounds"  GPU: a few lanes hold a row in registers, and look for the best k times
                    "rows"    GPU: the same, but the lanes' bests tell which elements to rank at all
                    "block"   GPU: a workgroup walks a row in chunks; a threshold from the maxima of groups
                    "select"  GPU: the same for large k: more groups than threads, and a board that is sorted
    most_k          largest k
    most_width      largest width; 0: any. "block", "select": the chunk, which is all there is of a row
    workgroup_size  threads of a workgroup (x86: 1)
    lanes           that share a row ("rounds", "rows")
    elements        a thread holds of a row, or of a chunk of it
    groups          "block", "select": groups of them; the best of a group speaks for it in the search for a threshold
    resident        workgroups that shall fit on a compute unit: registers are limited for it (sm_90a)
    split           a row may be given to `parts` workgroups, the last of which merges: needs a workspace
    parts           workgroups a row, an argument of the launch ("select": gpu_merge.most_parts at most)
    threads         x86: at most so many share the rows (or parts), an argument of the launch
    """

    family: str
    most_k: int
    most_width: int = 0
    workgroup_size: int = 1
    lanes: int = 1
    elements: int = 1
    groups: int = 1
    resident: int = 1
    split: bool = False
    parts: int = 1
    threads: int = 1

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"{self}: the families are {', '.join(FAMILIES)}")
        if self.parts < 1 or (self.parts > 1 and not self.split):
            raise ValueError(f"{self}: {self.parts} workgroups a row; a configuration that is not split has one")

    def serves(self, width: int, k: int) -> bool:
        """Whether its code may be launched on rows of this width for this k."""
        return 1 <= k <= min(self.most_k, width) and (not self.most_width or width <= self.most_width)

    def key(self) -> dict:
        """Readable JSON form: what a cache entry holds."""
        return asdict(self)

    def code_key(self) -> dict:
        """What of it the code depends on."""
        return {n: v for n, v in asdict(self).items() if n not in LAUNCH_ONLY}
