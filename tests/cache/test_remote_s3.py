"""s3:// as it is spoken on the wire, by s3fs: read through, written behind, and never in the way. Collected where s3fs
is installed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import s3fs

from tests.cache.buckets import serving
from tests.cache.making import code, fill, key
from tuning_cache import Remote, Store, Timing, remote

URL = "s3://bucket/flykernels"
QUICK = 0.5


@pytest.fixture
def bucket(monkeypatch):
    with serving() as (bucket, address):
        environment = {
            "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield bucket
        s3fs.S3FileSystem.clear_instance_cache()


def store(folder, timeout: float = 30.0) -> Store:
    """A busy machine may take its time, where no test is of timeouts."""
    return Store([folder], remote=Remote(URL, timeout))


def written(filled: Store) -> None:
    assert filled.remote.flush(30) and not filled.remote.failures


def test_what_one_machine_finds_another_has(tmp_path, bucket):
    made = fill(one := store(tmp_path / "one"), 3)
    written(one)
    assert len(bucket.objects) == 6 and all(name.startswith("bucket/flykernels/") for name in bucket.objects)
    two = store(tmp_path / "two")
    assert two.lookup(key(2)) == made[1] and two.load(made[1].best().artefact) == code(2)
    assert two.lookup(key(9)) is None and not two.remote.failures
    two.update(key(3), lambda e: replace(e.with_timing(Timing("triton", 1.0)), winner="triton"))
    written(two)
    asked = bucket.requests
    assert Store([tmp_path / "two"]).lookup(key(2)) == made[1] and bucket.requests == asked  # kept
    three = store(tmp_path / "three").lookup(key(3))
    assert three.winner == "triton" and set(made[2].timings) < set(three.timings)


def test_nothing_damaged_or_too_large_is_taken(tmp_path, bucket, caplog):
    made = fill(one := store(tmp_path / "one"), 1, size=16)
    written(one)
    for name, data in dict(bucket.objects).items():
        bucket.objects[name] = data[:40] + bytes([data[40] ^ 1]) + data[41:]
    two = store(tmp_path / "two")
    assert two.lookup(key(1)) is None and two.load(made[0].best().artefact) is None
    assert "passed over" in caplog.text


def test_a_server_that_hangs_refuses_or_is_gone_is_a_miss(tmp_path, bucket, caplog):
    made = fill(one := store(tmp_path / "one"), 2)
    written(one)
    hung = store(tmp_path / "hung")
    assert hung.lookup(key(1)) == made[0]
    hung.remote.timeout = QUICK
    bucket.let_go.clear()
    start = time.monotonic()
    assert all(hung.lookup(key(n)) is None for n in range(2, 30))
    assert time.monotonic() - start < 5 * QUICK and hung.remote.failures
    bucket.let_go.set()
    hung.remote._down_until = 0.0  # as after half a minute
    hung.remote._missed.clear()
    hung.remote.timeout = 30.0
    assert hung.lookup(key(2)) == made[1]
    bucket.status = 403
    refused = store(tmp_path / "refused")
    assert refused.lookup(key(1)) is None and refused.remote.failures
    assert "left alone" in caplog.text


def test_offline_costs_one_timeout(tmp_path, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    gone, start = store(tmp_path, timeout=QUICK), time.monotonic()
    made = fill(gone, 3)
    assert [gone.lookup(e.key) for e in made] == made and all(gone.lookup(key(n)) is None for n in range(4, 50))
    assert time.monotonic() - start < remote.OPEN_SECONDS + 10 * QUICK and gone.remote.failures
