"""Lets ScaNN use AVX2, which its wheels never do by themselves.

ScaNN chooses between SSE4, AVX2 and AVX-512 at run time, but in the wheel of 1.4.2 the function that tests
the CPU always returns false (findings/scann_wheel_never_uses_avx2.sh). With AVX2 a batch of queries takes .7
of the CPU time. AVX-512 gains little more; it stays off, because issue 1338 of google-research reports wrong
distances with it.
"""

import contextlib
import ctypes
import functools

from jaxir.runtime.cpu import has_avx2

SWITCH = "_ZN14research_scann14flags_internal15should_use_avx2E"  # research_scann::flags_internal::...


@functools.cache
def use_avx2() -> None:
    """Switches ScaNN's AVX2 functions on if the CPU has AVX2; call after ScaNN's import, before any use."""
    import scann_pybind  # on ScaNN's own path

    if has_avx2():
        with contextlib.suppress(OSError, ValueError):  # another version without the switch
            ctypes.c_bool.in_dll(ctypes.CDLL(scann_pybind.__file__), SWITCH).value = True
