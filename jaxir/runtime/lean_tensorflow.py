"""Imports TensorFlow without its log and without Keras, which imports pandas, matplotlib and scikit-learn."""

import os
import sys

CHOICE = "TF_USE_LEGACY_KERAS"
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def import_tensorflow() -> None:
    """Imports TensorFlow in less than half of the usual time; call before any other import of it.

    TensorFlow imports Keras at start, unless TF_USE_LEGACY_KERAS requests an older Keras, which is not
    installed. `tf.keras` still works: it is imported on first use.

    Messages of TensorFlow's C++ libraries are hidden unless they end the process, since they report a missing
    GPU as an error. TF_CPP_MIN_LOG_LEVEL=0 shows everything.
    """
    if "tensorflow" in sys.modules:
        return
    if os.environ.get(LOG_LEVEL) != "0":
        os.environ[LOG_LEVEL] = "3"
    if "keras" in sys.modules or CHOICE in os.environ:
        return
    os.environ[CHOICE] = "1"
    try:
        import tensorflow  # noqa: F401
    finally:
        del os.environ[CHOICE]
