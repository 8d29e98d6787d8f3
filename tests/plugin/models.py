"""Factories for `flykernels warmup --model`: small models with every kind of product that templates serve."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A bias with gelu, a bias with a residual, a product alone, and two batched ones."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.scale = torch.full((width,), 0.5)  # neither parameter nor buffer

    def forward(self, x):
        y = self.norm(x)
        y = torch.softmax(y @ y.transpose(-1, -2), -1) @ y
        x = x + self.mix(y).tanh() * self.scale
        return x + self.down(nn.functional.gelu(self.up(x)))


def block():
    return Block(24, 56), torch.randn(3, 8, 24)


def named():
    """Inputs by name, half precision, tied weights, a symbolic size."""
    model = nn.Sequential(Block(32, 64), Block(32, 64))
    model[1].up.weight = model[0].up.weight
    x = torch.randn(4, 8, 32).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    model = model.to(torch.bfloat16)
    for part in model:
        part.scale = part.scale.bfloat16()
    assert model[1].up.weight is model[0].up.weight
    return model, {"input": x}


def linear():
    return nn.Linear(40, 48), (torch.randn(6, 40),)


def huge():
    """Far more than there is memory for."""
    return nn.Linear(1 << 20, 1 << 18, dtype=torch.bfloat16), (torch.randn(64, 1 << 20, dtype=torch.bfloat16),)


def broken():
    raise RuntimeError("no such checkpoint")


def alone():
    return nn.Linear(4, 4)


def nothing():
    return nn.ReLU(), torch.randn(4)
