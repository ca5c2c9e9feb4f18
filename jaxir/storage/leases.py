"""Leases let one process at a time work in a directory of a bucket. It writes and renews the object LEASE.

The object is written only if no other process has written it meanwhile (Cloud Storage's preconditions).
A lease that is not renewed for `STALE_AFTER` seconds is taken over, so a crash blocks nobody for long.
Clocks of machines are not compared: a waiting process watches the object's generation.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from jaxir.core.errors import UserError
from jaxir.storage.files import check_bucket

LEASE = "LEASE"
RENEWED_EVERY = 15.0  # seconds between two renewals of a lease
STALE_AFTER = 60.0  # seconds without renewal after which another process may take over a lease
ATTEMPTS = 30.0  # time limit of a request in seconds, retries included


class _Found(NamedTuple):
    """A lease read from a bucket: its object's generation, which each write changes, and its JSON."""

    generation: int
    content: dict[str, Any]

    def __str__(self) -> str:
        host, process, since = (self.content.get(k, "?") for k in ("host", "process", "since"))
        return f"{host}, process {process}, since {since}"


class Lease:
    """A lease on a directory in a bucket, held while the context is active and renewed by a thread.

    Args:
      directory: a path in a bucket from `files.path_of`.
      doing: what the process does there, for error messages, such as "trains in".
    """

    def __init__(self, directory: Path, doing: str):
        check_bucket(directory, writing=True)
        from google.cloud import storage
        from google.cloud.storage.retry import DEFAULT_RETRY  # the default of api_core does not retry uploads

        self._directory, self._doing = directory, doing
        bucket, _, prefix = str(directory).removeprefix("gs://").partition("/")
        self._bucket = storage.Client().bucket(bucket)
        self._name = f"{prefix.rstrip('/')}/{LEASE}".lstrip("/")
        self._how = {"timeout": ATTEMPTS / 2, "retry": DEFAULT_RETRY.with_timeout(ATTEMPTS)}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._content = {"host": socket.gethostname(), "process": os.getpid(), "since": now}
        self._content["token"] = secrets.token_hex(16)
        self._generation, self._renewed, self._lost = 0, 0.0, ""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        """Takes the lease; if another process holds it, watches whether that process renews it."""
        try:
            if not self._write(0):
                self._take_over()
        except UserError:
            raise
        except Exception as error:  # the libraries' errors have no common class
            raise UserError(
                f"{self._directory} could not be leased, so nothing was written ({error!s:.160}); try again"
            ) from error
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()
        if not self._lost:
            with contextlib.suppress(Exception):  # A lease that is not deleted goes stale.
                self._bucket.blob(self._name).delete(if_generation_match=self._generation, **self._how)

    def check(self) -> None:
        """Raises a UserError if the lease is lost or cannot be renewed; call it before each output."""
        if not self._lost and time.monotonic() - self._renewed > STALE_AFTER / 2:
            try:
                self._renew()
            except Exception as error:
                raise UserError(
                    f"the lease on {self._directory} could not be renewed ({error!s:.160}); run the same"
                    " command again to resume"
                ) from error
        if self._lost:
            raise UserError(
                f"this process no longer {self._doing} {self._directory}: another process took over its lease"
                f" ({self._lost}); this process ends"
            )

    def _take_over(self) -> None:
        watched, begin = None, time.monotonic()
        while True:
            found = self._read()
            if found is None:
                if self._write(0):
                    return
            elif watched is None:
                watched, begin = found, time.monotonic()
                print(
                    f"{self._directory} is leased ({found}): waiting up to {STALE_AFTER:.0f} s to see whether"
                    " that process still renews the lease",
                    file=sys.stderr,
                )
            elif found.generation != watched.generation:
                raise UserError(
                    f"another process {self._doing} {self._directory} ({found}); wait until it ends"
                )
            elif time.monotonic() - begin > STALE_AFTER and self._write(watched.generation):
                print(f"its lease is stale: this process takes over {self._directory}", file=sys.stderr)
                return
            time.sleep(RENEWED_EVERY / 10)

    def _keep(self) -> None:
        while not self._lost and not self._ended.wait(RENEWED_EVERY):
            with contextlib.suppress(Exception):  # This thread tries again; `check` reports lasting failures.
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if not self._write(self._generation):
                found = self._read()
                self._lost = str(found) if found else "that process has already released the lease"

    def _write(self, generation: int) -> bool:
        """Writes the lease if its object has this `generation` (0: none); returns whether it is held."""
        from google.api_core.exceptions import PreconditionFailed

        begin, blob = time.monotonic(), self._bucket.blob(self._name)
        try:
            blob.upload_from_string(json.dumps(self._content), if_generation_match=generation, **self._how)
            self._generation, self._renewed = blob.generation, begin
        except PreconditionFailed:
            found = self._read()
            if found is None or found.content.get("token") != self._content["token"]:
                return False
            # The upload had succeeded and its response was lost, so its retry failed.
            self._generation, self._renewed = found.generation, begin
        return True

    def _read(self) -> _Found | None:
        from google.api_core.exceptions import NotFound

        blob = self._bucket.get_blob(self._name, **self._how)
        if blob is None:
            return None
        try:
            return _Found(blob.generation, json.loads(blob.download_as_bytes(**self._how)))
        except NotFound:  # Another process replaced this generation of the lease meanwhile.
            return self._read()
