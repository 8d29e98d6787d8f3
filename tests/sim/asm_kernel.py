"""Small hand-written kernels for the simulator's tests."""

from __future__ import annotations

import numpy as np

from flykernels.sim import run_on_sim


def kernel(
    body: str, arguments: str = "p", waves: int = 1, lds: int = 0, scratch: int = 0, name: str = "k", denorm: int = 3
) -> str:
    """Assembly text of a kernel. `arguments`: one letter each, p pointer, i 32-bit value; s[0:1] is the kernarg
    pointer,
    s2 the workgroup's number, v0 the work-item's."""
    args, offset = [], 0
    for letter in arguments:
        size = 8 if letter == "p" else 4
        offset = -(-offset // size) * size
        kind = "global_buffer" if letter == "p" else "by_value"
        args.append(f"      - .offset: {offset}\n        .size: {size}\n        .value_kind: {kind}\n")
        offset += size
    lines = "\n".join("\t" + x.strip() if not x.strip().endswith(":") else x.strip() for x in body.strip().splitlines())
    return f"""
	.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
	.text
{name}:
{lines}
	s_endpgm
	.section .rodata
	.amdhsa_kernel {name}
		.amdhsa_group_segment_fixed_size {lds}
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_float_denorm_mode_32 {denorm}
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
{"".join(args)}    .group_segment_fixed_size: {lds}
    .kernarg_segment_size: {max(offset, 8)}
    .max_flat_workgroup_size: {64 * waves}
    .name: {name}
    .private_segment_fixed_size: {scratch}
    .sgpr_count: 32
    .vgpr_count: 64
amdhsa.target: amdgcn-amd-amdhsa--gfx950
...
	.end_amdgpu_metadata
"""


POINTER = (
    "s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\nv_lshlrev_b32 v1, 2, v0\n"  # v1: 4 bytes a work-item
)


def run(body: str, args, **options):
    """Runs a hand-written kernel; options of `kernel` and of run_on_sim."""
    for_kernel = {k: options.pop(k) for k in ("arguments", "waves", "lds", "scratch", "name", "denorm") if k in options}
    return run_on_sim(kernel(body, **for_kernel), args, **options)


def kinds(result) -> list[str]:
    return [f.kind for f in result.findings]


def words(n: int, fill: int = 0) -> np.ndarray:
    return np.full(n, fill, np.uint32)
