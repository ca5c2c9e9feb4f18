"""Models from the hub, in real processes, against a local server that speaks the hub's protocol."""

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.build import Pretrained
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf
from tests.interop import hub_server

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
T5 = "google/t5-tiny"
T5_FOLDER = f"hf:{GOLDEN / 't5_1_1'}"
# What such a repository holds beside: the same weights for others, and in another precision.
OTHERS = (
    *(
        "README.md",
        ".gitattributes",
        "tf_model.h5",
        "flax_model.msgpack",
        "rust_model.ot",
        "pytorch_model.bin",
    ),
    *("model.fp16.safetensors", "onnx/model.onnx", "openvino/openvino_model.bin", "coreml/model.mlmodel"),
    *("2_Dense/pytorch_model.bin", "generation_config.json", "golden.npz"),
)
RESOLVE = """
import json, sys
from jaxir import cli
from jaxir.runtime.distributed import maybe_initialize_distributed
from jaxir.core.errors import UserError
from jaxir.interop.hub import hub, hub_download
hub_download.PAUSE_SECONDS = 0.01
hub.LARGE_BYTES = 100_000
maybe_initialize_distributed()
for spec in sys.argv[1:]:
    kind, _, name = spec.partition(":")
    try:
        if kind == "st":
            found = hub.resolve(name, default_owner="sentence-transformers", modules=True)
        elif kind == "hf":
            found = hub.resolve(name)
        elif kind == "architecture":
            found = hub.resolve(name, weights=False)
        elif kind == "checked":
            from jaxir.interop.huggingface import hf
            found = hub.resolve(name, check=hf.check)
        else:
            found = hub.configuration(name)
        print(json.dumps(str(found)))
    except UserError as error:
        print(json.dumps({"error": str(error)}))
cli.end(0)
"""


def files_of(name: str) -> dict[str, bytes]:
    """A golden folder as a repository: with what its publisher would put beside."""
    folder = GOLDEN / name
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {**dict.fromkeys(OTHERS, b"of no use here " * 100), **files}


@pytest.fixture
def hub():
    with hub_server.serve() as served:
        yield served


