"""Pure functions that map arrays (embeddings, keys) to a scalar loss and a dict of scalar metrics.

Functions have the names of their modules. They are not re-exported here, so that `from jaxir.losses import
samtone` gives the module, in Python and in gin (`@samtone.samtone`).
"""
