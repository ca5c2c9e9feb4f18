"""TensorFlow without Keras, which it would import, and pandas, matplotlib and scikit-learn with it."""

import os
import sys

CHOICE = "TF_USE_LEGACY_KERAS"


def import_tensorflow() -> None:
    """Imports TensorFlow in less than half of the usual time; to be called before whatever else imports it.

    TensorFlow imports Keras when it starts, unless it is told that there is an older Keras instead, which
    it then does not find. `tf.keras` is the usual one: it is imported when it is first used.
    """
    if "tensorflow" in sys.modules or "keras" in sys.modules or CHOICE in os.environ:
        return
    os.environ[CHOICE] = "1"
    try:
        import tensorflow  # noqa: F401
    finally:
        del os.environ[CHOICE]
