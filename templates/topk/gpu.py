"""The GPU kernels by family."""

from .gpu_block import topk_block

KERNELS = {"block": topk_block, "select": topk_block}
