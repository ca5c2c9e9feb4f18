"""The sidecar's process, which has only the standard library and pyjnius, not jaxir.

It imports these modules as the package `server` (see `child.py`), so they import each other relatively and
nothing else of jaxir.
"""
