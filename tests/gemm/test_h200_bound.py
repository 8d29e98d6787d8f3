"""The bound that the bench reports beside measured ratios, on figures made up so that each part of it can be told."""

from __future__ import annotations

import pytest

from bench import _h200_bound as bound
from bench._h200_gemm import Case


def row(m, n, k, **us):
    others = {w: t for w, t in us.items() if w != "ours"}
    best = min(others, key=others.__getitem__)
    at = {"us": us, "best other": best} | ({"ours ratio": us[best] / us["ours"]} if "ours" in us else {})
    return {"kind": "mm", "M": m, "N": n, "K": k, "cold graph": at}


def test_memory_arithmetic_and_what_lies_between_kernels():
    reads = Case("mm", 16, 4096, 4096).memory_us
    large = Case("mm", 4096, 4096, 4096).operations
    rows = [
        row(16, 4096, 4096, ATen=reads + 5.0, ours=reads + 2.0),  # 2 us lie between kernels
        row(64, 4096, 4096, ATen=20.0, ours=19.0),
        row(4096, 4096, 4096, ATen=210.0, ours=200.0),  # the highest rate
        row(1024, 4096, 4096, ATen=70.0, Triton=60.0),
        row(2048, 4096, 4096, ATen=100.5),  # faster than rate and pause allow: a bound all the same
    ]
    found = bound.bounds(rows, "cold", "graph")
    rate = large / 200.0
    assert found[0]["bound"] == pytest.approx(reads + 2.0) and found[0]["most"] == pytest.approx(1 + 3.0 / (reads + 2))
    assert found[1]["bound"] == pytest.approx(Case("mm", 64, 4096, 4096).memory_us + 2.0)
    assert found[2]["bound"] == 200.0 and found[2]["most"] == pytest.approx(1.05)
    assert found[3]["bound"] == pytest.approx(50.0 + 2.0) and found[3]["other"] == 60.0
    assert found[3]["best other"] == "Triton" and large / rate == pytest.approx(200.0)
    assert found[4]["bound"] == 100.5 and found[4]["most"] == 1.0
    assert bound.most(rows[:1], "cold", "graph") == pytest.approx((reads + 5.0) / (reads + 2.0))
    assert bound.table(rows, "cold", "graph").count("\n") == len(rows) + 2
