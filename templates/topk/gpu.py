"""The GPU kernels by family."""

from .gpu_block import topk_block
from .gpu_rows import topk_rounds, topk_rows

KERNELS = {"rows": topk_rows, "rounds": topk_rounds, "block": topk_block, "select": topk_block}
