"""Directories in a bucket that one process works in at a time, by an object that it renews.

The object is made, and renewed, only if nobody else has written it meanwhile (Cloud Storage's preconditions).
One that has not been renewed for a while is taken over: a crash leaves nothing behind that somebody must
remove. No clocks are compared: who wants the lease watches it.
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
RENEWED_EVERY = 15.0  # seconds
STALE_AFTER = 60.0  # seconds without renewal
ATTEMPTS = 30.0  # seconds that one request may take, with all its attempts


class _Found(NamedTuple):
    """A lease in a bucket: the number of its last write, and what it says."""

    generation: int
    content: dict[str, Any]

    def __str__(self) -> str:
        host, process, since = (self.content.get(k, "?") for k in ("host", "process", "since"))
        return f"{host}, process {process}, since {since}"


class Lease:
    """A lease on a directory in a bucket, held from `__enter__` on and renewed by a thread.

    Args:
      directory: from `files.path_of`.
      doing: what a process does there, as "trains in".
    """

    def __init__(self, directory: Path, doing: str):
        check_bucket(directory, writing=True)
        from google.cloud import storage
        from google.cloud.storage.retry import DEFAULT_RETRY  # api_core's own knows no failed upload

        self._directory, self._doing = directory, doing
        bucket, _, prefix = str(directory).removeprefix("gs://").partition("/")
        self._bucket = storage.Client().bucket(bucket)
        self._name = f"{prefix.rstrip('/')}/{LEASE}".lstrip("/")
        self._how = {"timeout": ATTEMPTS / 2, "retry": DEFAULT_RETRY.with_timeout(ATTEMPTS)}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._about = {"host": socket.gethostname(), "process": os.getpid(), "since": now}
        self._about["token"] = secrets.token_hex(16)
        self._generation, self._renewed, self._lost = 0, 0.0, ""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        """Takes the lease; where there is one, watches whether it is renewed.

        Raises:
          UserError: another process renews it, or the bucket does not let it be written.
        """
        try:
            if not self._write(0):
                self._take_over()
        except (UserError, KeyboardInterrupt):
            raise
        except Exception as error:  # of google.api_core, requests, google.auth
            raise UserError(
                f"{self._directory} could not be leased, so nothing is done there ({error!s:.160})"
            ) from error
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()
        if not self._lost:
            with contextlib.suppress(Exception):  # of google.api_core, requests; it goes stale
                self._bucket.blob(self._name).delete(if_generation_match=self._generation, **self._how)

    def check(self) -> None:
        """Checks that the lease is still held; call before something is written that another might destroy.

        Raises:
          UserError: another process has taken it over, or whether it is held cannot be told.
        """
        if not self._lost and time.monotonic() - self._renewed > STALE_AFTER / 2:
            try:
                self._renew()
            except Exception as error:  # of google.api_core, requests, google.auth
                raise UserError(
                    f"the lease on {self._directory} could not be renewed ({error!s:.160}); run the same"
                    " command again to resume"
                ) from error
        if self._lost:
            raise UserError(
                f"another process {self._doing} {self._directory} now ({self._lost}); this one ends"
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
                    " that process still lives",
                    file=sys.stderr,
                )
            elif found.generation != watched.generation:
                raise UserError(f"another process {self._doing} {self._directory} ({found})")
            elif time.monotonic() - begin > STALE_AFTER and self._write(watched.generation):
                print(f"that process is gone; {self._directory} is taken over", file=sys.stderr)
                return
            time.sleep(RENEWED_EVERY / 10)

    def _keep(self) -> None:
        while not self._lost and not self._ended.wait(RENEWED_EVERY):
            with contextlib.suppress(Exception):  # tried again; `check` tells if it goes on
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if not self._write(self._generation):
                found = self._read()
                self._lost = str(found) if found else "it has come and gone"

    def _write(self, generation: int) -> bool:
        """Writes the lease if its last write was this one (0: if there is none); tells if it is ours."""
        from google.api_core.exceptions import PreconditionFailed

        begin, blob = time.monotonic(), self._bucket.blob(self._name)
        try:
            blob.upload_from_string(json.dumps(self._about), if_generation_match=generation, **self._how)
            self._generation, self._renewed = blob.generation, begin
        except PreconditionFailed:
            found = self._read()
            if found is None or found.content.get("token") != self._about["token"]:
                return False
            self._generation, self._renewed = found.generation, begin  # only the answer was lost
        return True

    def _read(self) -> _Found | None:
        from google.api_core.exceptions import NotFound

        try:
            blob = self._bucket.get_blob(self._name, **self._how)
            if blob is None:
                return None
            content = json.loads(blob.download_as_bytes(**self._how))
        except NotFound:  # it is being renewed
            return self._read()
        except ValueError:
            content = {}
        return _Found(blob.generation, content if isinstance(content, dict) else {})
