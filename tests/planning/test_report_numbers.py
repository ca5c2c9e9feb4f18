"""Numbers of a plan: three digits, with the unit chosen after rounding."""

import pytest

from jaxir.planning.plan_report import duration, si


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0 "), (0.5, "0.5 "), (999, "999 "), (1000, "1 k"), (1500, "1.5 k"), (999_400, "999 k")),
        *((999_600, "1 M"), (999.9e9, "1 T"), (1e15, "1 P"), (2.5e21, "2.5e+03 E")),
    ],
)
def test_si_prefixes_follow_rounding(number, text):
    assert si(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.0697, "69.7 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (119.4, "119 s"), (119.7, "2 min")),
        *((7199, "120 min"), (7200, "2.0 h"), (123_456, "34.3 h")),
    ],
)
def test_units_of_time_follow_rounding(seconds, text):
    assert duration(seconds) == text
