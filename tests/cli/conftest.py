import gin
import pytest


@pytest.fixture(autouse=True)
def forget_gin():
    yield
    gin.clear_config()
