"""Which extra brings which libraries, and one line for an installation that lacks them.

A package or module that needs an extra calls ``require`` first, so that it says which extra it needs instead of which
of several libraries it missed. Looking costs some 0.1 ms a library, once at import, and imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

_TOKENIZER = ("jinja2", "sentencepiece", "tokenizers")
_STORAGE = ("torch",)
_HF = (*_STORAGE, "transformers", "safetensors")
_HTTP = (*_TOKENIZER, "httpx", "prometheus_client", "pydantic", "starlette", "uvicorn")

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "storage": _STORAGE,
    "hf": _HF,
    "tokenizer": _TOKENIZER,
    "redis": ("redis",),
    "http": _HTTP,
    "service": (*_HF, *_HTTP),
    "route": (*_HTTP, "redis"),
    "audit": ("httpx", "hypothesis", "scipy"),
    "bench": ("matplotlib", "plotly"),
}
"""Modules that an extra of ``pyproject.toml`` brings. Triton is left out: only Linux has it."""


class MissingExtra(ModuleNotFoundError):
    """A part of radixkv needs an extra that isn't installed. ``extra`` is its name, ``name`` that of a module of it."""

    def __init__(self, what: str, extra: str, library: str) -> None:
        self.extra = extra
        super().__init__(f"{what} {needs(extra)} (no module named {library!r})", name=library)


def needs(extra: str) -> str:
    """What to say of a part that needs an extra, after the name of that part."""
    return f"needs the extra '{extra}': pip install 'radixkv[{extra}]'"


def require(what: str, extra: str) -> None:
    """Raise MissingExtra unless the libraries of an extra are installed; ``what`` needs them."""
    for library in LIBRARIES[extra]:
        if find_spec(library) is None:
            raise MissingExtra(what, extra, library)
