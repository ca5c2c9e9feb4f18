"""The sidecar's process. It runs where jaxir is not installed: only the standard library and pyjnius.

These modules are imported as the package `server` there (see `client.Sidecar`), and `protocol` as
`jaxir.sidecar.server.protocol` by the client; so they import each other relatively, and
nothing else of jaxir.
"""
