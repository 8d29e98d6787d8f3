"""What needs an H200: collected where torch finds one, and nowhere else; what needs two, where there are two."""

from __future__ import annotations

import torch

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SEVERAL = HERE and torch.cuda.device_count() > 1
collect_ignore_glob = ([] if HERE else ["test_*.py"]) + ([] if SEVERAL else ["test_devices.py"])
