"""An xpk and a kubectl that log their arguments and refuse flags that xpk 1.16.0 does not have.

FAKE_CLOUD is the folder: "calls" gets every argv after the name; "cluster" exists while the cluster does.
"""

import os
import sys
from pathlib import Path

CLOUD = Path(os.environ["FAKE_CLOUD"])
EVERYWHERE = {"cluster", "project", "zone"}
KNOWN = {
    ("cluster", "create"): {"tpu-type", "num-slices", "spot", "on-demand", "reservation"},
    ("cluster", "delete"): {"force", "quiet"},
    ("workload", "create"): {
        *("workload", "tpu-type", "num-slices", "docker-image", "command"),
        *("max-restarts", "restart-on-exit-codes", "termination-grace-period-seconds"),
    },
    ("workload", "list"): {"filter-by-job"},
    ("workload", "delete"): {"workload", "force", "quiet"},
}
KUBECTL = {"selector", "tail", "follow", "prefix", "max-log-requests"}


def main(name: str, argv: list[str]) -> int:
    with (CLOUD / "calls").open("a") as file:
        file.write(f"{[name, *argv]!r}\n")
    flags = {a[2:].partition("=")[0] for a in argv if a.startswith("--")}
    if name == "kubectl":
        assert argv[0] == "logs" and flags <= KUBECTL, argv
        print("step 1")
        return 0
    verb = (argv[0], argv[1])
    if not EVERYWHERE <= flags <= EVERYWHERE | KNOWN[verb]:
        print(f"xpk: error: unrecognized arguments in {argv}", file=sys.stderr)
        return 2
    if verb == ("cluster", "create"):
        (CLOUD / "cluster").touch()
    elif not (CLOUD / "cluster").exists():
        print("[XPK] cluster not found", file=sys.stderr)
        return 1
    elif verb == ("cluster", "delete"):
        (CLOUD / "cluster").unlink()
    return 0


sys.exit(main(sys.argv[1], sys.argv[2:]))
