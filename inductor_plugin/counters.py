"""How often the plugin did what costs time, in this process: what a warm process must not do."""

from __future__ import annotations

from collections import Counter

# "benchmarks": candidates measured; "compiles": kernels built by a template; "from cache": choices the cache decided
counters: Counter[str] = Counter()
