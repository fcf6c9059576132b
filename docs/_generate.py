"""The pages of the site that are made of the code: references, examples, and the documents outside of ``docs/``.

``pages()`` returns them by their path in the site. ``_hooks.py`` adds them to a build. They aren't in git, so they
can't differ from the code. In the repository, ``docs/reference`` has short pages in their places, so that links lead
somewhere.

    reference/api/*.md       directives for mkdocstrings, one for each name in ``__all__`` of a public package
    reference/http.md        the OpenAPI document of the service
    reference/commands.md    the commands of click
    reference/settings.md    the settings of `radixkv serve` and `radixkv route`
    reference/metrics.md     the registries that ``/metrics`` exports
    reference/errors.md      ``radixkv/errors.py``, and the types of errors over HTTP
    reference/ignored.md     the table of fields that change nothing
    reference/clients.md     the recorded conversations of ``tests/agents``
    recipes/examples.md      the files of ``examples/``
    INCLUDED                 documents in the root, and those of policies and kernels

Needs the extra ``http`` of radixkv, no torch.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

ROOT = Path(__file__).resolve().parent.parent

INCLUDED = {
    "README.md": "overview.md",
    "ARCHITECTURE.md": "development/architecture.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "CHANGELOG.md": "development/changelog.md",
    "policies/README.md": "reference/policies.md",
    "kernels/README.md": "reference/kernels.md",
}
"""Documents outside of ``docs/``: their path in the repository, and in the site."""

EXAMPLES = "recipes/examples.md"


def pages() -> dict[str, str]:
    """Return every generated page as Markdown, by its path in the site. Takes about two seconds."""
    made = {site: (ROOT / source).read_text("utf-8") for source, site in INCLUDED.items()}
    made |= {f"reference/api/{name}.md": api(name) for name in API}
    return made | {
        "reference/http.md": http(),
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/metrics.md": metrics(),
        "reference/errors.md": errors(),
        "reference/ignored.md": ignored(),
        "reference/clients.md": clients(),
        EXAMPLES: examples(),
    }


def _escaped(text: object) -> str:
    """Return text for a table or a heading, with nothing in it that Markdown would read."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(str(text).split()))


