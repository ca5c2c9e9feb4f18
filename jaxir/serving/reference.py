"""Renders an OpenAPI description as a self-contained HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
code, pre { font: 0.95em/1.5 ui-monospace, monospace; }
pre { border: 1px solid; overflow-x: auto; padding: 0.5rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border-bottom: 1px solid #8888; padding: 0.2rem 1rem 0.2rem 0; text-align: left; }
"""


def reference_page(openapi: dict[str, Any]) -> str:
    """Returns the page of an OpenAPI 3.1 description: its operations, then their schemas."""
    info = openapi["info"]
    operations = [
        _operation(method, path, operation)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = [_schema(name, s) for name, s in openapi["components"]["schemas"].items()]
    title = _text(f"{info['title']} {info['version']}")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<link rel="icon" href="data:,"><title>{title}</title>',
            f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1>",
            f"<p>{_text(info['description'])}</p>",
            '<p><a href="/">Search</a>, <a href="/openapi.json">openapi.json</a></p>',
            *operations,
            "<h2>Schemas</h2>",
            *schemas,
            "</main></body></html>",
        ]
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    statuses = []
    for status, response in sorted(operation["responses"].items()):
        ((kind, content),) = response["content"].items()
        returns = _type(content["schema"]) if kind == "application/json" else _text(kind)
        statuses.append((status, returns, _text(response["description"])))
    parameters = [
        (f"<code>{_text(each['name'])}</code>", _type(each["schema"]), _text(_notes(each)))
        for each in operation.get("parameters", ())
    ]
    parts = [
        f"<h2><code>{method.upper()} {_text(path)}</code></h2>",
        _paragraph(operation.get("description")),
        f"<p>Takes {_type(body)} as JSON.</p>" if body is not None else "",
        _table(("parameter", "type", ""), parameters) if parameters else "",
        _table(("status", "returns", ""), statuses),
    ]
    return "\n".join(parts)


def _notes(parameter: dict[str, Any]) -> str:
    notes = [f"in the {parameter['in']}", parameter.get("description", "")]
    return "; ".join(filter(None, notes)) + _bounds(parameter["schema"])


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = []
    for field, facts in schema.get("properties", {}).items():
        default = "" if field in required else f" (default: {json.dumps(facts.get('default'))})"
        notes = facts.get("description", "") + _bounds(facts) + default
        rows.append((f"<code>{_text(field)}</code>", _type(facts), _text(notes)))
    examples = "".join(f"<pre>{_text(json.dumps(e))}</pre>" for e in schema.get("examples", []))
    head = f'<h3 id="{_text(name)}">{_text(name)}</h3>{_paragraph(schema.get("description"))}'
    return f"{head}{_table(('field', 'type', ''), rows)}{examples}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of HTML cells."""
    lines = [[f"<th>{name}</th>" for name in header], *([f"<td>{cell}</td>" for cell in row] for row in rows)]
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f"<table>{body}</table>"


def _bounds(schema: dict[str, Any]) -> str:
    words = {"minimum": "from", "maximum": "up to", "minItems": "at least", "maxItems": "at most"}
    words["maxLength"] = "characters at most"
    of_items = schema.get("items", {})
    bounds = [f"{word} {schema[key]:,}" for key, word in words.items() if key in schema]
    bounds += [f"each {words['maxLength']} {of_items['maxLength']:,}"] if "maxLength" in of_items else []
    return f" ({', '.join(bounds)})" if bounds else ""


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return _text(" or ".join(json.dumps(value) for value in schema["enum"]))
    if "const" in schema:
        return _text(json.dumps(schema["const"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return _text(schema.get("type", ""))


def _paragraph(text: str | None) -> str:
    return f"<p>{_text(text)}</p>" if text else ""


def _text(text: str) -> str:
    return html.escape(text)
