"""Problems that are refused, and why; configurations; keys; the arguments' order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flykernels.targets import gfx950, sm90a, x86
from templates.digest import digest
from templates.topk.arguments import COUNTERS, scalar_values, scalars, workspace_bytes
from templates.topk.build import build, kernel_key
from templates.topk.config import TopKConfig
from templates.topk.problem import MOST_K, TopKProblem
from templates.topk.reference import reference
from templates.topk.space import configurations

TARGETS = (x86, gfx950, sm90a)
FINE = TopKProblem(4, 1000, 10)


@pytest.mark.parametrize("p, said", [
    (replace(FINE, k=0), "nothing to select"), (replace(FINE, rows=0), "nothing to select"),
    (replace(FINE, k=1001), "selected index k out of range"), (replace(FINE, k=-1), "selected index k out of range"),
    (replace(FINE, width=10000, k=MOST_K + 1), "left to ATen"), (replace(FINE, rows=2**22), "left to ATen"),
    (replace(FINE, dtype="u32"), "f32, bf16, f16"), (replace(FINE, layout="first"), "last, any"),
    (replace(FINE, align=2), "power of two"), (replace(FINE, align=12), "power of two"),
])  # fmt: skip
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_what_is_refused_says_why(p, said, target):
    assert said in p.why_not(target)
    space = configurations(p, target)
    assert not space.kept and said in space.dropped[0].reason
    with pytest.raises(ValueError, match="no top-k kernel"):
        build(p, TopKConfig("scan", 128), target)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_eligible_problem_has_a_configuration_that_serves_it(target):
    for rows in (1, 16, 256, 4096, 100000):
        for width in (1, 7, 128, 513, 8192, 32000, 1000000):
            for k in (1, 6, 16, 17, 128, 129, 1024, 1025, 4096):
                for dtype in ("f32", "bf16"):
                    p = TopKProblem(rows, width, k, dtype)
                    if p.why_not(target) is None:
                        space = configurations(p, target, threads=4)
                        assert space.kept, p
                        for c in space.kept:
                            assert c.config.serves(width, k) and c.reason
                            assert workspace_bytes(c.config, rows) < 2**31


def test_code_is_shared_where_only_sizes_differ():
    a, b = TopKProblem(1, 128256, 64), TopKProblem(300, 32000, 50)
    configs = [configurations(p, sm90a).kept[0].config for p in (a, replace(a, rows=2, width=100000), b)]
    keys = [kernel_key(p, c) for p, c in zip((a, a, b), configs)]
    assert keys[0] == keys[1]
    assert kernel_key(a, configs[0]) != kernel_key(replace(a, largest=False), configs[0])


def test_a_configuration_refuses_what_it_does_not_serve():
    with pytest.raises(ValueError, match="serves k up to 16"):
        build(replace(FINE, k=17), TopKConfig("scan", 16), x86)
    with pytest.raises(ValueError, match="not for this target"):
        build(FINE, TopKConfig("block", 128, 0, 256, 1, 16), x86)
    with pytest.raises(ValueError, match="parts"):
        TopKConfig("scan", 16, parts=2)


def test_arguments_in_order():
    split = TopKConfig("scan", 16, split=True, parts=3)
    assert scalars(FINE, split) == ("rows", "width", "k", "x_row", "values_row", "indices_row", "parts")
    strides = {"x": (1000,), "values": (10,), "indices": (11,)}
    assert scalar_values(FINE, split, strides) == (4, 1000, 10, 1000, 10, 11, 3)
    middle = replace(FINE, layout="any")
    strides = dict.fromkeys(strides, (1, 2, 3))
    assert scalar_values(middle, TopKConfig("scan", 16), strides, 2) == (4, 1000, 10, 2, *(1, 2, 3) * 3)
    assert workspace_bytes(TopKConfig("scan", 16), 4) == 0
    assert workspace_bytes(split, 4) >= COUNTERS + 4 * 3 * 16 * 8
    code = build(FINE, split, x86)
    assert [a.name for a in code.arguments][:3] == ["x", "values", "indices"]
    assert tuple(a.name for a in code.arguments)[3:] == (*scalars(FINE, split), "workspace")


def test_the_reference_orders_as_aten_does():
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((5, 100)).astype(np.float32)
    x[0, 3], x[1, 7], x[2, 5] = np.nan, np.inf, -np.inf
    for largest in (True, False):
        want = torch.topk(torch.from_numpy(x), 20, largest=largest)
        assert np.array_equal(reference(x, 20, largest), want.indices.numpy())
    with pytest.raises(ValueError, match="out of range"):
        reference(x, 101)


def test_the_template_has_a_digest():
    assert len(digest("topk")) == 64
