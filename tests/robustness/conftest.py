"""The run of tests/training that many tests copy."""

from tests.training.conftest import stopped  # noqa: F401
