"""One seed for every test's random data. FLYKERNELS_TEST_SEED draws other data: a way to find bounds too tight."""

from __future__ import annotations

import os

import pytest
import torch

SEED = int(os.environ.get("FLYKERNELS_TEST_SEED", "0"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(SEED)
