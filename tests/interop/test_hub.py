"""Models from the hub, in real processes, against a local server with the hub's protocol."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.build import Pretrained
from jaxir.interop.hub import hub_files
from tests.interop import hub_server
from tests.interop.folders import GOLDEN

T5 = "google/t5-tiny"
# Other files of a publisher's repository, such as weights for other frameworks or in another precision.
OTHERS = ["README.md", ".gitattributes", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "golden.npz"]
OTHERS += ["model.fp16.safetensors", "onnx/model.onnx", "openvino/openvino_model.bin", "coreml/model.mlmodel"]
OTHERS += ["pytorch_model.bin", "2_Dense/pytorch_model.bin", "generation_config.json"]
RESOLVE = """
import json, sys
from jaxir import cli
from jaxir.runtime.distributed import maybe_initialize_distributed
from jaxir.core.errors import UserError
from jaxir.interop.hub import hub
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
            found = hub.resolve(name, check=hf.read_architecture)
        else:
            found = hub.configuration(name)
        print(json.dumps(str(found)))
    except UserError as error:
        print(json.dumps({"error": str(error)}))
cli.end(0)
"""


def files_of(name: str) -> dict[str, bytes]:
    """Returns a golden folder as a repository, together with other files that publishers add."""
    folder = GOLDEN / name
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {**dict.fromkeys(OTHERS, b"of no use here " * 100), **files}


@pytest.fixture
def hub():
    with hub_server.serve() as served:
        yield served


@pytest.fixture
def resolve(hub, tmp_path):
    """Resolves specs in a new process; returns a directory or message for each, and its standard error."""

    def run(*specs: str, limit: str = "", **environment: str) -> tuple[list[str], str]:
        command = ["bash", "-c", f'{limit}exec "$@"', "bash", sys.executable, "-c", RESOLVE, *specs]
        env = hub.environment(tmp_path / "cache", **environment)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return [x["error"] if isinstance(x, dict) else x for x in found], done.stderr

    return run


def test_only_files_that_are_read_are_downloaded_once(hub, resolve, tmp_path):
    hub.add(T5, files_of("t5_1_1"))
    command = [sys.executable, "-m", "jaxir.convert", f"--source=st:{T5}", f"--output={tmp_path}/first"]
    env = hub.environment(tmp_path / "cache")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = model_dir.load(f"st:{GOLDEN / 't5_1_1'}").fingerprint
    assert model_dir.load(f"{tmp_path}/first").fingerprint == expected
    weights = ["2_Dense/model.safetensors", "model.safetensors"]
    small = ["1_Pooling/config.json", "2_Dense/config.json", "3_Normalize/config.json", "config.json"]
    small += ["config_sentence_transformers.json", "modules.json", "sentence_bert_config.json"]
    small += ["tokenizer.json", "tokenizer_config.json"]
    sent = [path for path, _ in hub.sent]
    assert (sorted(sent[:-2]), sorted(sent[-2:])) == (small, weights), "weights come last"
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"{T5}: model.safetensors, 2_Dense/model.safetensors, modules.json")
    assert said.endswith(f" kB in total, to {tmp_path}/cache/hub")
    hub.asked.clear()
    (offline,), said = resolve(f"st:{T5}", HF_HUB_OFFLINE="1")
    assert (said, hub.asked) == ("", []) and Path(offline).is_dir()


@pytest.mark.slow
def test_damaged_file_in_the_cache_is_refused_until_it_is_removed(hub, resolve):
    """Damages a large and a small file, whose hashes are of different kinds."""
    damaged = {"google/weights": "model.safetensors", "google/words": "3_Normalize/config.json"}
    for name in damaged:
        hub.add(name, files_of("t5_1_1"))
    specs = [f"st:{name}" for name in damaged]
    directories, _ = resolve(*specs)
    files = [f"{directory}/{file}" for directory, file in zip(directories, damaged.values(), strict=True)]
    blobs = [Path(file).resolve() for file in files]
    assert [len(blob.name) for blob in blobs] == [64, 40]
    contents = [blob.read_bytes() for blob in blobs]
    for blob, content in zip(blobs, contents, strict=True):
        middle = len(content) // 2
        blob.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    hub.sent.clear()
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        for message, file, blob in zip(resolve(*specs, **environment)[0], files, blobs, strict=True):
            assert message.startswith(f"{file} is damaged: ") and f"remove {blob} and run" in message
    assert hub.sent == []
    for blob in blobs:
        blob.unlink()
    assert resolve(*specs)[0] == directories
    assert [blob.read_bytes() for blob in blobs] == contents
    assert [path for path, _ in hub.sent] == list(damaged.values())


SAFE, BIN, FLAX = "model.safetensors", "pytorch_model.bin", "flax_model.msgpack"
SHARDS = {
    stem: [f"{stem}-0000{i}-of-00002.{end}" for i in (1, 2)]
    for stem, end in (("model", "safetensors"), ("pytorch_model", "bin"))
}


def of_names(names: list[str], content: Any = None, **how: bool) -> hub_files.Wanted:
    """Returns the files chosen from a repository with files of these names; JSON files hold `content`."""
    return hub_files.wanted(names, lambda file: content, "some/model", **how)


@pytest.mark.parametrize(
    ("index", "others", "expected"),
    [
        (SAFE, [BIN, FLAX], SHARDS["model"]),
        (SAFE, [SAFE, BIN], [SAFE]),
        (None, [BIN, FLAX], [BIN]),
        (BIN, [FLAX], SHARDS["pytorch_model"]),
        (None, [FLAX], [FLAX]),
    ],
)
def test_one_copy_of_the_weights_is_chosen(index, others, expected):
    shards = SHARDS.get((index or "").partition(".")[0], [])
    indices = [f"{index}.index.json"] if index else []
    names = ["config.json", "tf_model.h5", "model.fp16.safetensors", *others, *shards, *indices]
    chosen = of_names(names, {"weight_map": dict(enumerate(shards))})
    assert chosen.weights == expected
    assert chosen.small == ["config.json", *(indices if expected == shards else [])]


def test_each_module_has_weights_of_its_own():
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    own = "sentence_transformers.models"
    modules = [{"path": f"{i}_{kind}", "type": f"{own}.{kind}"} for i, kind in enumerate(kinds)]
    small = ["modules.json", "0_Transformer/config.json", "1_Pooling/config.json", "2_Dense/config.json"]
    small.append("0_Transformer/spiece.model")
    weights = ["0_Transformer/model.safetensors", "2_Dense/pytorch_model.bin"]
    others = ["0_Transformer/pytorch_model.bin", "0_Transformer/deep/other.model", "spiece.model", SAFE]
    chosen = of_names([*small, *weights, *others], modules, modules=True)
    assert (sorted(chosen.small), chosen.weights) == (sorted(small), weights)
    with pytest.raises(UserError, match="some/model: it has no weights that jaxir reads"):
        of_names([*small, *weights[:1], *others], modules, modules=True)


@pytest.mark.parametrize("model_type", ["CrossEncoder", "SentenceTransformer"])
def test_the_list_of_modules_of_a_cross_encoder_is_downloaded(model_type):
    """Without modules.json a cross-encoder has no prompts."""
    names = ["config.json", "config_sentence_transformers.json", "modules.json", SAFE]
    chosen = of_names(names, {"model_type": model_type})
    assert ("modules.json" in chosen.small) == (model_type == "CrossEncoder")


@pytest.mark.slow
def test_configuration_and_architecture_are_downloaded_without_weights(hub, resolve):
    files = files_of("roberta")
    tensors = safetensors.numpy.load(files.pop(SAFE))
    halves = {part: sorted(tensors)[i::2] for i, part in enumerate(SHARDS["model"])}
    files |= {p: safetensors.numpy.save({n: tensors[n] for n in names}) for p, names in halves.items()}
    weight_map = {name: part for part, names in halves.items() for name in names}
    hub.add(T5, files | {f"{SAFE}.index.json": json.dumps({"weight_map": weight_map}).encode()})
    (found,), said = resolve(f"config:{T5}")
    assert Path(found).read_bytes() == (GOLDEN / "roberta/config.json").read_bytes()
    assert (said, hub.sent) == ("", [("config.json", 0)])
    (directory,), said = resolve(f"architecture:{T5}")
    assert not [path for path, _ in hub.sent if path.endswith((".safetensors", ".bin", ".index.json"))]
    assert "tokenizer.json" in said and "safetensors" not in said
    drawn = Pretrained(source=f"hf:{directory}", from_scratch=True)
    expected = Pretrained(source=f"hf:{GOLDEN / 'roberta'}")
    assert drawn.build(seed=1).model.config == expected.build(seed=1).model.config
    hub.sent.clear()
    assert resolve(f"architecture:{T5}", HF_HUB_OFFLINE="1")[0] == [directory]
    assert hub.sent == []
    again, said = resolve(f"hf:{T5}")
    assert again == [directory] and f"{T5}: {SHARDS['model'][0]} and 1 more, " in said
    assert sorted(path for path, _ in hub.sent) == [*SHARDS["model"], f"{SAFE}.index.json"]
    fingerprints = {model_dir.load(f"hf:{d}").fingerprint for d in (directory, GOLDEN / "roberta")}
    assert len(fingerprints) == 1


@pytest.mark.slow
def test_revision_is_pinned_and_read_offline(hub, resolve):
    old, new = files_of("roberta"), files_of("bert")
    commits = [hub.add(T5, old, "v1", "refs/pr/2"), hub.add(T5, new)]
    specs = {f"{T5}": 1, f"{T5}@v1": 0, f"{T5}@refs/pr/2": 0, f"{T5}@{commits[0]}": 0, f"{T5}@main": 1}
    bad = (f"hf:{T5}@v3", f"hf:{T5}@", f"hf:{GOLDEN}@v1", f"hf:{T5}@../x")
    found, said = resolve(*(f"hf:{spec}" for spec in specs), *bad)
    assert [Path(x).name for x in found[:5]] == [commits[i] for i in specs.values()]
    assert len(said.splitlines()) == 2, "what is here is not fetched again"
    assert found[5].startswith(f"{T5} has no revision 'v3'")
    assert all("write a branch, a tag, a commit or refs/pr/N after @" in found[i] for i in (6, 8))
    assert found[7].startswith(f"{GOLDEN}@v1: ")
    asked = [r.path for r in hub.asked if "/revision/" in r.path]
    # The hub is not asked about a revision that is a commit, because a commit never changes.
    assert asked == [f"/api/models/{T5}/revision/{r}" for r in ("main", "v1", "refs/pr/2", "main", "v3")]
    hub.asked.clear()
    found, said = resolve(f"hf:{T5}@v1", f"hf:{T5}", HF_HUB_OFFLINE="1")
    assert ([Path(x).name for x in found], said, hub.asked) == (commits, "", [])


@pytest.mark.slow
def test_a_download_goes_on_where_the_connection_broke(hub, resolve):
    files = files_of("t5_1_1")
    hub.add(T5, files)
    cuts = iter([10_000, 5_000])
    hub.sends = lambda path, size: next(cuts, None) if path == SAFE else None
    (found,), _ = resolve(f"hf:{T5}")
    assert (Path(found) / SAFE).read_bytes() == files[SAFE]
    assert next(cuts, None) is None


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
    environments = (hub.environment(tmp_path / "cache", JAX_PROCESS_ID=i, **run) for i in "01")
    started = [subprocess.Popen(command, env=environment, **pipes) for environment in environments]
    wanted = f"/{T5}/resolve/{hub.commit(T5, 'main')}/model.safetensors"
    while sum(r.method == "HEAD" and r.path == wanted for r in hub.asked) < 2:
        assert all(process.poll() is None for process in started)
    released.set()
    outputs = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert [err.count(" in total, to ") for _, err in outputs] == [1, 0]
    note = f"note: every host downloads this; `python -m jaxir.convert --source=hf:{T5} --output=gs://"
    assert [err.count(note) for _, err in outputs] == [1, 0]
    assert len(hub.sent) == len(set(hub.sent))


@pytest.mark.slow
def test_unusable_hub_models_are_refused_before_weights_are_fetched(hub, resolve):
    hub.add("google/t5-v1_1-base", files_of("t5_1_0"))
    hub.add("meta/gated", files_of("roberta"))
    hub.add("some/busy", files_of("roberta"))
    hub.refusals |= {"meta/gated": (403, "GatedRepo"), "some/busy": (503, "")}
    roberta, weights = (GOLDEN / "roberta/config.json").read_bytes(), b"x" * 2000
    hub.add("some/gpt", {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": weights})
    hub.add("some/tf", {"config.json": roberta, "tf_model.h5": weights})
    hub.add("some/gguf", {"README.md": b"x", "model.gguf": weights})
    damaged = files_of("roberta")
    damaged["model.safetensors.index.json"] = b'{"weight_map": {"x": "model-1.safetensors"}}'
    del damaged["model.safetensors"]
    hub.add("some/part", damaged)
    cases = {
        "hf:google/t5-v1.1-base": "hf auth login` or set HF_TOKEN; did you mean 'google/t5-v1_1-base'?",
        "hf:nobody/nothing-like-it": "neither a local directory nor a model on the hub, unless it is private",
        "hf:meta/gated": f"is gated: accept its terms on {hub.url}/meta/gated, then run `hf auth login`",
        "hf:some/busy": "status 503: try again later, or give a local copy of it, hf:DIR",
        "hf:some/tf": "flax_model.msgpack); it has tf_model.h5",
        "hf:some/gguf": "it has no config.json, so it is not a transformers model",
        "st:some/tf": "it has no modules.json, so it is not a model of sentence-transformers; write hf:",
        "hf:some/part": "lacks model-1.safetensors, which its model.safetensors.index.json names",
        "hf:google/t5 base": "no such directory, and names on the hub have the form OWNER/NAME",
        "checked:some/gpt": "model_type 'gpt2'",
    }
    messages, _ = resolve(*cases)
    for (spec, expected), message in zip(cases.items(), messages, strict=True):
        assert spec.rpartition("/")[2] in message and expected in message
    assert SAFE not in [path for path, _ in hub.sent]


@pytest.mark.slow
def test_hub_out_of_reach_or_disk_full(hub, resolve, tmp_path):
    hub.add(T5, files_of("t5_1_1"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    (full,), _ = resolve(f"hf:{T5}", limit="ulimit -f 20; ")
    assert full.startswith(f"{T5}: the disk of {tmp_path}/cache/hub is full; complete files are kept")
    hub.sent.clear()
    (found, unknown), _ = resolve(f"hf:{T5}", "hf:nobody/nothing", HF_TOKEN="hf_x")
    assert hub.sent == [(SAFE, 0)], "files that were whole are not downloaded again"
    assert "neither a local directory nor a model on the hub, at least with" in unknown
    assert hub.tokens == {"127.0.0.1": {"", "Bearer hf_x"}, "localhost": {""}}, "others get no token"
    (again, lost), said = resolve(f"hf:{T5}", f"hf:{T5}@v1", HF_ENDPOINT=nobody)
    assert again == found
    assert said == f"note: the hub is not available; using the cached copy of {T5} ({found})\n"
    assert lost.startswith(f"{T5}: the hub ({nobody}) cannot be reached (connection refused): try again")
