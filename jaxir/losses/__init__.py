"""Pure functions of arrays: (embeddings, keys) -> (scalar loss, dict of scalar metrics). One file per loss.

Functions have the names of their modules. They are not re-exported here, so that `from jaxir.losses import
samtone` gives the module, in Python and in gin (`@samtone.samtone`).
"""
