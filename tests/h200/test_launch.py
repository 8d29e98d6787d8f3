"""The CUDA launcher on the real driver: arguments, streams, graphs, workspace, shared memory, clusters, TMA, faults."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flykernels.launch import cuda
from flykernels.launch.current import Launcher
from tests.h200 import ptx

ROOT = Path(__file__).parents[2]


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32, device="cuda")


def test_workgroups_of_a_large_grid_count_themselves_once_a_launch():
    launch, out = Launcher(ptx.count), zeros(1)
    for n in (1, 132, 70000):
        for _ in range(3):
            launch(out.data_ptr(), n)
    assert out.item() == 9


def test_streams_have_workspace_of_their_own():
    launch, streams = Launcher(ptx.count), [torch.cuda.Stream() for _ in range(4)]
    outs = [zeros(1) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, out in zip(streams, outs):
            with torch.cuda.stream(stream):
                launch(out.data_ptr(), 64)
    torch.cuda.synchronize()
    assert [out.item() for out in outs] == [200] * 4


def captured(launch, out, times: int = 4) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            launch(out.data_ptr(), 300)
    return graph


def test_capture_needs_nothing_loaded_before_and_graphs_run_beside_each_other():
    outs = [zeros(1), zeros(1)]
    torch.cuda.synchronize()
    launch = Launcher(ptx.count)  # the module is loaded and its workspace made while capturing
    graphs = [captured(launch, out) for out in outs]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(100):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        launch(outs[0].data_ptr(), 1)
    torch.cuda.synchronize()
    assert outs[1].item() == 400 and outs[0].item() in range(400, 501)  # the plain launches race with the graph's sum


def test_workspace_of_graphs_that_are_gone_is_used_again():
    launch, out = Launcher(ptx.count), zeros(1)
    torch.cuda.synchronize()
    for _ in range(20):
        graph = captured(launch, out)
        graph.replay()
        torch.cuda.synchronize()
        del graph
        gc.collect()
    assert out.item() == 80
    held = launch.kernels[0]._workspaces
    assert len(held._pieces) + len(held._kept) <= 3, (held._pieces, held._kept)


def test_torch_s_own_graph_memory_is_not_touched():
    """The workspace is no allocation of torch's: a graph's pool holds only what the program made."""
    launch, out = Launcher(ptx.count), zeros(1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graph = captured(launch, out)
    launch(out.data_ptr(), 5)
    assert torch.cuda.memory_allocated() == before
    graph.replay()
    torch.cuda.synchronize()
    assert out.item() == 5


@pytest.mark.parametrize("size", [1024, 48 * 1024, 100_000 // 16 * 16, 227 * 1024])
def test_dynamic_shared_memory(size):
    out = zeros(32)
    Launcher(ptx.shared(size))(out.data_ptr(), size)
    assert out.tolist() == list(range(32))


def test_more_shared_memory_than_there_is():
    with pytest.raises(
        cuda.CudaError, match="needs 233472 bytes of shared memory a workgroup, and the device has 2324"
    ):
        Launcher(ptx.shared(228 * 1024))(0, 0)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_clusters(size):
    out = zeros(2 * 64)
    Launcher(ptx.cluster(size))(out.data_ptr(), 64)
    assert out.view(-1, 2).tolist() == [[size, i % size] for i in range(64)]


@pytest.mark.parametrize("m, columns, pad", [(8, 64, 0), (100, 192, 0), (33, 72, 8), (1, 64, 0), (7, 520, 24)])
def test_tensor_maps(m, columns, pad):
    whole = torch.randn(m, columns + pad, device="cuda", dtype=torch.bfloat16)
    a = whole[:, :columns]
    rows, across = -(-m // 8), -(-columns // 64)
    out = torch.full((rows, across, 8, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    Launcher(ptx.tma(columns))(a.data_ptr(), out.data_ptr(), m, a.stride(0))
    expected = torch.zeros(rows * 8, across * 64, device="cuda", dtype=torch.bfloat16)
    expected[:m, :columns] = a
    assert torch.equal(out.permute(0, 2, 1, 3).reshape(rows * 8, -1), expected)


def test_a_map_follows_its_tensor():
    launch = Launcher(ptx.tma(64))
    for _ in range(2):
        for value in (1.0, 2.0, 3.0):
            a = torch.full((8, 64), value, device="cuda", dtype=torch.bfloat16)
            out = torch.zeros_like(a)
            launch(a.data_ptr(), out.data_ptr(), 8, 64)
            assert torch.equal(a, out)
            held = a  # noqa: F841  # the next one lies elsewhere


def test_a_thread_that_has_not_met_cuda():
    launch, out, failed = Launcher(ptx.count), zeros(1), []
    launch(out.data_ptr(), 3)

    def work():
        try:
            launch.kernels[0](out.data_ptr(), 3, stream=0)
        except Exception as e:
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failed and out.item() == 2


def test_code_of_another_architecture_and_damaged_code():
    with pytest.raises(cuda.CudaError, match="it is code for sm_100a alone, and the device is sm_90"):
        cuda.load(replace(ptx.nothing, features="sm_100a"))
    with pytest.raises(cuda.CudaError, match=r"loading nothing on device 0: cuModuleLoadDataEx returned CUDA_ERROR"):
        cuda.load(replace(ptx.nothing, binary=ptx.NOTHING.replace("ret", "return").encode()))
    with pytest.raises(cuda.CudaError, match="cuModuleGetFunction returned CUDA_ERROR_NOT_FOUND"):
        cuda.load(replace(ptx.nothing, entry="other"))


def test_a_fault_says_that_the_process_is_lost():
    program = (
        "import torch; from tests.h200 import ptx; from flykernels.launch.current import Launcher\n"
        "launch, out = Launcher(ptx.store), torch.zeros(1, device='cuda')\n"
        "launch(64, 1)\n"
        "try: torch.cuda.synchronize()\n"
        "except Exception as e: print('torch:', type(e).__name__)\n"
        "try: launch(out.data_ptr(), 1)\n"
        "except Exception as e: print(type(e).__name__, e.sticky, e)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=ROOT)
    assert "CudaError True" in done.stdout and "ILLEGAL_ADDRESS" in done.stdout, done.stdout + done.stderr
    assert "refuses all further calls in this process" in done.stdout, done.stdout
