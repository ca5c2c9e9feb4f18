"""Pure functions of arrays: (embeddings, keys) -> (scalar loss, dict of scalar metrics). One file per loss.

The functions have their modules' names and are not re-exported here: `from jaxir.losses import samtone` gives
the module, to gin (`@samtone.samtone`) as to Python.
"""
