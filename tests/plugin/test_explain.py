"""`flykernels explain` speaks of the problem that Inductor would ask for, under the key that it would look up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from inductor_plugin import wanted
from inductor_plugin.cli import main
from inductor_plugin.explain import Question
from inductor_plugin.explain_grouped import GroupedQuestion
from inductor_plugin.scaled_explain import ScaledQuestion
from tests.plugin.test_warmup import SHAPES, asked
from tuning_cache import Store, Timing
from tuning_cache.shapes import Shape

THIN = [
    Shape("mm", 1, 63, 40, layout="TN", bias="none"), Shape("mm", 7, 1, 33, bias="none"),
    Shape("mm", 7, 64, 1, layout="TT", bias="none"), Shape("bmm", 1, 63, 40, batch=3, bias="none"),
]  # fmt: skip


@pytest.mark.parametrize("shape", [*SHAPES, *THIN], ids=str)
@pytest.mark.parametrize("target", ["x86", "gfx950"])
def test_what_is_explained_is_what_inductor_asks_for(shape, target, monkeypatch):
    found = SimpleNamespace(
        gcnArchName="gfx950:sramecc+:xnack-", name="AMD Instinct MI350X", multi_processor_count=256, major=9, minor=5
    )
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    question = Question(
        shape.op, shape.m, shape.n, shape.k, shape.dtype, shape.layout, shape.batch, shape.bias, target=target
    )
    assert question.key == asked(shape, torch.device("cpu" if target == "x86" else "cuda:0"))


@pytest.mark.parametrize("target", ["x86", "gfx950", "sm90a"])
@pytest.mark.parametrize("n", [8, 63])
def test_scaled_and_grouped_products_too(target, n):
    of = lambda shape: wanted.problems_of(shape, target, {})[0].problem
    scaled = ScaledQuestion("_scaled_mm", 5, n, 96, "mxfp4", target=target)
    assert scaled.problem == of(
        Shape("scaled_mm", 5, n, 96, "f4E2M1FN", bias="none", scaling="block", out_dtype="bf16")
    )
    grouped = GroupedQuestion("_grouped_mm", 40, n, 33, "bf16", "NN", target=target, groups=8)
    assert grouped.problem == of(Shape("grouped_mm", 5, n, 33, "bf16", "NN", bias="none", groups=8))


@pytest.mark.parametrize("form", ["n", "k", "batch"])
def test_alignment_of_other_forms(form):
    p = GroupedQuestion("_grouped_mm", 24, 36, 40, "bf16", "NN", target="gfx950", form=form, groups=3).problem
    assert (p.align_a, p.align_b, p.align_c) == (16, 8, 8) and (p.a, p.b) == ("row", "row")


def test_where_the_winner_is_from(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", f"{tmp_path}/first:{tmp_path}/layer")
    first, layer = Store([tmp_path / "first"]), Store([tmp_path / "layer"])
    question = Question("mm", 4, 8, 8)
    won = Timing("aten mm", 3.0)
    layer.update(question.key, lambda e: replace(e.with_timing(won), winner=won.name))
    first.update(Question("mm", 5, 8, 8).key, lambda e: e)
    told = CliRunner().invoke(main, ["explain", "mm", "--m", "4", "--n", "8", "--k", "8"]).output
    assert f"winner: aten mm (measured on this target; {layer.place(question.key)})" in told


@pytest.mark.parametrize(
    "arguments", ["mm --hint 0", "mm+", "mm --batch 4", "topk+relu --m 4", "rms_norm+ --m 4", "grouped_mm --hint -1"]
)
def test_questions_that_are_none(arguments):
    told = CliRunner().invoke(main, ["explain", *arguments.split(), "--n", "8", "--k", "8"])
    assert told.exit_code == 2 and "Invalid value" in told.output
