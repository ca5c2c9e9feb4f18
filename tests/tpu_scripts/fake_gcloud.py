"""A gcloud that keeps queued resources in a folder, with a home directory for each worker.

FAKE_CLOUD is the folder. The file "calls" gets every argv, one per line. "state" has the queued resource's
state and its next states, one for each describe. `ssh --command` runs the command in each worker's home;
worker N does not answer while a file silentN exists. The folder BUCKET is gs://bucket.

It does not even import pathlib, because it is started hundreds of times.
"""
# ruff: noqa: PTH102, PTH105, PTH107, PTH110, PTH112, PTH119, PTH123

import os
import sys

CLOUD = os.environ["FAKE_CLOUD"]
STATE = f"{CLOUD}/state"
WORKERS = int(os.environ.get("FAKE_WORKERS", "2"))


def fail(verb: str, reason: str):
    print(f"ERROR: (gcloud.compute.tpus.queued-resources.{verb}) {reason}", file=sys.stderr)
    sys.exit(1)


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def put(*states: str) -> None:
    """Writes the state atomically, because a test may read it at any moment."""
    part = f"{STATE}.{os.getpid()}"
    with open(part, "w") as file:
        file.write(" ".join(states))
    os.replace(part, STATE)


def run_in(home: str, command: str) -> int:
    process = os.fork()
    if process == 0:
        os.chdir(home)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvpe("bash", ["bash", "-c", command], os.environ | {"HOME": home})
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main(argv: list[str]) -> int:
    with open(f"{CLOUD}/calls", "a") as file:
        file.write(f"{argv!r}\n")
    if argv[0] == "builds" or argv[:3] == ["container", "clusters", "get-credentials"]:
        return 0
    if argv[:3] == ["container", "clusters", "list"]:
        print("RUNNING" if os.path.exists(f"{CLOUD}/cluster") else "", end="")
        return 0
    if argv[:3] == ["storage", "cp", "--recursive"]:
        return copy_from_bucket(*(a for a in argv[3:] if not a.startswith("--")))
    assert argv[:3] == ["compute", "tpus", "queued-resources"], argv
    verb, rest = argv[3], argv[4:]
    positional = [a for a in rest if not a.startswith("--")]
    flags = dict(a[2:].partition("=")[::2] for a in rest if a.startswith("--"))
    assert {"project", "zone", "quiet"} <= flags.keys(), argv
    if os.path.exists(f"{CLOUD}/fail_{verb}"):
        fail(verb, read(f"{CLOUD}/fail_{verb}"))
    found = read(STATE).split() if os.path.exists(STATE) else []
    if verb == "create":
        if found:
            fail(verb, f"ALREADY_EXISTS: Resource '{positional[0]}' already exists")
        later = os.environ.get("FAKE_STATES", "WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
        put("ACCEPTED", *later.split())
        for home in homes("all"):
            if os.path.exists(home):
                import shutil

                shutil.rmtree(home)
            os.mkdir(home)
        return 0
    if not found:
        name = f"projects/p/locations/z/queuedResources/{positional[0]}"
        fail(verb, f"NOT_FOUND: Resource '{name}' was not found")
    if verb == "describe":
        if len(found) > 1:
            del found[0]
            put(*found)
        if found[0] == "GONE":
            os.remove(STATE)
            fail(verb, "NOT_FOUND: Resource was not found")
        shown = {"value(state.state)": found[0], "yaml(state)": f"state:\n  state: {found[0]}"}
        print(shown[flags["format"]])
    elif verb == "delete":
        if found[0] == "ACTIVE" and "force" not in flags:
            fail(verb, "FAILED_PRECONDITION: it has nodes")
        put("DELETING", "DELETING", "GONE")
    elif found[0] != "ACTIVE":
        fail(verb, f"the queued resource is {found[0]}")
    elif verb == "scp":
        import shutil

        source, target = positional
        for home in homes(flags["worker"]):
            if target.startswith("test-slice:"):
                shutil.copy(source, f"{home}/{target.partition(':')[2]}")
                continue
            source = source.partition(":")[2]
            if not os.path.exists(f"{home}/{source}"):
                print(f"scp: {source}: No such file or directory", file=sys.stderr)
                return 1
            shutil.copy(f"{home}/{source}", target)
    elif os.path.exists(f"{CLOUD}/unreachable"):
        print("WARNING: Could not prepare all 1 nodes, attempting to ssh into the rest.", file=sys.stderr)
    elif verb == "ssh":
        status = 0
        for home in homes(flags["worker"]):
            if os.path.exists(home.replace(f"{CLOUD}/worker", f"{CLOUD}/silent")):
                print("ssh: connect to host: Connection timed out", file=sys.stderr)
                status = 255
                continue
            status = run_in(home, flags["command"]) or status
        return status
    else:
        raise AssertionError(argv)
    return 0


def copy_from_bucket(*places: str) -> int:
    """Copies existing objects, and fails if one is missing, like the real gcloud."""
    import shutil

    status = 0
    for place in places[:-1]:
        source = place.replace("gs://bucket", os.environ["BUCKET"], 1)
        if os.path.isdir(source):
            target = f"{places[-1]}/{os.path.basename(source)}"
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif os.path.exists(source):
            shutil.copy(source, places[-1])
        else:
            problem = f"The following URLs matched no objects: {place}"
            print(f"ERROR: (gcloud.storage.cp) {problem}", file=sys.stderr)
            status = 1
    return status


def homes(worker: str) -> list[str]:
    return [f"{CLOUD}/worker{n}" for n in (range(WORKERS) if worker == "all" else [worker])]


sys.exit(main(sys.argv[2:]))
