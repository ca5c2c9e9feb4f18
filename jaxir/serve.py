"""Command: serves indexes over HTTP, with a page to search them."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Literal

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install
from jaxir.core.values import Count, Within, check_idle
from jaxir.serving.limits import Limits


def serve(
    index: list[str],
    host: str = "127.0.0.1",
    port: Annotated[int, Within(0, 65535)] = 8080,
    allowed_hosts: list[str] | None = None,
    model: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    limits: Limits | None = None,
    reranker: str | None = None,
    rerank_depth: Count = 50,
    access_log: str | None = None,
) -> None:
    """Serves indexes over HTTP: a page to search them, and an API that /docs describes.

    Several indexes are also searched as one hybrid (reciprocal rank fusion). The server shuts down cleanly
    on SIGTERM or Ctrl-C. It has no password and no encryption: anyone who reaches the address can search.

    Args:
      index: index directories, each as DIR or NAME=DIR; repeat the flag or separate them by commas.
      host: the address to listen on; by default only this machine can reach it.
      port: the port; 0 takes a free port.
      allowed_hosts: names by which clients and proxies may call the service (the Host header), besides its IP
        addresses and localhost: NAME, *.DOMAIN, or * for every name. Repeat the flag or separate them by
        commas.
      model: the model that encodes queries (default: the one recorded in each index).
      dtype: type of the model's matrix products.
      limits: limits on requests (`jaxir.serving.limits.Limits`).
      reranker: a cross-encoder (a jaxir run or model directory, hf: or st:) that reranks the results of the
        hybrid, or of the only index; its results are the system "reranked".
      rerank_depth: documents reranked per question.
      access_log: a file to which a line is added for each request (default: standard error): time, client,
        method, path, status, milliseconds. Questions are not written.
    """
    if reranker is None:
        check_idle(serve, "--reranker", rerank_depth=rerank_depth)
    try:
        from jaxir.serving import app, metrics, server
        from jaxir.serving.access_log import AccessLog, RequestLog
        from jaxir.serving.guard import Guard, Hosts
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is needed to serve; run: {how_to_install('serve')}") from error
    from jaxir.serving.service import Service

    hosts = Hosts(allowed_hosts or [], host)
    with (
        server.listen(host, port) as listener,
        contextlib.closing(AccessLog(access_log)) as log,
    ):
        print(f"loading {', '.join(index)}", file=sys.stderr, flush=True)
        service = Service.open(
            index,
            model=model,
            dtype=dtype,
            limits=limits,
            reranker=reranker,
            rerank_depth=rerank_depth,
        )

        def report_start() -> None:
            for line in service.truncated():
                print(line, file=sys.stderr, flush=True)
            print(f"serving on {server.url_of(listener)}", flush=True)
            if not server.is_loopback(listener):
                unnamed = "" if allowed_hosts else "; to call it by a host name, give --allowed_hosts"
                print(f"anyone who reaches this address can search{unnamed}", file=sys.stderr, flush=True)

        counted = metrics.Metrics(service)
        built = app.build_app(service, counted)
        guarded = Guard(built, limits=service.limits, hosts=hosts)
        server.run(RequestLog(guarded, counted, log), listener, report_start)


if __name__ == "__main__":
    cli.start("jaxir.serve:serve", "--index=dense=index --index=bm25=lucene_index")
