"""The texts and the examples that the service shows, in YAML.

    errors.yaml      the types of errors over HTTP
    ignored.yaml     the fields of requests that change nothing
    operations.yaml  what ``/openapi.json`` says beside the schemas

Each is read once, when the module that has its table is imported. A wrong one stops the import: pydantic's
ValidationError names the place.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import TypeAdapter

T = TypeVar("T")


def load(name: str, form: type[T]) -> T:
    """Return a file of this folder in a form. Its ``shared`` has only what other parts refer to, and is left out."""
    content = (Path(__file__).parent / f"{name}.yaml").read_bytes()
    found = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if isinstance(found, dict):
        found.pop("shared", None)
    return TypeAdapter(form).validate_python(found)
