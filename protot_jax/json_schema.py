"""The pieces that the reports' JSON Schemas (draft 2020-12) are made of."""

from collections.abc import Mapping
from typing import Any

DRAFT = "https://json-schema.org/draft/2020-12/schema"
NUMBER = {"type": "number"}
MAYBE = {"type": ["number", "null"]}
COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
TRUTH = {"type": "boolean"}


def closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    """An object with these fields, all of them, and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """A list of any length of such items."""
    return {"type": "array", "items": dict(item)}


def or_null(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item, or null."""
    return {"anyOf": [dict(item), {"type": "null"}]}
