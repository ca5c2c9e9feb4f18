"""A gcloud that keeps queued resources in a folder, with a home directory for each worker.

FAKE_CLOUD is the folder. calls.jsonl gets every argv. state.json is the queued resource; "next" holds the
states it takes on, one at each describe. `ssh --command` runs the command in each worker's home; worker N
does not answer while there is a file silentN. The folder BUCKET is gs://bucket.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CLOUD = Path(os.environ["FAKE_CLOUD"])
STATE = CLOUD / "state.json"
WORKERS = int(os.environ.get("FAKE_WORKERS", "2"))


def fail(verb: str, reason: str):
    print(f"ERROR: (gcloud.compute.tpus.queued-resources.{verb}) {reason}", file=sys.stderr)
    sys.exit(1)


def load() -> dict | None:
    return json.loads(STATE.read_text()) if STATE.exists() else None


def put(found: dict) -> None:
    """Writes the state at once: a test may read it at any moment."""
    part = STATE.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(found))
    part.replace(STATE)


def main(argv: list[str]) -> int:
    with (CLOUD / "calls.jsonl").open("a") as file:
        file.write(json.dumps(argv) + "\n")
    if argv[0] == "builds" or argv[:3] == ["container", "clusters", "get-credentials"]:
        return 0
    if argv[:3] == ["container", "clusters", "list"]:
        print("RUNNING" if (CLOUD / "cluster").exists() else "", end="")
        return 0
    if argv[:3] == ["storage", "cp", "--recursive"]:
        return copy_from_bucket(*(a for a in argv[3:] if not a.startswith("--")))
    assert argv[:3] == ["compute", "tpus", "queued-resources"], argv
    verb, rest = argv[3], argv[4:]
    positional = [a for a in rest if not a.startswith("--")]
    flags = dict(a[2:].partition("=")[::2] for a in rest if a.startswith("--"))
    assert {"project", "zone", "quiet"} <= flags.keys(), argv
    if (CLOUD / f"fail_{verb}").exists():
        fail(verb, (CLOUD / f"fail_{verb}").read_text())
    found = load()
    if verb == "create":
        if found:
            fail(verb, f"ALREADY_EXISTS: Resource '{positional[0]}' already exists")
        later = json.loads(
            os.environ.get("FAKE_STATES", '["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]')
        )
        put({"state": "ACCEPTED", "next": later})
        for worker in range(WORKERS):
            shutil.rmtree(CLOUD / f"worker{worker}", ignore_errors=True)
            (CLOUD / f"worker{worker}").mkdir()
        return 0
    if not found:
        fail(
            verb,
            f"NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/{positional[0]}' was not found",
        )
    if verb == "describe":
        if found["next"]:
            found["state"] = found["next"].pop(0)
            put(found)
        if found["state"] == "GONE":
            STATE.unlink()
            fail(verb, "NOT_FOUND: Resource was not found")
        shown = {"value(state.state)": found["state"], "yaml(state)": f"state:\n  state: {found['state']}"}
        print(shown[flags["format"]])
    elif verb == "delete":
        if found["state"] == "ACTIVE" and "force" not in flags:
            fail(verb, "FAILED_PRECONDITION: it has nodes")
        put({"state": "DELETING", "next": ["DELETING", "GONE"]})
    elif found["state"] != "ACTIVE":
        fail(verb, f"the queued resource is {found['state']}")
    elif verb == "scp":
        source, target = positional
        for home in homes(flags["worker"]):
            if target.startswith("test-slice:"):
                shutil.copy(source, home / target.partition(":")[2])
            elif not (home / source.partition(":")[2]).exists():
                print(f"scp: {source.partition(':')[2]}: No such file or directory", file=sys.stderr)
                return 1
            else:
                shutil.copy(home / source.partition(":")[2], target)
    elif (CLOUD / "unreachable").exists():
        print("WARNING: Could not prepare all 1 nodes, attempting to ssh into the rest.", file=sys.stderr)
    elif verb == "ssh":
        status = 0
        for home in homes(flags["worker"]):
            if (CLOUD / home.name.replace("worker", "silent")).exists():
                print("ssh: connect to host: Connection timed out", file=sys.stderr)
                status = 255
                continue
            environment = os.environ | {"HOME": str(home)}
            done = subprocess.run(
                ["bash", "-c", flags["command"]], cwd=home, env=environment, stdin=subprocess.DEVNULL
            )
            status = status or done.returncode
        return status
    else:
        raise AssertionError(argv)
    return 0


def copy_from_bucket(*places: str) -> int:
    """Copies as the real one does: those that are there, with an error where one is not."""
    status = 0
    for place in places[:-1]:
        source = Path(os.environ["BUCKET"]) / place.removeprefix("gs://bucket/")
        if source.is_dir():
            shutil.copytree(source, Path(places[-1]) / source.name, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy(source, places[-1])
        else:
            print(
                f"ERROR: (gcloud.storage.cp) The following URLs matched no objects: {place}", file=sys.stderr
            )
            status = 1
    return status


def homes(worker: str) -> list[Path]:
    return [CLOUD / f"worker{n}" for n in (range(WORKERS) if worker == "all" else [int(worker)])]


sys.exit(main(sys.argv[2:]))
