"""What needs an H200: collected where torch finds one, and nowhere else."""

from __future__ import annotations

import torch

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
collect_ignore_glob = [] if HERE else ["test_*.py"]
