"""The code of the sidecar's process, which has only the standard library and pyjnius, not jaxir.

The process imports these modules as the package `server` (see `child.py`). Therefore they only import each
other, by relative imports, and no other module of jaxir.
"""