def _marked(text: str) -> str:
    """Return a docstring or a description in one line, its code spans kept, for a table."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|").replace("<", "&lt;")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# --- API

API: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "radixkv": ("The cache", ("radixkv",)),
    "policies": ("Eviction policies", ("radixkv_policies", "radixkv_policies.leaves")),
    "storage": ("Storage", ("radixkv.storage",)),
    "scheduling": ("Scheduling", ("radixkv.scheduling",)),
    "engines": (
        "Engines",
        (
            "radixkv.engines.protocol",
            "radixkv.engines.hf.engine",
            "radixkv.engines.vllm.manager",
            "radixkv.engines.control.outlets",
            "radixkv.engines.vllm.serve",
            "radixkv.engines.vllm.process",
            "radixkv.engines.vllm.cache",
            "radixkv.engines.vllm.connector",
            "radixkv.engines.vllm.steps",
            "radixkv.engines.sglang.plugin",
            "radixkv.engines.sglang.cache",
            "radixkv.tenancy.salt",
            "radixkv.engines.control.server",
            "radixkv.engines.control.client",
            "radixkv.signing",
        ),
    ),
    "events": (
        "KV events",
        (
            "radixkv.events.event_settings",
            "radixkv.events.event_publisher",
            "radixkv.events.event_subscriber",
            "radixkv.coordination.view.event_view",
        ),
    ),
    "coordination": ("Coordination", ("radixkv.coordination",)),
    "audit": ("Audit", ("radixkv.audit", "radixkv.audit.properties")),
    "tokenizer": ("Tokenizer", ("radixkv.tokenizer",)),
    "kernels": ("Kernels", ("radixkv_kernels",)),
}
"""The pages of the API reference: title, and the modules with the names that each page has."""

SEARCH_PATHS = (ROOT, ROOT / "policies", ROOT / "kernels")


def api(name: str) -> str:
    """Return a page of the API reference, as directives for mkdocstrings."""
    title, modules = API[name]
    lines = [f"# {title}\n"]
    for module in modules:
        if len(modules) > 1:
            lines.append(f"## {module}\n")
        options = ("members: false", "show_root_heading: false", "show_root_toc_entry: false")
        lines.append(f"::: {module}\n    options:\n" + "".join(f"      {each}\n" for each in options))
        level = 2 + (len(modules) > 1)
        for each in sorted(public_names(module), key=_rank):
            lines.append(f"::: {module}.{each}\n    options:\n      heading_level: {level}\n")
    return "\n".join(lines)


_FIRST = (
    "PrefixCache",
    "Sequence",
    "CacheConfig",
    "Namespace",
    "Tenant",
    "HFEngine",
    "connect",
    "Policy",
    "check",
)
"""Names that a reader looks for first."""


def _rank(name: str) -> tuple[int, bool, str]:
    """Return the place of a name on its page: the main ones, then others by name, then errors."""
    return _FIRST.index(name) if name in _FIRST else len(_FIRST), name in _error_names(), name.lower()


@cache
def _error_names() -> frozenset[str]:
    return frozenset(public_names("radixkv.errors"))


def public_names(module: str) -> list[str]:
    """Return ``__all__`` of a module, or its public classes, without importing it; no submodules."""
    path = _file_of(module)
    assert path is not None, module
    tree = ast.parse(path.read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return [name for name in names if _file_of(f"{module}.{name}") is None]
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


def _file_of(module: str) -> Path | None:
    parts = Path(*module.split("."))
    candidates = (
        root / file for root in SEARCH_PATHS for file in (parts / "__init__.py", parts.with_suffix(".py"))
    )
    return next((path for path in candidates if path.is_file()), None)


# --- HTTP

_VOCABULARY = 2**31 - 19
_LONGEST = 2**30 - 35
_BOUNDS = {_LONGEST: "the longest prompt of the model"}
"""Bounds that each service sets by its model. These numbers only mark them; the reference has words instead."""

_KEYS = {
    "anyone": "no key",
    "tenant": "a tenant's key",
    "operator": "the operator's key",
    "either": "a tenant's key or the operator's",
}


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of ``radixkv serve``, for a model of unknown size."""
    from radixkv import __version__
    from radixkv.service.app import ENDPOINTS
    from radixkv.service.openapi import document
    from radixkv.service.prompts import PromptRules

    return document(ENDPOINTS, __version__, PromptRules(_VOCABULARY, _LONGEST, 16, _LONGEST))


def http() -> str:
    """Return the HTTP reference."""
    from radixkv.service.app import ENDPOINTS

    document = openapi()
    callers = {(each.method.lower(), each.path): _KEYS.get(each.who, each.who) for each in ENDPOINTS}
    lines = [
        "# HTTP reference\n",
        "Made from the service's own OpenAPI document. A running service has it at `/openapi.json` with the bounds of "
        "its model, and as a page at `/docs`. Send a key as `Authorization: Bearer KEY`. A token id is an integer of 0 "
        "or more, below the size of the vocabulary. Every answer that is not a success has the shape of "
        "[an error](errors.md#over-http). `radixkv route` serves the operations of replicas and routing, and those "
        "without a key.\n",
    ]
    described = {each["name"]: each["description"] for each in document["tags"]}
    for tag, operations in _by_tag(document).items():
        lines.append(f"## {tag[:1].upper()}{tag[1:]}\n")
        lines.append(f"{described[tag]}\n")
        for method, path, operation in operations:
            lines += _operation(document, method, path, operation, callers[method, path])
    return "\n".join(lines)


Operation = dict[str, Any]


