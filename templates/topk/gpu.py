"""The GPU kernels by family."""

from .gpu_block import topk_block
from .gpu_rows import topk_rows

KERNELS = {"rows": topk_rows, "block": topk_block, "select": topk_block}
