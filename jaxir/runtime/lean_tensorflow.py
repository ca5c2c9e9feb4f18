"""TensorFlow without its log, and without Keras, which would import pandas, matplotlib and scikit-learn."""

import os
import sys

CHOICE = "TF_USE_LEGACY_KERAS"
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def import_tensorflow() -> None:
    """Imports TensorFlow in less than half of the usual time; to be called before whatever else imports it.

    TensorFlow imports Keras when it starts, unless it is told that there is an older Keras instead, which
    it then does not find. `tf.keras` is the usual one: it is imported when it is first used.

    Of what its C++ libraries write to standard error only what ends the process remains: they log as errors
    that there is no GPU, and what fails is an exception too. JAX has set their level to 1 by then;
    TF_CPP_MIN_LOG_LEVEL=0 shows everything.
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