@pytest.fixture
def resolve(hub, tmp_path):
    """Resolves specs in a process; returns directories or messages, and what it printed on standard error."""

    def run(*specs: str, cache: str = "cache", limit: str = "", **environment: str) -> tuple[list[str], str]:
        done = subprocess.run(
            ["bash", "-c", f'{limit}exec "$@"', "bash", sys.executable, "-c", RESOLVE, *specs],
            env=hub.environment(tmp_path / cache, **environment),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return [x["error"] if isinstance(x, dict) else x for x in found], done.stderr

    return run


def test_a_command_fetches_what_is_read_and_nothing_else_and_needs_no_network_again(hub, resolve, tmp_path):
    hub.add(T5, files_of("t5_1_1"))
    done = subprocess.run(
        [sys.executable, "-m", "jaxir.convert", f"--source=st:{T5}", f"--output={tmp_path}/first"],
        env=hub.environment(tmp_path / "cache"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert model_dir.load(f"{tmp_path}/first").fingerprint == (
        model_dir.load(f"st:{GOLDEN / 't5_1_1'}").fingerprint
    )
    weights = ["2_Dense/model.safetensors", "model.safetensors"]
    small = ["1_Pooling/config.json", "2_Dense/config.json", "3_Normalize/config.json", "config.json"]
    small += ["config_sentence_transformers.json", "modules.json", "sentence_bert_config.json"]
    small += ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(hub.downloads()) == sorted(weights + small)
    assert sorted(hub.downloads()[-2:]) == weights, "last what is large"
    said = done.stderr.splitlines()
    assert len(said) == 1 and said[0].startswith(
        f"{T5}: model.safetensors, 2_Dense/model.safetensors, modules.json"
    )
    assert said[0].endswith(f" kB in all, to {tmp_path}/cache/hub")
    hub.asked.clear()
    (offline,), said = resolve(f"st:{T5}", HF_HUB_OFFLINE="1")
    assert (said, hub.asked) == ("", []) and Path(offline).is_dir()


def test_a_damaged_file_of_the_cache_is_told_and_fetched_again_once_it_is_removed(hub, resolve):
    """One of weights and one of the small ones: each process resolves two models."""
    damaged = {"google/weights": "model.safetensors", "google/words": "tokenizer.json"}
    for name in damaged:
        hub.add(name, files_of("t5_1_1"))
    specs = [f"st:{name}" for name in damaged]
    directories, _ = resolve(*specs)
    files = [f"{directory}/{file}" for directory, file in zip(directories, damaged.values(), strict=True)]
    blobs = [Path(file).resolve() for file in files]
    contents = [blob.read_bytes() for blob in blobs]
    for blob, content in zip(blobs, contents, strict=True):
        middle = len(content) // 2
        blob.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    hub.asked.clear()
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        said, _ = resolve(*specs, **environment)
        assert said == [
            f"{file} is damaged: it is not what came from the hub; remove {blob}, and the same"
            " command fetches it again"
            for file, blob in zip(files, blobs, strict=True)
        ]
    assert fetched(hub) == []
    for blob in blobs:
        blob.unlink()
    assert resolve(*specs)[0] == directories
    assert [blob.read_bytes() for blob in blobs] == contents
    assert [name for name, _ in fetched(hub)] == list(damaged.values())
    hub.asked.clear()
    assert resolve(*specs, HF_HUB_OFFLINE="1")[0] == directories


def fetched(hub) -> list[tuple[str, int | None]]:
    """The names of the files that were asked for, and from which byte on."""
    return [
        (r.path.rpartition("/")[2], r.first) for r in hub.asked if r.method == "GET" and "/resolve/" in r.path
    ]


def sharded(tensors: dict[str, np.ndarray], single: str) -> dict[str, bytes]:
    """Weights in two files with an index, as large models have them."""
    stem, _, end = single.partition(".")
    names = sorted(tensors)
    parts = {f"{stem}-0000{i + 1}-of-00002.{end}": names[i::2] for i in range(2)}
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    content = {
        file: safetensors.numpy.save({n: np.ascontiguousarray(tensors[n]) for n in held})
        for file, held in parts.items()
    }
    return {**content, f"{single}.index.json": json.dumps(index).encode()}


def test_which_weights(hub, resolve):
    everything = files_of("roberta")
    folder = {n: c for n, c in everything.items() if not n.endswith((".safetensors", ".bin", ".msgpack"))}
    tensors = safetensors.numpy.load(everything["model.safetensors"])
    small = {"config.json", "config_sentence_transformers.json", "sentence_bert_config.json"}
    small |= {"tokenizer.json", "tokenizer_config.json"}
    shards, bins = sharded(tensors, "model.safetensors"), sharded(tensors, "pytorch_model.bin")
    content = {"pytorch_model.bin": b"b" * 2000, "flax_model.msgpack": b"f" * 2000}
    cases = {
        "a/shards": ({**shards, **content}, set(shards)),
        "a/single-first": (
            {**shards, "model.safetensors": everything["model.safetensors"]},
            {"model.safetensors"},
        ),
        "a/bin": (content, {"pytorch_model.bin"}),
        "a/bins": ({**bins, "flax_model.msgpack": b"f" * 2000}, set(bins)),
        "a/flax": ({"flax_model.msgpack": b"f" * 2000}, {"flax_model.msgpack"}),
    }
    for name, (weights, _) in cases.items():
        hub.add(name, folder | weights | {"tf_model.h5": b"h" * 2000, "model.fp16.safetensors": b"6" * 2000})
    weights, torch = GOLDEN / "weights" / "t5", {}
    for path in ((weights / "config.json"), *(weights / "torch_sharded").iterdir()):
        torch[path.name] = path.read_bytes()
    hub.add("a/torch", torch | {"flax_model.msgpack": b"f" * 2000})
    found, said = resolve(*(f"hf:{name}" for name in cases), "hf:a/torch")
    *found, torch_found = found
    for (name, (_, expected)), directory in zip(cases.items(), found, strict=True):
        here = {p.relative_to(directory).as_posix() for p in Path(directory).rglob("*") if p.is_file()}
        assert here == small | expected, name
    assert (
        model_dir.read(f"hf:{found[0]}")[0].params.keys() == model_dir.read(f"hf:{found[1]}")[0].params.keys()
    )
    read, expected = hf.read_encoder(Path(torch_found)).params, hf.read_encoder(weights).params
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(read[name], np.asarray(value), err_msg=name)
    assert "a/shards: model-00001-of-00002.safetensors and 1 more, " in said
    assert len(said.splitlines()) == len(cases) + 1


def test_an_architecture_is_fetched_without_weights_and_these_later(hub, resolve):
    hub.add(T5, files_of("t5_1_1"))
    (directory,), said = resolve(f"architecture:{T5}")
    assert not [name for name, _ in fetched(hub) if name.endswith((".safetensors", ".bin"))]
    assert "tokenizer.json" in said and "safetensors" not in said
    drawn = Pretrained(source=f"hf:{directory}", from_scratch=True)
    assert drawn.build(seed=1).model.config == Pretrained(source=T5_FOLDER).build(seed=1).model.config
    hub.asked.clear()
    assert resolve(f"architecture:{T5}", HF_HUB_OFFLINE="1")[0] == [directory]
    assert resolve(f"hf:{T5}")[0] == [directory]
    assert [name for name, _ in fetched(hub)] == ["model.safetensors"]


def test_each_module_has_weights_of_its_own():
    kinds = {
        "0_Transformer": "Transformer",
        "1_Pooling": "Pooling",
        "2_Dense": "Dense",
        "3_Normalize": "Normalize",
    }
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    names = ["modules.json", "0_Transformer/config.json", "1_Pooling/config.json", "2_Dense/config.json"]
    names += [
        "0_Transformer/model.safetensors",
        "0_Transformer/pytorch_model.bin",
        "2_Dense/pytorch_model.bin",
    ]
    names += [
        "0_Transformer/spiece.model",
        "0_Transformer/deep/other.model",
        "spiece.model",
        "model.safetensors",
    ]
    chosen = hub_files.wanted(names, lambda file: modules, "some/model", modules=True)
    assert chosen.weights == ["0_Transformer/model.safetensors", "2_Dense/pytorch_model.bin"]
    assert sorted(chosen.small) == sorted([*names[:4], "0_Transformer/spiece.model"])
    names.remove("2_Dense/pytorch_model.bin")
    with pytest.raises(UserError, match="some/model: it has no weights that can be read here"):
        hub_files.wanted(names, lambda file: modules, "some/model", modules=True)


@pytest.mark.parametrize("model_type", ["CrossEncoder", "SentenceTransformer"])
def test_a_cross_encoder_comes_with_the_list_of_its_modules(model_type):
    """Without this list it would have no prompts."""
    names = ["config.json", "config_sentence_transformers.json", "modules.json", "model.safetensors"]
    chosen = hub_files.wanted(names, lambda file: {"model_type": model_type}, "a/model", modules=False)
    assert ("modules.json" in chosen.small) == (model_type == "CrossEncoder")


def test_revisions(hub, resolve):
    old, new = files_of("roberta"), files_of("bert")
    commits = [hub.add(T5, old, "v1", "refs/pr/2"), hub.add(T5, new)]
    specs = {f"{T5}": 1, f"{T5}@v1": 0, f"{T5}@refs/pr/2": 0, f"{T5}@{commits[0]}": 0, f"{T5}@main": 1}
    found, said = resolve(
        *(f"hf:{spec}" for spec in specs), f"hf:{T5}@v3", f"hf:{T5}@", f"hf:{GOLDEN}@v1", f"hf:{T5}@../x"
    )
    assert [Path(x).name for x in found[:5]] == [commits[i] for i in specs.values()]
    assert len(said.splitlines()) == 2, "what is here is not fetched again"
    assert found[5].startswith(
        f"{T5} has no revision 'v3': after @ comes a branch, a tag, a commit or refs/pr/N"
    )
    for i, spec in ((6, f"{T5}@"), (8, f"{T5}@../x")):
        assert found[i] == f"{spec}: after @ comes a branch, a tag, a commit or refs/pr/N"
    assert found[7].startswith(f"{GOLDEN}@v1: ")
    asked = [r.path for r in hub.asked if r.path.startswith("/api/")]
    assert asked == [f"/api/models/{T5}/revision/{r}" for r in ("main", "v1", "refs/pr/2", "main", "v3")], (
        "a commit never changes"
    )
    hub.asked.clear()
    found, said = resolve(f"hf:{T5}@v1", f"hf:{T5}", HF_HUB_OFFLINE="1")
    assert ([Path(x).name for x in found], said, hub.asked) == (commits, "", [])


def test_a_cut_connection_is_taken_up_where_it_broke(hub, resolve, tmp_path):
    files, other = files_of("t5_1_1"), files_of("t5_1_0")
    hub.add(T5, files)
    hub.add("google/t5-cut", other)
    cuts = iter([10_000, 5_000, None, 20_000, 0, 0, 0, 0, 0])

    def sends(path: str, size: int) -> int | None:
        if path != "model.safetensors":
            return None
        try:
            return next(cuts)
        except StopIteration:
            hub.knows_ranges = False
            return None

    hub.sends = sends
    (first, message, second), said = resolve(f"hf:{T5}", "hf:google/t5-cut", "hf:google/t5-cut")
    assert (Path(first) / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert message.startswith("google/t5-cut/model.safetensors: the connection broke off at 20 kB of ")
    assert message.endswith("run the same command again, it goes on from there")
    assert (Path(second) / "model.safetensors").read_bytes() == other["model.safetensors"]
    ranges = [first for name, first in fetched(hub) if name == "model.safetensors"]
    assert ranges[:4] == [0, 10_000, 15_000, 0] and set(ranges[4:]) == {20_000}
    assert len(said.splitlines()) == 3
    assert not list(tmp_path.rglob("*.incomplete"))


def test_a_killed_process_has_not_fetched_in_vain(hub, resolve, tmp_path):
    files = files_of("t5_1_1")
    hub.add(T5, files)
    sent, killed = threading.Event(), threading.Event()
    hub.sends = lambda path, size: 50_000 if path == "model.safetensors" else None
    hub.before_cut = lambda: (sent.set(), killed.wait(60))
    process = subprocess.Popen(
        [sys.executable, "-c", RESOLVE, f"hf:{T5}"],
        env=hub.environment(tmp_path / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert sent.wait(60)
    part = tmp_path / "cache/hub/models--google--t5-tiny/blobs"
    part /= f"{hub_server.etag(files['model.safetensors'])}.incomplete"
    while not (part.exists() and part.stat().st_size > 20_000):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed.set()
    have = part.stat().st_size
    hub.sends = lambda path, size: None
    hub.asked.clear()
    (found,), _ = resolve(f"hf:{T5}")
    assert (Path(found) / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert fetched(hub) == [("model.safetensors", have)]


@pytest.mark.slow
def test_processes_of_one_run_fetch_each_file_once_and_say_so_once(hub, tmp_path):
    hub.add(T5, files_of("t5_1_1"))
    released = threading.Event()
    hub.sends = lambda path, size: released.wait(60) and None if path == "model.safetensors" else None
    command = [sys.executable, "-c", RESOLVE, f"hf:{T5}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        run = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(command, env=hub.environment(tmp_path / "cache", JAX_PROCESS_ID=i, **run), **pipes)
        for i in "01"
    ]
    wanted = f"/{T5}/resolve/{hub.commit(T5, 'main')}/model.safetensors"
    while sum(r.method == "HEAD" and r.path == wanted for r in hub.asked) < 2:
        assert all(process.poll() is None for process in started)
    released.set()
    outputs = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert [err.count(" in all, to ") for _, err in outputs] == [1, 0]
    note = (
        f"note: that is for every host; `python -m jaxir.convert --source=hf:{T5} --output=gs://BUCKET/MODEL`"
    )
    assert [err.count(note) for _, err in outputs] == [1, 0]
    assert sorted(hub.downloads()) == sorted(set(hub.downloads()))


@pytest.mark.slow
def test_unusable_hub_models_are_refused_before_weights_are_fetched(hub, resolve):
    hub.add("google/t5-v1_1-base", files_of("t5_1_0"))
    hub.add("meta/gated", files_of("roberta"))
    hub.add("some/busy", files_of("roberta"))
    hub.refusals |= {"meta/gated": (403, "GatedRepo"), "some/busy": (503, "")}
    hub.add("some/gpt", {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": b"x" * 2000})
    hub.add(
        "some/tf", {"config.json": (GOLDEN / "roberta/config.json").read_bytes(), "tf_model.h5": b"x" * 2000}
    )
    hub.add("some/gguf", {"README.md": b"x", "model.gguf": b"x" * 2000})
    damaged = files_of("roberta")
    damaged["model.safetensors.index.json"] = b'{"weight_map": {"x": "model-1.safetensors"}}'
    del damaged["model.safetensors"]
    hub.add("some/part", damaged)
    neither = "neither a local directory nor a model on the hub, or is private"
    log_in = "run `hf auth login` or set HF_TOKEN"
    locally = "or give a local copy of it, hf:DIR (in a recipe --model=hf:DIR)"
    alone = "for its encoder alone write hf:"
    readable = "(model.safetensors, pytorch_model.bin or flax_model.msgpack)"
    cases = {
        "hf:google/t5-v1.1-base": f": {neither}: {log_in}; did you mean 'google/t5-v1_1-base'?",
        "hf:nobody/nothing-like-it": f": {neither}: {log_in}; is the name right?",
        "hf:meta/gated": f" is gated: accept its terms on {hub.url}/meta/gated, then {log_in}, {locally}",
        "hf:some/busy": f": the hub answers with status 503: try again later, {locally}",
        "hf:some/tf": f": it has no weights that can be read here {readable}; there are tf_model.h5",
        "hf:some/gguf": ": it has no config.json, so it is no model of transformers",
        "st:some/tf": f": it is no sentence-transformers model (no modules.json); {alone}",
        "hf:some/part": ": it lacks model-1.safetensors, which its model.safetensors.index.json names",
        "hf:google/t5 base": ": there is no such directory, and names on the hub are written OWNER/NAME",
    }
    messages, _ = resolve(*cases, "checked:some/gpt")
    for (spec, expected), message in zip(cases.items(), messages, strict=False):
        assert message == spec[3:] + expected
    assert "model_type 'gpt2'" in messages[-1]
    assert "model.safetensors" not in hub.downloads(), "nothing is fetched in vain"


@pytest.mark.slow
def test_out_of_reach_and_out_of_room(hub, resolve, tmp_path):
    hub.add(T5, files_of("t5_1_1"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    (full,), _ = resolve(f"hf:{T5}", limit="ulimit -f 20; ")
    assert full.startswith(f"{T5}: the disk of {tmp_path}/cache/hub is full; what came stays")
    (found, unknown), _ = resolve(f"hf:{T5}", "hf:nobody/nothing", HF_TOKEN="hf_x")
    assert unknown.startswith("nobody/nothing: neither a local directory nor a model on the hub, or not with")
    assert hub.tokens == {"127.0.0.1": {"", "Bearer hf_x"}, "localhost": {""}}, "others get no token"
    (again, lost), said = resolve(f"hf:{T5}", f"hf:{T5}@v1", HF_ENDPOINT=nobody)
    assert again == found
    assert said == f"note: {T5} as it was last fetched, for the hub does not give it now ({found})\n"
    assert lost == (
        f"{T5}: the hub ({nobody}) cannot be reached (connection refused): try again, or give a local copy"
        " of it, hf:DIR (in a recipe --model=hf:DIR)"
    )


def test_a_damaged_file_is_noticed(hub, resolve, tmp_path):
    files = files_of("t5_1_1")
    hub.add(T5, files)
    blobs = tmp_path / "cache/hub/models--google--t5-tiny/blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{hub_server.etag(files['model.safetensors'])}.incomplete"
    part.write_bytes(b"not the beginning of it")
    (message, found), _ = resolve(f"hf:{T5}", f"hf:{T5}")
    assert message.endswith("model.safetensors: what came is not the file that the hub announced; try again")
    assert (Path(found) / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_plan_fetches_the_configuration_alone(hub, resolve):
    hub.add(T5, files_of("t5_1_1"))
    (found,), said = resolve(f"config:{T5}")
    assert Path(found).read_bytes() == (GOLDEN / "t5_1_1/config.json").read_bytes()
    assert (said, hub.downloads()) == ("", ["config.json"])
