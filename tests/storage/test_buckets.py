"""Leases on directories in a bucket, and errors for a bucket that cannot be used."""

import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxir.core.errors import UserError
from jaxir.storage import files, leases
from jaxir.storage.files import path_of
from tests import bucket_server, local_server


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(leases, "RENEWED_EVERY", 0.1)
    monkeypatch.setattr(leases, "STALE_AFTER", 1.0)
    with bucket_server.serve() as served:
        for name, value in served.environment.items():
            if os.environ.get(name) != value:
                monkeypatch.setenv(name, value)
        yield served


def lease() -> leases.Lease:
    return leases.Lease(path_of("gs://bucket/run"), "trains in")


def test_second_process_is_refused_while_the_lease_is_renewed(bucket, capsys):
    with lease() as held:
        about = json.loads(bucket["run/LEASE"])
        first = bucket.get("run/LEASE").generation
        who = rf"\(.*, process {os.getpid()}, since {about['since'][:9]}"
        with pytest.raises(UserError, match=rf"another process trains in gs://bucket/run {who}"), lease():
            pass
        assert "waiting up to 1 s to see whether that process still" in capsys.readouterr().err
        held.check()
        assert bucket.get("run/LEASE").generation > first
    assert not bucket.names()


@pytest.mark.slow
def test_stale_lease_is_taken_over_by_one_process_only(bucket, capsys):
    bucket.put("run/LEASE", json.dumps({"host": "gone", "process": 7, "since": "then"}).encode())
    outcomes = []

    def compete():
        try:
            with lease() as held:
                time.sleep(2.5)
                held.check()
                outcomes.append("held")
        except UserError as error:
            outcomes.append(str(error))

    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(compete)
    assert sorted(o == "held" for o in outcomes) == [False, False, True], outcomes
    assert all(o == "held" or o.startswith("another process trains in gs://bucket/run (") for o in outcomes)
    assert "gs://bucket/run is leased (gone, process 7, since then)" in capsys.readouterr().err
    assert not bucket.names()


def test_lost_lease_ends_the_holder_and_keeps_the_new_lease(bucket):
    with lease() as held:
        bucket.put("run/LEASE", b'{"host": "other", "process": 8, "since": "now"}')
        with pytest.raises(UserError, match=r"took over its lease \(other, process 8, since now\)"):
            while True:
                time.sleep(0.05)
                held.check()
    assert json.loads(bucket["run/LEASE"])["host"] == "other"


@pytest.mark.slow
def test_lease_survives_a_short_outage_and_reports_a_long_one(bucket, monkeypatch):
    monkeypatch.setattr(leases, "ATTEMPTS", 0.3)
    monkeypatch.setattr(leases, "STALE_AFTER", 6.0)
    with lease() as held:
        bucket.admit = lambda name: False
        time.sleep(0.3)
        held.check()
        with pytest.raises(UserError, match=r"lease on gs://bucket/run could not be renewed \(.*\); run"):
            while True:
                time.sleep(0.05)
                held.check()
        assert time.monotonic() - held._renewed < leases.STALE_AFTER, "before another may take it over"
        bucket.admit = lambda name: True
        held.check()
    bucket.admit = lambda name: False
    with pytest.raises(UserError, match="gs://bucket/run could not be leased"), lease():
        pass


def test_lease_is_held_if_only_the_response_to_its_write_was_lost(bucket, monkeypatch, capsys):
    put, lost = bucket.put, []

    def put_and_lose_the_first_answer(name, content, condition=None):
        code = put(name, content, condition)
        if lost:
            return code
        lost.append(code)
        return 503

    monkeypatch.setattr(bucket, "put", put_and_lose_the_first_answer)
    with lease() as held:
        held.check()
    assert lost == [200] and "is leased" not in capsys.readouterr().err
    assert not bucket.names()


def test_unusable_bucket_is_reported_within_seconds(bucket, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(files, "BUCKET_SECONDS", 1.0)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.url)
    files.check_bucket(files.path_of("gs://bucket/run"), writing=True)
    with pytest.raises(UserError, match="gs://other/run: there is no bucket other"):
        files.check_bucket(files.path_of("gs://other/run"), writing=True)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", nobody)
    before = time.monotonic()
    with pytest.raises(UserError, match=r"the bucket cannot be reached \(connection refused\)"):
        files.check_bucket(files.path_of("gs://bucket/run"))
    assert time.monotonic() - before < 10
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    with pytest.raises(UserError, match="no Google credentials found; run `gcloud auth"):
        files.check_bucket(files.path_of("gs://bucket/run"), writing=True)
    for wrong in ("gs://", "s3://bucket/run"):
        with pytest.raises(UserError, match="gs://BUCKET/PATH"):
            files.path_of(wrong)


def test_bad_gateway_is_retried(monkeypatch):
    codes = [502]

    class Gateway(local_server.Handler):
        def do_GET(self):
            content = b'{"kind": "storage#objects"}'
            self.send_response(codes.pop() if codes else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    with local_server.serve(Gateway) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        files.check_bucket(files.path_of("gs://bucket/run"))
    assert codes == []


def test_missing_gcsfs_is_reported_with_the_command_that_installs_it(monkeypatch):
    files._prepare_gcsfs.cache_clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"gcsfs is needed to reach a bucket; run: .* pip install"):
        files.path_of("gs://bucket/run")