def _by_tag(document: dict[str, Any]) -> dict[str, list[tuple[str, str, Operation]]]:
    """Return the operations by their tag, in the order of the tags."""
    found: dict[str, list[tuple[str, str, Operation]]] = {each["name"]: [] for each in document["tags"]}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            found[operation["tags"][0]].append((method, path, operation))
    return found


def _operation(
    document: dict[str, Any], method: str, path: str, operation: Operation, caller: str
) -> Iterator[str]:
    yield f"### `{method.upper()} {path}` {{#{operation['operationId']}}}\n"
    yield f"{operation['summary'].rstrip('.')}. Needs {caller}.\n"
    if operation.get("description"):
        yield inspect.cleandoc(operation["description"]).replace("``", "`") + "\n"
    parameters = operation.get("parameters", ())
    if parameters:
        rows = [
            (
                f"`{each['name']}`",
                _cell(f"{each['in']}, {_type(document, each['schema'])}", each["description"]),
            )
            for each in parameters
        ]
        yield _table(("parameter", "type and meaning"), rows)
    body = operation.get("requestBody", {}).get("content", {})
    for content in body.values():
        yield "**Body**. An optional field may also be null.\n"
        yield from _body(document, content, is_request=True)
    for status, response in operation["responses"].items():
        if status < "400":
            yield f"**{status}** {response['description']}.\n"
            for kind, content in response.get("content", {}).items():
                if kind != "application/json":
                    yield f"As `{kind}`:\n"
                yield from _body(document, content)
    failures = {code: each for code, each in operation["responses"].items() if code >= "400"}
    if failures:
        yield _table(("error", "when", "types"), [_failure(code, each) for code, each in failures.items()])


def _failure(status: str, response: dict[str, Any]) -> tuple[str, str, str]:
    types = response.get("content", {}).get("application/json", {}).get("examples", {})
    links = ", ".join(f"[`{name}`](errors.md#{name})" for name in types)
    return status, _marked(response["description"]), links


def _cell(type_: str, meaning: str) -> str:
    """Return a cell with a type, and below it the meaning."""
    return f'<span class="type">{type_}</span>' + (f"<br>{_marked(meaning)}" if meaning else "")


def _body(document: dict[str, Any], content: dict[str, Any], is_request: bool = False) -> Iterator[str]:
    schema = content.get("schema", {})
    yield from _fields(document, schema, is_request)
    given = [("", content["example"])] if "example" in content else []
    given += [(each["summary"], each["value"]) for each in content.get("examples", {}).values()]
    for summary, example in given:
        if summary:
            yield f"{summary.rstrip('.')}:\n"
        yield f"```text\n{example}\n```\n" if isinstance(example, str) else _json(example)


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: dict[str, Any] = document["components"]["schemas"][reference.rsplit("/", 1)[-1]]
    return found


def _fields(document: dict[str, Any], schema: dict[str, Any], is_request: bool) -> Iterator[str]:
    """Yield the fields of a body as a table, and which of them exclude each other."""
    kinds = [_resolved(document, each) for each in schema.get("anyOf", [schema])]
    for number, kind in enumerate(kinds):
        if number:
            yield "or\n"
        rows = list(_rows(document, kind, is_request))
        if rows:
            yield _table(("field", "type and meaning"), rows)
        elif kind.get("type") == "object" and "properties" in kind:
            yield "No fields.\n"
        forms = [each["required"] for each in kind.get("oneOf", ()) if "required" in each]
        if forms:
            yield f"Exactly one of {', '.join(f'`{name}`' for names in forms for name in names)}.\n"


def _rows(
    document: dict[str, Any],
    schema: dict[str, Any],
    is_request: bool,
    prefix: str = "",
    seen: tuple[str, ...] = (),
) -> Iterator[tuple[str, str]]:
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        place, words = f"{prefix}{name}", _type(document, field)
        if is_request:
            words = words.removesuffix(" or null") + (", required" if name in required else "")
        if field.get("default") not in (None, "", [], {}):
            words += f", by default `{json.dumps(field['default'])}`"
        yield f"`{place}`", _cell(words, str(field.get("description", "")))
        for kind, ending in _objects(document, field):
            if kind not in seen:
                inner = document["components"]["schemas"][kind]
                yield from _rows(document, inner, is_request, place + ending, (*seen, kind))


