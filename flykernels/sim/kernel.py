"""The launch side of a kernel: its descriptor (which registers are set up how), its arguments, its sizes.

Source: LLVM's "User Guide for AMDGPU Backend", kernel descriptor and code object V5 metadata, initial kernel state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .errors import BadCodeObject

# user SGPRs in the order in which they are laid out: (flag, registers)
USER_SGPRS = (
    ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
    ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1),
)  # fmt: skip


@dataclass(frozen=True)
class KernelArgument:
    """One explicit or hidden argument: byte offset and size in the kernarg segment, and the metadata's value kind."""

    offset: int
    size: int
    kind: str
    name: str = ""

    @property
    def hidden(self) -> bool:
        return self.kind.startswith("hidden_")


@dataclass
class KernelInfo:
    """What a launch needs to know.

    user          user SGPR flags that are set
    preload       (first dword, dwords) of kernel arguments that are preloaded into user SGPRs
    group_ids     which of workgroup id x, y, z are passed
    item_ids      highest work-item id dimension passed (0: x only)
    mode          first value of the MODE register (see mode.py)
    """

    name: str
    arguments: list[KernelArgument]
    kernarg_size: int
    lds_bytes: int
    scratch_bytes: int
    workgroup_size: int
    user: list[str]
    preload: tuple[int, int] = (0, 0)
    group_ids: tuple[bool, bool, bool] = (True, False, False)
    workgroup_info: bool = False
    item_ids: int = 0
    mode: int = 0x3F0  # nearest even, denormals kept, dx10_clamp, ieee
    user_sgprs: int = 0
    vgprs: int = 0
    agprs: int = 0
    sgprs: int = 0
    entry: int = 0  # index of its first instruction
    required_size: tuple[int, ...] = ()
    arch: str = "gfx950"
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def explicit(self) -> list[KernelArgument]:
        return [a for a in self.arguments if not a.hidden]


_DIRECTIVE = re.compile(r"^\s*\.amdhsa_(\w+)\s+(\S+)", re.M)


def arch_of(target: str) -> str:
    m = re.search(r"gfx[0-9a-f]+", target)
    return m[0] if m else target


def require_gfx950(target: str) -> None:
    """BadCodeObject unless the code is for gfx950."""
    arch = arch_of(target)
    if arch != "gfx950":
        raise BadCodeObject(f"code for {arch}: this simulator runs gfx950 only; compile for gfx950")


def check_text(text: str) -> None:
    """BadCodeObject unless a text is gfx950 assembly."""
    target = re.search(r'\.amdgcn_target\s+"([^"]+)"', text) or re.search(r"amdhsa\.target:\s*(\S+)", text)
    if target is None:
        raise BadCodeObject("the text names no target (.amdgcn_target): not AMDGPU assembly")
    require_gfx950(target[1])


def kernels_of_text(text: str, labels: dict[str, int]) -> dict[str, KernelInfo]:
    """The kernels of an assembly text, from its .amdhsa_kernel blocks and its .amdgpu_metadata."""
    found: dict[str, KernelInfo] = {}
    metadata = kernels_of_metadata(text)
    for m in re.finditer(r"^\s*\.amdhsa_kernel\s+(\S+)\n(.*?)^\s*\.end_amdhsa_kernel", text, re.M | re.S):
        name = m[1]
        d = dict(_DIRECTIVE.findall(m[2]))
        number = lambda key, default=0, d=d: (
            int(d.get(key, default), 0) if isinstance(d.get(key, default), str) else default
        )
        info = metadata.get(name)
        if info is None:
            raise BadCodeObject(f"kernel {name} has no metadata in the text")
        info.user = [flag for flag, _ in USER_SGPRS if number(f"user_sgpr_{flag}")]
        info.preload = (number("user_sgpr_kernarg_preload_offset"), number("user_sgpr_kernarg_preload_length"))
        info.group_ids = tuple(bool(number(f"system_sgpr_workgroup_id_{x}", int(x == "x"))) for x in "xyz")  # type: ignore
        info.workgroup_info = bool(number("system_sgpr_workgroup_info"))
        info.item_ids = number("system_vgpr_workitem_id")
        fields = {"round_mode_32": 0, "round_mode_16_64": 2, "denorm_mode_32": 4, "denorm_mode_16_64": 6}
        mode = sum(number(f"float_{name}", 3 * (name == "denorm_mode_16_64")) << at for name, at in fields.items())
        info.mode = mode | number("dx10_clamp", 1) << 8 | number("ieee_mode", 1) << 9 | number("fp16_overflow") << 23
        info.user_sgprs = number("user_sgpr_count")
        if name not in labels:
            raise BadCodeObject(f"kernel {name} has no code in the text")
        info.entry = labels[name]
        found[name] = info
    if not found:
        raise BadCodeObject("the text has no .amdhsa_kernel: nothing to run")
    return found


def kernels_of_metadata(text: str) -> dict[str, KernelInfo]:
    """.amdgpu_metadata's YAML -> kernels. Only its regular, LLVM-printed form is read: lists of scalars and of maps."""
    m = re.search(r"^\s*\.amdgpu_metadata\n(.*?)^\s*\.end_amdgpu_metadata", text, re.M | re.S)
    if m is None:
        raise BadCodeObject("the text has no .amdgpu_metadata")
    kernels: list[dict[str, Any]] = []
    in_kernels = False
    current: dict[str, Any] | None = None
    arguments: list[dict[str, Any]] | None = None
    pending: str | None = None
    for line in m[1].splitlines():
        if re.match(r"^\S", line):
            in_kernels = line.startswith("amdhsa.kernels:")
            continue
        if not in_kernels:
            continue
        entry = re.match(r"^(\s*)(- )?\.(\w+):\s*(.*)$", line)
        if entry is None:
            item = re.match(r"^\s+- (\S+)$", line)
            if item and current is not None and pending:
                current.setdefault(pending, []).append(item[1])
            continue
        indent = len(entry[1]) + (2 if entry[2] else 0)
        key, value = entry[3], entry[4].strip().strip("'\"")
        if indent <= 4:
            if entry[2]:
                current = {}
                kernels.append(current)
            assert current is not None
            arguments = None
            pending = key if not value else None
            if key == "args" and not value:
                arguments = current["args"] = []
            elif value:
                current[key] = value
        elif arguments is not None:
            if entry[2]:
                arguments.append({})
            arguments[-1][key] = value
    return {k["name"]: info_of_metadata(k) for k in kernels}


def info_of_metadata(k: dict[str, Any]) -> KernelInfo:
    """One kernel's metadata map (keys without the dot; values as text or numbers) -> KernelInfo without its
    descriptor."""
    number = lambda key, default=0: int(k.get(key) or default)
    arguments = [
        KernelArgument(int(a["offset"]), int(a["size"]), str(a["value_kind"]), str(a.get("name", "")))
        for a in k.get("args", []) or []
    ]
    required = tuple(int(x) for x in k.get("reqd_workgroup_size", []) or [])
    size = 1
    for x in required:
        size *= x
    return KernelInfo(
        str(k["name"]), arguments, number("kernarg_segment_size"), number("group_segment_fixed_size"),
        number("private_segment_fixed_size"), size if required else number("max_flat_workgroup_size", 1024), [],
        vgprs=number("vgpr_count"), agprs=number("agpr_count"), sgprs=number("sgpr_count"), required_size=required,
    )  # fmt: skip
