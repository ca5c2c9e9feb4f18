"""Encoding by several processes or a Ray cluster, which may be killed, gives the same files."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxir import DualEncoder, cli
from jaxir.core.errors import UserError
from jaxir.retrieval.encoding import cluster
from jaxir.retrieval.encoding.cluster import Cluster, start_worker
from jaxir.retrieval.encoding.embeddings import encode_corpus
from jaxir.retrieval.encoding.shards import Shard, encode_shard
from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
from tests.retrieval.encode_processes import COUNT, SHARD, contents, encode, shards, wait_for_shards


@contextlib.contextmanager
def ray_cluster():
    """Yields the address of a cluster, and a function that sends it a command and waits for the answer."""
    command = [sys.executable, Path(__file__).with_name("ray_cluster.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # With Ray's default niceness, 15, the processes would starve beside other tests.
    env = os.environ | {"XLA_FLAGS": "", "RAY_worker_niceness": "0"}
    with subprocess.Popen(command, env=env, text=True, **pipes) as process:

        def send(what: str) -> None:
            print(what, file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"

        yield process.stdout.readline().strip(), send
        process.stdin.close()
        process.wait(60)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_processes_and_machines_of_a_ray_cluster_may_be_killed(encoded, small_model):
    output = encoded / "by_ray"
    with ray_cluster() as (address, send):
        first = encode(encoded, small_model, output.name, f"--ray={address}")
        wait_for_shards(first, output, 3)
        send("kill")
        wait_for_shards(first, output, 30)
        first.kill()
        assert first.wait() == -signal.SIGKILL
        with pytest.raises(UserError, match=r"incomplete: run the same jaxir.encode command again"):
            open_embeddings(output)
        made = len(shards(output))
        assert made < COUNT // SHARD, "guard: some shards are missing"
        second = encode(encoded, small_model, output.name, f"--ray={address}")
        wait_for_shards(second, output, made + 3)
        send("lose")
        assert second.wait(300) == 0, output.with_suffix(".log").read_text()
    assert contents(output) == contents(encoded / "whole")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_of_a_run_share_the_shards_and_one_may_be_killed(encoded, small_model):
    output = encoded / "by_two"

    def start() -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        run = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAXIR_HEARTBEAT_SECONDS": "20"}
        return [encode(encoded, small_model, output.name, **run, JAX_PROCESS_ID=str(n)) for n in range(2)]

    first, second = start()
    wait_for_shards(first, output, 3, lambda number: number % 2 == 0)
    wait_for_shards(first, output, 3, lambda number: number % 2 == 1)
    second.kill()
    second.wait()
    assert first.wait(200) == 75
    assert "run the same command again to resume" in output.with_suffix(".log").read_text()
    assert len(shards(output)) < COUNT // SHARD, "guard: some shards are missing"
    for process in start():
        assert process.wait(200) == 0, output.with_suffix(".log").read_text()
    assert contents(output) == contents(encoded / "whole")


def test_worker_refuses_another_model(toy, small_model, other_model, encoder):
    how = {"tower": "passage", "num_windows": 1, "expanded": False}
    facts = {"load": DualEncoder.load, "options": {}, "fingerprint": encoder.fingerprint}
    facts |= {"work": encode_shard, "how": how}
    shard = Shard(3, ["a", "b"], toy.random_texts(2))
    encoded, report = start_worker(spec=small_model, **facts)(shard)
    assert (encoded.number, encoded.ids, report.texts) == (3, ["a", "b"], 2)
    assert encoded.vectors.tolist() == encoder.encode_passages(shard.texts).tolist()
    with pytest.raises(UserError, match="a machine of the cluster has another model under the name"):
        start_worker(spec=other_model, **facts)


def test_user_errors_of_workers_are_returned():
    """Errors may come from a worker's start, from its calls, and from the reader of windows."""

    def result(worker, window) -> str:
        started = cluster._WorkerProcess(pickle.dumps(worker))
        return str(cluster._unpacked(started(cluster._packed(window))))

    assert result(Failing("start"), 1) == "no model"
    assert result(Failing("call"), 1) == "not finite"
    assert result(Failing(""), 1) == "2"
    assert result(Failing(""), UserError("line 3")) == "line 3"


class Failing(NamedTuple):
    """A worker that adds one, unless it fails at `where`."""

    where: str

    def __call__(self):
        if self.where == "start":
            raise UserError("no model")
        return self.add

    def add(self, number):
        if self.where == "call":
            raise UserError("not finite")
        return number + 1


def test_cluster_refuses_a_model_without_a_name(tmp_path, toy, encoder):
    unnamed = DualEncoder(encoder.model, encoder.tokenizer, encoder.settings)
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(2))
    with pytest.raises(UserError, match="a cluster cannot load a model that was never saved"):
        encode_corpus(unnamed, corpus, tmp_path / "out", cluster=Cluster())


@pytest.mark.parametrize(
    ("machines", "needs", "count"),
    [
        ([{"CPU": 8.0}, {"CPU": 4.0}, {"memory": 1e9}], {"num_cpus": 4}, 3),
        ([{"CPU": 8.0}, {"CPU": 96.0, "GPU": 8.0}], {"num_gpus": 1}, 8),
        ([{"CPU": 2.0}, {"CPU": 96.0, "TPU": 8.0}, {"TPU": 4.0}], {"resources": {"TPU": 4}}, 3),
    ],
)
def test_ray_process_needs_and_count_follow_the_machines(machines, needs, count):
    assert cluster._share(machines) == (needs, count)
    with pytest.raises(UserError, match="start Ray with --num-cpus"):
        cluster._share([{"memory": 1e9}])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:99999999"])
def test_address_without_a_cluster_is_reported_at_once(address):
    with pytest.raises(UserError, match=f"there is no Ray cluster at {address} .*start one with `ray start"):
        Cluster.connect(address)
    assert "ray" not in sys.modules


def test_missing_ray_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags = ["--model=absent", "--input=absent", f"--output={tmp_path}/out", "--ray=auto"]
    assert cli.main("jaxir.encode:encode", flags) == 1
    assert "the package ray is not installed; run: " in capsys.readouterr().err