def _objects(document: dict[str, Any], field: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the schemas with fields that a field holds, and the text between its name and theirs."""
    for each in (field, *field.get("anyOf", ()), *field.get("oneOf", ())):
        if "$ref" in each:
            name = each["$ref"].rsplit("/", 1)[-1]
            if "properties" in document["components"]["schemas"][name]:
                yield name, "."
        elif "$ref" in each.get("items", {}):
            yield each["items"]["$ref"].rsplit("/", 1)[-1], "[]."


def _type(document: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return type and limits of a value in words."""
    if "$ref" in schema:
        found = _resolved(document, schema)
        return "object" if "properties" in found else _type(document, found)
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if parts and "type" not in schema:
        words = dict.fromkeys(_type(document, each) for each in parts)
        return " or ".join(sorted(words, key=lambda word: word == "null"))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = schema.get("type", "any value")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    if kind == "array":
        items = schema.get("items", {})
        return f"list{_range(schema, 'minItems', 'maxItems', ' items')} of {_type(document, items)}"
    if kind == "string":
        form = f", as `{schema['format']}`" if "format" in schema else ""
        pattern = f", matches `{schema['pattern']}`".replace("|", "\\|") if "pattern" in schema else ""
        return kind + _range(schema, "minLength", "maxLength", " characters") + form + pattern
    if schema.get("exclusiveMaximum") == _VOCABULARY:
        return "token id"
    if kind in ("integer", "number"):
        return kind + _range(schema, "minimum", "maximum", "")
    return kind + (_range(schema, "minProperties", "maxProperties", " names") if kind == "object" else "")


def _range(schema: dict[str, Any], low: str, high: str, unit: str) -> str:
    """Return the bounds of a value, a length or a count, in brackets; empty if there are none."""
    least, most = schema.get(low), schema.get(high)
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    parts = []
    if least is not None and most is not None:
        parts.append(_bound(least) if least == most else f"{_bound(least)} to {_bound(most)}")
    elif least is not None:
        parts.append(f"{_bound(least)} or more")
    elif most is not None:
        parts.append(f"up to {_bound(most)}")
    if parts and most not in _BOUNDS:
        parts[-1] += unit
    if above is not None:
        parts.append(f"above {_bound(above)}")
    if below is not None:
        parts.append(f"below {_bound(below)}")
    return f" ({', '.join(parts)})" if parts else ""


def _bound(value: float) -> str:
    return _BOUNDS.get(cast(int, value)) or (f"{value:,}" if isinstance(value, int) else f"{value:,.10g}")


# --- commands


def commands() -> str:
    """Return the reference of the command line."""
    import click

    from radixkv.cli.main import commands as root

    lines = [
        "# Command reference\n",
        "Made from the commands themselves; `radixkv COMMAND --help` prints the same. Results go to stdout, as JSON "
        "with `--json`; progress and errors go to stderr. Exit codes: 0 if it worked, 1 if it failed, 2 for an "
        "invalid setting. An option with an environment variable takes its value from there if it isn't given.\n",
    ]
    for command, context in _leaves(root, click.Context(root, info_name="radixkv", max_content_width=110)):
        lines.append(f"## {context.command_path} {{#{context.command_path.replace(' ', '-')}}}\n")
        lines.append(_paragraphs(command.help or "") + "\n")
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        lines.append(f"```text\n{usage}\n```\n")
        rows = [
            (f"`{declared}`".replace("|", "\\|"), _option_text(context, option, text))
            for option in command.get_params(context)
            if (record := option.get_help_record(context)) is not None
            for declared, text in [record]
            if "--help" not in option.opts
        ]
        if rows:
            lines.append(_table(("option", "meaning"), rows))
    return "\n".join(lines)


def _leaves(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the commands that do something, each with its context."""
    import click

    if not isinstance(command, click.Group):
        yield command, context
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from _leaves(inner, click.Context(inner, info_name=name, parent=context))


def _paragraphs(text: str) -> str:
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(_escaped(part) for part in parts)


def _option_text(context: Any, option: Any, text: str) -> str:
    variable = option.envvar
    if isinstance(variable, str) and variable not in text:
        text = f"{text}  [{variable}]"
    return _escaped(text)


# --- settings


def settings() -> str:
    """Return the reference of the settings."""
    from radixkv.service.options import SETTINGS

    lines = [
        "# Settings reference\n",
        "Made from `radixkv/service/options.py`. A setting is an option (`--port`), an environment "
        "variable (`RADIXKV_PORT`) and a key of the YAML file of `--config` (`port: 8400`). An option wins over the "
        "environment, the environment over the file. `radixkv config show` prints what is in force. SIGHUP changes "
        "settings marked *SIGHUP* in a running process that has a file or a certificate; others need a restart.\n",
    ]
    for command, found in SETTINGS.items():
        lines.append(f"## radixkv {command} {{#{command}}}\n")
        rows = []
        for setting in found.values():
            default = f"`{setting.default}`" if setting.default is not None else _escaped(setting.unset)
            changes = "SIGHUP" if setting.reloads else "restart"
            rows.append(
                (f"`{setting.name}`", f"{_escaped(setting.text)}<br>{setting.allowed}", default, changes)
            )
        lines.append(_table(("setting", "meaning, allowed values", "default", "changes at"), rows))
    return "\n".join(lines)


# --- metrics


class Family(NamedTuple):
    """A family of series: the names of its samples, its kind, its labels and its text."""

    names: tuple[str, ...]
    kind: str
    labels: tuple[str, ...]
    text: str


def families() -> dict[str, list[Family]]:
    """Return what ``/metrics`` exports, by process: read from a registry of each, after one event of each kind."""
    from radixkv import CacheConfig, PrefixCache, Tenant
    from radixkv.coordination import connect
    from radixkv.service.core import Service
    from radixkv.service.metrics import Metrics, RequestMetrics
    from radixkv.service.standalone import RouterHost

    cache = PrefixCache(CacheConfig(num_blocks=2))
    cache.add_tenant(Tenant("acme"))
    alone = connect(
        None, replica_id="docs", fleet_secret=bytes(32), fingerprint="docs", block_size=16, background=False
    )
    # Their levels are functions of the process that are called at a scrape only, and here never.
    serve_levels = [(name, text, float) for name, text, _ in Service._levels(cast(Any, None))]
    route_levels = [(name, text, float) for name, text, _ in RouterHost._levels(cast(Any, None))]
    engine: Any = SimpleNamespace(cache=cache, preemptions=lambda: {("acme", "pool"): 1})
    serve = Metrics(engine, lambda: ["acme"], alone, serve_levels)
    serve.read_cache()
    serve.completed("acme", prompt=2, cached=1, generated=1, first_token_s=0.1, queued_s=0.1)
    serve.between_tokens("acme", 2).observe(0.1)
    route = RequestMetrics(route_levels)
    for each in (serve, route):
        each.answered("GET", "/healthz", 200, 0.1)
    return {"radixkv serve": _families(serve.registry), "radixkv route": _families(route.registry)}


def _families(registry: Any) -> list[Family]:
    found = []
    for family in registry.collect():
        samples = [each for each in family.samples if not each.name.endswith("_created")]
        labels = dict.fromkeys(label for each in samples for label in each.labels)
        names = tuple(dict.fromkeys(each.name for each in samples))
        found.append(Family(names or (family.name,), family.type, tuple(labels), family.documentation))
    return sorted(found)


def metrics() -> str:
    """Return the reference of the metrics."""
    lines = [
        "# Metrics reference\n",
        "Made from the registries that export them. `GET /metrics` has Prometheus' text format and needs the "
        "operator's key. Counts of the cache, of tenants and of the fleet are read at each scrape. No token id, "
        "prompt or key is in them; the tenant is a label.\n",
    ]
    for process, found in families().items():
        lines.append(f"## {process}\n")
        rows = []
        for family in found:
            labels = "".join(f", by `{label}`" for label in family.labels)
            names = ", ".join(f"`{name}`" for name in family.names)
            rows.append((names, _escaped(family.text), family.kind + labels))
        lines.append(_table(("metric", "meaning", "kind"), rows))
    return "\n".join(lines)


# --- errors


def errors() -> str:
    """Return the reference of the errors, over HTTP and in Python."""
    from radixkv import errors as module
    from radixkv.service.error_types import ERROR_TYPES

    lines = [
        "# Errors reference\n",
        "Made from `radixkv/errors.py` and `radixkv/service/texts/errors.yaml`. A running service has the HTTP part at "
        "`/docs/errors`.\n",
        "## Over HTTP\n",
        "Every answer that is not a success has one shape:\n",
        _json(ERROR_TYPES["validation_error"].example_body()),
        "`field`, `value` and `allowed` name the cause; each is null if it doesn't apply. With a `Retry-After` header, "
        "the same request may succeed after so many seconds.\n",
    ]
    by_type: dict[str, list[str]] = {}
    for name, (_, type_) in _answers_of_library().items():
        by_type.setdefault(type_, []).append(name)
    for each in ERROR_TYPES.values():
        status = ", ".join(map(str, each.statuses)) or "in a part of a job or pin"
        lines.append(f"### `{each.type}` {{#{each.type}}}\n")
        lines.append(f"**{status}** {each.meaning}\n\n**What to do** {each.action}\n")
        names = by_type.get(each.type, []) if each.type != "internal" else []
        if names:
            lines.append("In Python: " + ", ".join(f"[`{name}`](#{name})" for name in names) + ".\n")
    tree = (module.__doc__ or "").partition("\n\n")[2]
    lines += ["## In Python\n", tree.replace("``", "`").strip("\n") + "\n"]
    for error in _classes():
        lines.append(f"### `{error.__name__}` {{#{error.__name__}}}\n")
        parents = ", ".join(
            f"[`{base.__name__}`](#{base.__name__})"
            if base.__module__.startswith("radixkv")
            else f"`{base.__name__}`"
            for base in error.__bases__
        )
        lines.append(f"From {parents}.\n")
        lines.append(inspect.cleandoc(error.__doc__ or "").replace("``", "`") + "\n")
        if hint := vars(error).get("hint"):
            lines.append(f"**What to do** {hint}\n")
        code, type_ = _answers_of_library().get(error.__name__, (500, "internal"))
        if type_ != "internal":
            lines.append(f"Over HTTP: {code} [`{type_}`](#{type_}).\n")
    return "\n".join(lines)


def _json(value: object) -> str:
    return f"```json\n{json.dumps(value, indent=2, ensure_ascii=False)}\n```\n"


def _classes() -> Iterator[type[BaseException]]:
    """Yield the errors of the library, parents first: those that its public modules define."""
    import radixkv.audit
    from radixkv.errors import MissingExtra, RadixKVError

    def below(error: type[BaseException]) -> Iterator[type[BaseException]]:
        yield error
        for each in error.__subclasses__():
            if each.__module__ in ("radixkv.errors", radixkv.audit.BrokenLaws.__module__):
                yield from below(each)

    yield from below(RadixKVError)
    yield MissingExtra


def _answers_of_library() -> dict[str, tuple[int, str]]:
    """Return status and type of the answer to each error of the library, as the service's own function gives it."""
    from radixkv.errors import RadixKVError
    from radixkv.service.problems import of_library

    found = {}
    for each in _classes():
        if issubclass(each, RadixKVError) and each.__module__ == RadixKVError.__module__:
            answer = of_library(each(*(1 for _ in _needed(each))))
            found[each.__name__] = answer.status, str(answer.body["type"])
    return found


def _needed(error: type[BaseException]) -> list[str]:
    """Return the arguments without which an error can't be made."""
    if not inspect.isfunction(error.__init__):
        return []
    _, *parameters = inspect.signature(error.__init__).parameters.values()
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [each.name for each in parameters if each.kind is positional and each.default is each.empty]


# --- ignored fields


def ignored() -> str:
    """Return the table of fields that change nothing."""
    from radixkv.service.schemas.ignored import TABLE, rows

    lines = [
        "# Ignored fields\n",
        "Clients send these fields, and no answer of radixkv depends on them: they are accepted and dropped. A field "
        "that has certain values here is refused by name with any other, because that would change the answer. Headers "
        "such as `anthropic-beta` and `anthropic-version` are ignored too. Each field may be null.\n",
    ]
    for api, places in TABLE.items():
        lines.append(f"## `{api}`\n")
        found = [row for place, drops in places.items() for row in rows(drops, place)]
        cells = [(f"`{path}`", _values(values), _marked(about)) for path, values, about in found]
        lines.append(_table(("field", "accepted", "why"), cells))
    return "\n".join(lines)


def _values(values: str) -> str:
    return {"any value": "any value", "left out": "only left out"}.get(values, f"`{values}`")


# --- clients


def clients() -> str:
    """Return the table of clients: which features their recorded conversations use, and which are served."""
    from tests.agents import recordings

    refused = recordings.refused()
    lines = [
        "# Clients reference\n",
        "Each client below has had a conversation with tools, as its user would have it: two questions, for which the "
        "model calls tools, also several at once. What the client sent was recorded, and the tests replay it against "
        "the service: each request must be answered in the form that the client reads, and each turn must read from "
        "the cache what the turns before it wrote. This page is made of these recordings (`tests/agents/README.md`).\n",
        "`yes`: the client uses it, and is served. `no`: the client uses it, and is refused; the reason is below the "
        "table. `–`: the recorded conversation doesn't use it. The whole conversation is served if all its turns are; "
        "counts, lists and answers that must fit a schema are asked beside it.\n",
    ]
    rows, reasons = [], []
    for name in recordings.names():
        recording, missing = recordings.load(name), refused.get(name, [])
        failing = {index for each in missing for index in each["requests"]}
        used = [recordings.features(each) for each in recording.requests]
        cells = [
            _served({index for index, found in enumerate(used) if feature in found}, failing)
            for feature in recordings.FEATURES
        ]
        whole = "no" if failing.intersection(recording.turns) else "yes"
        rows.append((_escaped(recording.client), _escaped(recording.version), whole, *cells))
        reasons += [
            (_escaped(recording.client), f"`{each['field']}`", _escaped(each["reason"])) for each in missing
        ]
    lines.append(_table(("client", "version", "whole conversation", *recordings.FEATURES), rows))
    if reasons:
        lines += ["## What is refused\n", _table(("client", "field", "why"), reasons)]
    return "\n".join(lines)


def _served(using: set[int], failing: set[int]) -> str:
    """Return what a cell says of a feature: ``using`` are the requests that use it, ``failing`` the refused ones."""
    return "–" if not using else "yes" if using - failing else "no"


# --- examples


def examples() -> str:
    """Return the page with the programs of ``examples/``."""
    lines = [
        "# Examples\n",
        "Complete programs, from the folder `examples/`. The tests run them. For shorter code, see the recipes.\n",
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text("utf-8")
        title = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        code = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
        lines.append(f"## {path.name} {{#{path.stem}}}\n")
        lines.append(f"{_marked(title)}\n")
        lines.append(f'??? example "examples/{path.name}"\n\n    ```python\n{code}\n    ```\n')
    return "\n".join(lines)
