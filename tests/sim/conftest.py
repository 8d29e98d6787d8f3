"""What cannot run here is not collected: IREE's cases without its compiler, replays without the recorded traces."""

import tarfile
from pathlib import Path

import pytest

from bench.simcases.iree_cases import tool
from bench.simcases.traces import archive

collect_ignore = []
if tool() is None:
    collect_ignore.append("test_iree.py")
if archive() is None:
    collect_ignore.append("test_replay.py")


@pytest.fixture(scope="session")
def traces(tmp_path_factory) -> Path:
    """The recorded MI350X traces, unpacked."""
    folder = tmp_path_factory.mktemp("att")
    with tarfile.open(archive()) as f:
        f.extractall(folder, filter="data")
    return folder
