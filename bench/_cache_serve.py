"""What `bench cache --part bundle` runs in processes of its own: compile products with the plugin, and say what of it
was compiled, measured, and taken from the cache.

    python -m bench._cache_serve SHAPES [DEVICE]      prints one line of JSON; SHAPES as `flykernels warmup` reads them

`without_compiler(folder)` makes a folder that, first on PYTHONPATH, hides MLIR from a process and what it starts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

HIDES = """import sys

sys.modules["flydsl"] = sys.modules["mlir"] = None
"""


def without_compiler(folder: Path) -> Path:
    """A folder with a sitecustomize.py in which MLIR's packages cannot be imported, nor found."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(HIDES)
    return folder


def main(shapes: str, device: str = "cpu") -> None:
    import torch

    import inductor_plugin
    from flykernels.versions import mlir_version
    from inductor_plugin.counters import counters
    from tuning_cache.shapes import read

    inductor_plugin.enable()
    dtypes = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    done, start = [], time.perf_counter()
    for shape in read(Path(shapes)):
        assert shape.op == "mm" and shape.m is not None, f"{shape}: products of fixed sizes only"
        made = lambda rows, columns, letter, dtype=dtypes[shape.dtype]: (
            torch.randn(rows, columns, device=device, dtype=dtype)
            if letter == "N"
            else torch.randn(columns, rows, device=device, dtype=dtype).t()
        )
        a, b = made(shape.m, shape.k, shape.layout[0]), made(shape.k, shape.n, shape.layout[1])
        torch._dynamo.reset()
        backends = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,FLYKERNELS"}
        result = torch.compile(torch.mm, options=backends)(a, b)
        exact = a[:256].double() @ b.double()
        error = float((result[:256].double() - exact).norm() / exact.norm())
        done.append({"shape": str(shape), "error": error})
    print(
        json.dumps(
            {
                "mlir": mlir_version(),
                "compiles": counters["compiles"],
                "benchmarks": counters["benchmarks"],
                "from_cache": counters["from cache"],
                "seconds": round(time.perf_counter() - start, 1),
                "products": done,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
