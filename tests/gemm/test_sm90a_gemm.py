"""The sm_90a GEMM without a GPU: what is compiled, what it needs, that ptxas neither spills nor serialises wgmma."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest

from flykernels.codeobject import CodeObject
from flykernels.lang import TraceError
from flykernels.targets import sm90a
from flykernels.targets.sm90a import AssemblerError, assembled, find_ptxas
from templates.gemm import sm90a_cluster
from templates.gemm.build import build, build_from_json
from templates.gemm.problem import GemmProblem
from templates.gemm.sm90a_config import Sm90aConfig as Config
from templates.gemm.sm90a_config import shared_memory
from templates.gemm.sm90a_output import parts
from templates.gemm.sm90a_work import slot_bytes

NT = GemmProblem(4096, 4096, "bf16", "bf16", b="col")
SMALL = Config(tile_m=64, tile_n=64, stages=4, groups=(1, 1))
CASES = {
    "small M": (NT, Config(tile_m=16, tile_n=32, tile_k=128, stages=12, groups=(1, 1), evict="b")),
    "large": (NT, Config(tile_n=256, persistent=True, tma_store=True, cluster=(2, 1))),
    "NN, f16": (replace(NT, b="row", dtype="f16", out_dtype="f16"), Config(tile_n=96)),
    "TN": (replace(NT, a="col", b="row"), Config(stages=3, cluster=(1, 2))),
    "TT": (replace(NT, a="col"), Config(tile_n=320, groups=(1, 2), stages=3)),
    "fused": (replace(NT, bias="row", activation="silu", residual=True), Config(tile_n=256, tma_store=True)),
    "any bias, f32": (replace(NT, bias="full", out_dtype="f32"), SMALL),
    "C in pairs": (replace(NT, n=4090, align_c=4, residual=True), SMALL),
    "C one by one": (replace(NT, n=4095, align_c=2), SMALL),
    "split": (NT, replace(SMALL, split_k=4)),
    "split in a cluster": (replace(NT, residual=True), Config(stages=5, split_k=3, k_cluster=True, overlap="late")),
    "overlaps": (NT, replace(SMALL, overlap="early")),
    "streamed": (NT, Config(stream_k=132)),
    "batched": (replace(NT, batched=True), Config(persistent=True)),
    "copied": (replace(NT, align_a=4), Config("mma", 64, 64, 64, 4, (1, 1))),
    "gathered": (replace(NT, b="any", align_b=2), Config("mma", 64, 64, 32, 2, (1, 1), split_k=2)),
}


@pytest.mark.parametrize("p, config", CASES.values(), ids=CASES)
def test_compiles(p, config):
    code = build(p, config, sm90a)
    assert (code.spills == 0 and "wgmma" in code.text) or config.kind == "mma"
    if find_ptxas():
        assert 0 < code.registers <= 255 and code.spills == 0 and code.shared_bytes == 0
        assert code.binary[:4] == b"\x7fELF"
    assert code.dynamic_bytes <= sm90a.limits.shared_bytes and code.cluster == config.launched_cluster
    assert code.overlaps == (config.overlap != "none") == ("griddepcontrol.wait" in code.text)
    assert bool(code.workspace) == bool(config.stream_k or (config.split_k > 1 and not config.k_cluster))
    assert [t.name for t in code.tensor_maps] == (
        [] if config.kind == "mma" else ["a_map", "b_map", *(["c_map"] if config.tma_store else [])]
    )
    assert code.workspace_for({"m": 100, "batch": 1}) % slot_bytes(config) == 0
    assert CodeObject.from_bytes(code.to_bytes()) == code
    assert build_from_json(p, config.key(), "sm90a") == code


def test_who_overlaps_waits_before_it_touches_what_others_may():
    """The role that brings tiles and the one that multiplies wait each for itself; before that there are prefetches."""
    code = build(replace(NT, bias="row", residual=True), replace(SMALL, overlap="early"), sm90a)
    body = code.text[code.text.index(".entry") :]
    wait = "griddepcontrol.wait"
    assert body.count(wait) == 2 and body.count("griddepcontrol.launch_dependents") == 1
    touches = re.compile(r"\b(ld\.global|st\.global|cp\.async\.bulk\.tensor)")
    assert not touches.search(body[: body.index(wait)]) and touches.search(body)


def test_workgroups_of_a_cluster_share_out_what_they_finish():
    config = Config(stages=6, tile_n=96, split_k=3, k_cluster=True)
    held = sm90a_cluster.shares(NT, config)
    assert sorted(n for numbers in held for n in numbers) == list(range(len(parts(NT, config)))) and all(held)
    for bad in (
        replace(config, cluster=(2, 1)), replace(config, persistent=True), replace(config, split_k=1),
        replace(config, tile_n=32, split_k=4), replace(config, tile_m=32, groups=(1, 1)),
    ):  # fmt: skip
        assert sm90a_cluster.why_not(NT, bad), str(bad)
    assert sm90a_cluster.why_not(NT, config) is None


def test_the_grid_follows_m():
    code = build(NT, SMALL, sm90a)
    assert code.grid_for({"m": 0}) == (0,) and code.grid_for({"m": 65}) == (2 * 64,)
    stays = build(NT, replace(SMALL, persistent=True, cluster=(2, 1)), sm90a)
    assert stays.grid_for({"m": 128}) == (128,) and stays.grid_for({"m": 4096}) == (132,)
    split = build(NT, replace(SMALL, split_k=4), sm90a)
    assert split.grid_for({"m": 65}) == (2 * 64 * 4,)
    assert split.workspace_for({"m": 65}) == 2 * 64 * 4 * slot_bytes(replace(SMALL, split_k=4))
    streamed = build(NT, Config(stream_k=132), sm90a)
    assert streamed.grid_for({"m": 1}) == (132,) and streamed.grid_for({"m": 0}) == (0,)


def test_what_tma_cannot_read_is_refused():
    with pytest.raises(TraceError, match="TMA needs 16"):
        build(replace(NT, align_a=8), SMALL, sm90a)
    with pytest.raises(ValueError, match="f32"):
        build(replace(NT, dtype="f32", out_dtype="f32"), SMALL, sm90a)
    with pytest.raises(TraceError, match="shared memory"):
        build(NT, Config(tile_n=256, stages=5), sm90a)


def test_roles_and_registers():
    assert SMALL.workgroup_size == 128 + 32 and Config().workgroup_size == 256 + 128
    assert Config(beside=2).workgroup_size == 256 + 32 and Config().registers == 232
    both = 2 * shared_memory(NT, Config(beside=2, stages=3)).total
    assert both <= sm90a.limits.shared_bytes


def test_without_ptxas_the_driver_compiles(monkeypatch):
    monkeypatch.setattr(sys.modules[AssemblerError.__module__], "find_ptxas", lambda: None)
    code = build(NT, SMALL, sm90a)
    assert code.binary.decode() == code.text and ".target sm_90a" in code.text and code.registers == 0
    assert code.source["assembler"] == "the driver" and code.dynamic_bytes > 0


@pytest.mark.parametrize("says, found", [("C7510: Potential Performance Loss", "serialises"), ("error", "refused")])
def test_what_ptxas_says_is_heeded(tmp_path, says, found):
    script = tmp_path / "ptxas"
    script.write_text(
        f'#!/bin/sh\necho \'ptxas info : ({says})\' >&2\nfor out; do [ "$before" = -o ] && echo cubin > "$out"; '
        f"before=$out; done\nexit {int(found == 'refused')}\n"
    )
    script.chmod(0o755)
    with pytest.raises(AssemblerError, match=found):
        assembled(str(script), "gemm", ".version 8.4")


@pytest.mark.parametrize(
    "script, said",
    [
        ("#!/bin/sh\nkill -9 $$\n", "was ended by signal 9 while it assembled gemm"),
        ("#!/bin/sh\nexit 0\n", "wrote nothing while it assembled gemm"),
        ("of another machine", "cannot be run: .*Put another ptxas on PATH"),
    ],
)
def test_a_ptxas_that_ends_early_or_cannot_run_is_an_error_in_words(tmp_path, script, said):
    file = tmp_path / "ptxas"
    file.write_text(script)
    file.chmod(0o755)
    with pytest.raises(AssemblerError, match=f"{file} {said}"):
        assembled(str(file), "gemm", ".version 8.4")
