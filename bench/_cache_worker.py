"""A process of `bench cache --part concurrency`: goes through all keys in its own order and tunes what nobody has.

Into the log: a line "started KEY PID" before a key is tuned, and "tuned KEY PID" once it is published; at the end
"waited SECONDS", the longest that it took to get a key's timing beyond tuning it itself."""

from __future__ import annotations

import os
import random
import sys
import time

from bench._cache_keys import CANDIDATE, candidate, key
from tuning_cache import Store, Timing


def main(directory: str, log: str, keys: int, seed: int, tune_seconds: float, limit: float) -> None:
    """Every key of 0..keys-1 once, with a limit of seconds to each wait."""
    store, order = Store([directory]), list(range(keys))
    random.Random(seed).shuffle(order)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)  # appended lines are whole, also of the killed
    say = lambda *words: os.write(out, (" ".join(map(str, words)) + "\n").encode())
    longest = 0.0
    for n in order:
        own = 0.0

        def measure(n: int = n) -> Timing:
            nonlocal own
            start = time.monotonic()
            say("started", n, os.getpid())
            time.sleep(tune_seconds)
            artefact = store.add(candidate(n))
            own = time.monotonic() - start
            return Timing(CANDIDATE, float(n), {"n": n}, artefact)

        start = time.monotonic()
        timing = store.timed(key(n), CANDIDATE, measure, limit)
        taken = time.monotonic() - start
        if own:
            say("tuned", n, os.getpid())
        if timing.microseconds != float(n):
            say("wrong", n, os.getpid())
        longest = max(longest, taken - own)
    say("waited", f"{longest:.3f}", os.getpid())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), float(sys.argv[6]))
