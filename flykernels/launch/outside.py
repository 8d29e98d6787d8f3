"""What an x86 object calls outside itself: the compiler lays out a table of these addresses, the loader fills it in."""

from __future__ import annotations

# libgomp's functions.
POOL = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
# Those of the door from Python (targets/x86_python.py): CPython's stable ABI, libgomp, libc.
DOOR = (
    "PyLong_AsUnsignedLongLongMask",  # takes any int and wraps around
    "PyLong_FromLong",
    "PyErr_Occurred",
    "PyErr_BadArgument",
    "PyErr_NoMemory",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "omp_get_max_threads",
    "aligned_alloc",
    "free",
)
OUTSIDE = (*POOL, *DOOR)
OUTSIDE_SYMBOL = "flykernels_outside"  # the table
