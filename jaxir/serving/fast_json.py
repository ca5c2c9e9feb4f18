"""Writes JSON answers that contain vectors."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response


class FastJson(Response):
    """A JSON answer. float32 arrays are written with as few digits as identify each number."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
