"""ScaNN uses the CPU's AVX2, which its wheel does not detect."""

import ctypes

import pytest

from jaxir.retrieval.indexes.scann_index import _scann
from jaxir.retrieval.indexes.scann_instructions import SWITCH, use_avx2
from jaxir.runtime import cpu


@pytest.fixture
def switch() -> ctypes.c_bool:
    """ScaNN's own variable, which is restored after a test."""
    _scann()
    import scann_pybind

    variable = ctypes.c_bool.in_dll(ctypes.CDLL(scann_pybind.__file__), SWITCH)
    before = variable.value
    yield variable
    variable.value = before


def test_scann_uses_avx2_if_the_cpu_has_it(switch):
    assert switch.value == cpu.has_avx2()


def test_avx2_stays_off_on_a_cpu_without_it(tmp_path, monkeypatch, switch):
    old = tmp_path / "cpuinfo"
    old.write_text("flags\t\t: fpu sse4_2 avx f16c\n")
    switch.value = False
    monkeypatch.setattr(cpu, "_CPU_INFO", old)
    use_avx2.__wrapped__()
    assert not switch.value
    monkeypatch.setattr(cpu, "_CPU_INFO", tmp_path / "missing")
    use_avx2.__wrapped__()
    assert not switch.value
