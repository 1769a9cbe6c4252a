"""Values from JSON documents that anyone may have written, checked before they are used.

Each error names the key, and shows the value cut (`euler_ir.errors.shown`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from euler_ir.errors import EulerError, shown

LARGEST = 2**31 - 1  # of counts: more than anybody counts here


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object that a text is; EulerError where it is none."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: of a number of 5000 digits, too
        raise EulerError(f"not a JSON document: {error}") from None
    if not isinstance(document, dict):
        raise EulerError(f"not a JSON object: {shown(document)}")
    return document


def check_keys(what: str, values: object, kind: type) -> None:
    """Raise EulerError unless the value is an object with the fields of a dataclass; those that
    have a default may be missing."""
    if not isinstance(values, Mapping):
        raise EulerError(f"{what} must be an object, got {shown(values)}")
    names = {f.name for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING}
    for wrong, keys in (("unknown", set(values) - names), ("missing", required - set(values))):
        if keys:
            listed = ", ".join(shown(key) for key in sorted(keys)[:5])
            raise EulerError(f"{what} has {wrong} keys: {listed}")


def field(parent: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a key that must be there, of exactly this Python type."""
    value = parent.get(name)
    if type(value) is not kind:
        raise EulerError(f"{name} must be of JSON type {kind.__name__}, not {type(value).__name__}")
    return value


def whole_number(parent: Mapping[str, Any], name: str, least: int = 0, most: int = LARGEST) -> int:
    """The value of a key that must be there, a whole number in this range."""
    value = field(parent, name, int)
    if not least <= value <= most:
        raise EulerError(f"{name} must be from {least} to {most}, got {shown(value)}")
    return value


def check_whole(what: str, value: object, least: int, most: int = LARGEST) -> None:
    """Raise EulerError unless the value is a whole number in this range."""
    if type(value) is not int or not least <= value <= most:
        raise EulerError(f"{what} must be a whole number from {least} to {most}, "
                         f"got {shown(value)}")


def is_number(value: object) -> bool:
    """Whether the value is a number, and one that a float can hold."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False


def is_positive_number(value: object) -> bool:
    return is_number(value) and value > 0
