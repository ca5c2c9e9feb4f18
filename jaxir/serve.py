"""Command: serves indexes over HTTP, with a page to search them."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from jaxir import cli
from jaxir.core.choices import check_idle
from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install
from jaxir.core.values import Count, Within
from jaxir.serving.limits import Limits

if TYPE_CHECKING:
    from jaxir.serving.service import Service


def serve(
    index: list[str] | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Within(0, 65535)] = 8080,
    allowed_hosts: list[str] | None = None,
    api_key: list[str] | None = None,
    model: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "float32",
    weights: Literal["int8", "nf4"] | None = None,
    limits: Limits | None = None,
    reranker: str | None = None,
    rerank_depth: Count = 50,
    access_log: str | None = None,
) -> None:
    """Serves models and indexes over HTTP: embeddings, reranking, search, and a page to search.

    The paths are those of OpenAI's API (/v1/embeddings), text-embeddings-inference (/embed, /rerank), Cohere
    and Jina (/v1/rerank), and jaxir's own (/search); /docs describes them. Several indexes are also searched
    as one hybrid (reciprocal rank fusion). The server shuts down cleanly on SIGTERM or Ctrl-C. It has no
    encryption, and without --api_key anyone who reaches the address can use it.

    Args:
      index: index directories to search, each as DIR or NAME=DIR; repeat the flag or separate them by commas.
      host: the address to listen on; by default only this machine can reach it.
      port: the port; 0 takes a free port.
      allowed_hosts: names by which clients and proxies may call the service (the Host header), besides its IP
        addresses and localhost: NAME, *.DOMAIN, or * for every name. Repeat the flag or separate them by
        commas.
      api_key: keys of which a request needs one, as "Authorization: Bearer KEY". Better set JAXIR_API_KEY,
        because other users of this machine can read flags. Repeat the flag or separate keys by commas.
      model: the model that embeds texts and encodes queries (default: the one recorded in each index).
      dtype: type of the model's matrix products; auto: bfloat16 on a CPU that multiplies it natively.
      weights: keep the model's weights in int8 or nf4 (default: as for each index's documents).
      limits: limits on requests (`jaxir.serving.limits.Limits`).
      reranker: a cross-encoder (a jaxir run or model directory, hf: or st:) for /rerank. It also reranks the
        results of the hybrid, or of the only index, as the system "reranked".
      rerank_depth: documents reranked per question.
      access_log: a file to which a line is added for each request (default: standard error): time, client,
        method, path, status, milliseconds. Questions are not written.
    """
    if reranker is None:
        check_idle(serve, "--reranker", rerank_depth=rerank_depth)
    with _garbage_kept():
        try:
            from jaxir.serving import app, metrics, server
            from jaxir.serving.access_log import AccessLog, RequestLog
            from jaxir.serving.guard import Guard, Hosts
        except ModuleNotFoundError as error:
            raise UserError(f"{error.name} is needed to serve; run: {how_to_install('serve')}") from error
        from jaxir.serving.service import Service

        hosts, keys = Hosts(allowed_hosts or [], host), _keys(api_key)
        with (
            server.listen(host, port) as listener,
            contextlib.closing(AccessLog(access_log)) as log,
        ):
            loaded = [*(index or []), *filter(None, [model, reranker])]
            print(f"loading {', '.join(loaded) or 'nothing'}", file=sys.stderr, flush=True)
            service = Service.open(
                index or [],
                model=model,
                dtype=dtype,
                weights=weights,
                limits=limits,
                reranker=reranker,
                rerank_depth=rerank_depth,
            )

            counted = metrics.Metrics(service)
            built = app.build_app(service, counted)
            guarded = Guard(built, limits=service.limits, hosts=hosts, keys=keys)
            who = "who has the API key" if keys else "who reaches this address"
            unnamed = "" if allowed_hosts else "; to call it by a host name, give --allowed_hosts"
            warning = None if server.is_loopback(listener) else f"anyone {who} can use the service{unnamed}"
            report = functools.partial(_report_start, service, server.url_of(listener), warning)
            server.run(RequestLog(guarded, counted, log), listener, report)


def _report_start(service: Service, url: str, warning: str | None) -> None:
    gc.freeze()
    gc.enable()
    for line in service.truncated():
        print(line, file=sys.stderr, flush=True)
    print(f"serving on {url}", flush=True)
    if warning:
        print(warning, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Turns garbage collection off during the start, whose objects live as long as the server."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _keys(flag: list[str] | None) -> list[str]:
    """Returns the API keys of the flag, or else those of the environment variable."""
    keys = (
        flag if flag is not None else [key for key in os.environ.get("JAXIR_API_KEY", "").split(",") if key]
    )
    for key in keys:
        if not key.isascii() or not key.isprintable() or key != key.strip() or not key:
            raise UserError("--api_key must be printable ASCII characters without blanks at the ends")
    return keys


if __name__ == "__main__":
    cli.start("jaxir.serve:serve", "--index=dense=index --index=bm25=lucene_index")
