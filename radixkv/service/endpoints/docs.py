"""The service's own documentation: ``/docs`` shows ``/openapi.json``, ``/docs/errors`` describes the types of errors.

All files are part of the installation: those in ``pages/``, and Swagger UI from the distribution ``swagger-ui-py``,
whose code is never imported. The pages load nothing from another host, and their Content-Security-Policy forbids it.
Paths in the pages are relative, so the pages also work behind a proxy that adds a prefix. No key is needed, as for
``/openapi.json``: neither page depends on tenants. ``static`` says how they are sent.
"""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path

from starlette.responses import Response

from radixkv.errors import RadixKVError
from radixkv.service.endpoint import Call, Endpoint, Host
from radixkv.service.error_types import ERROR_TYPES, ErrorType, error_classes
from radixkv.service.problems import not_found
from radixkv.service.static import StaticContent

_POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-cache",
}
_CACHED = {"Cache-Control": "public, max-age=3600"}
_HTML = "text/html; charset=utf-8"
_KINDS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_OWN = ("docs.css", "docs.js", "errors.css", "icon.svg")
_SWAGGER = ("swagger-ui.css", "swagger-ui-bundle.js")
_DATA_IMAGE = re.compile(rb'url\((?:"data:(?:\\.|[^"\\])*"|data:[^)]*)\)')
"""Images inside the stylesheet, such as arrows. The policy allows only files of this origin, so they are left out."""


async def docs(call: Call[Host]) -> Response:
    """Show the HTTP interface."""
    return await _docs().answer(call)


async def errors(call: Call[Host]) -> Response:
    """Describe all types of errors."""
    return await _errors().answer(call)


async def asset(call: Call[Host]) -> Response:
    """Send a script, a stylesheet or an image of the pages."""
    name = call.request.path_params["asset"]
    found = _asset(name) if name in (*_OWN, *_SWAGGER) else None
    if found is None:
        raise not_found("path")
    return await found.answer(call)


@cache
def _docs() -> StaticContent:
    return StaticContent(_page("docs.html"), _HTML, _POLICY)


@cache
def _errors() -> StaticContent:
    return StaticContent(errors_page().encode(), _HTML, _POLICY)


def _page(name: str) -> bytes:
    return (Path(__file__).parents[1] / "pages" / name).read_bytes()


@cache
def _asset(name: str) -> StaticContent | None:
    """Return a file; None for one of Swagger UI if it isn't installed (extras ``service``, ``route``)."""
    content = _content(name)
    return None if content is None else StaticContent(content, _KINDS[name.rpartition(".")[2]], _CACHED)


def _content(name: str) -> bytes | None:
    if name in _OWN:
        return _page(name)
    found = find_spec("swagger_ui")
    if found is None or not found.submodule_search_locations:
        return None
    content = (Path(found.submodule_search_locations[0]) / "static" / name).read_bytes()
    return _DATA_IMAGE.sub(b"none", content) if name.endswith(".css") else content


def errors_page() -> str:
    """Return the page of all types of errors as HTML. Each type and each class has an anchor of its name."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>radixkv: errors</title>",
        '<link rel="stylesheet" href="assets/errors.css">',
        '<link rel="icon" href="assets/icon.svg" type="image/svg+xml">',
        '</head><body><nav><a href="../docs">HTTP interface</a> <a href="../openapi.json">openapi.json</a></nav><main>',
        "<h1>Errors</h1>",
        "<p>Every answer that is not a success has one body in this form. Fields that do not apply are null. "
        "<code>type</code> is stable across versions, <code>message</code> is for people and may change. If the "
        "answer has the header <code>Retry-After</code>, the same request may succeed after that many seconds. "
        "A stream that has begun ends with an event of the same form.</p>",
        _example(ERROR_TYPES["validation_error"]),
        "<h2>Types over HTTP</h2>",
        "<p>Work on several replicas gives an error for each replica: the type alone, in <code>error</code> of "
        "<code>replicas</code>. If it failed on all replicas, the answer is 503 with the type, or with "
        "<code>failed</code> if there were several types.</p>",
        *(_type(each) for each in ERROR_TYPES.values()),
        "<h2>Classes in Python</h2>",
        "<p>All errors of the library are in <code>radixkv.errors</code>, under <code>RadixKVError</code>. Each "
        "class has its advice as <code>hint</code>.</p>",
        *(_class(each) for _, each in error_classes()),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _type(each: ErrorType) -> str:
    status = " or ".join(map(str, each.statuses)) or "of a replica's part"
    example = _example(each) if each.example else ""
    return _section(each.type, status, [each.meaning, f"What to do: {each.action}"], example)


def _class(error: type[RadixKVError]) -> str:
    parents = [base.__name__ for base in error.__bases__ if base is not object]
    doc = cleandoc(error.__doc__ or "")
    return _section(error.__name__, ", ".join(parents), [*doc.split("\n\n"), f"What to do: {error.hint}"])


def _section(name: str, note: str, paragraphs: list[str], rest: str = "") -> str:
    text = "".join(f"<p>{_inline(each)}</p>" for each in paragraphs)
    head = f'<h3><a href="#{name}"><code>{name}</code></a> <span class="status">{escape(note)}</span></h3>'
    return f'<section id="{name}">{head}{text}{rest}</section>'


def _inline(text: str) -> str:
    """Return text as HTML; names between backticks are code."""
    return re.sub(r"(`+)(.+?)\1", r"<code>\2</code>", escape(text, quote=False))


def _example(each: ErrorType) -> str:
    return f"<pre>{escape(json.dumps(each.example_body(), indent=2, ensure_ascii=False), quote=False)}</pre>"


ENDPOINTS = (
    Endpoint("GET", "/docs", docs, "The HTTP interface as a page", "anyone", {200: "text/html"}),
    Endpoint("GET", "/docs/errors", errors, "All types of errors as a page", "anyone", {200: "text/html"}),
    Endpoint("GET", "/docs/assets/{asset}", asset, "Files of these pages", "anyone", {200: "text/html"}),
)
"""Pages for people. ``/openapi.json`` doesn't list them."""
