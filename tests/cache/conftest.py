"""What is collected where: s3:// is spoken where there is a driver for it."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("s3fs") else ["test_remote_s3.py"]
