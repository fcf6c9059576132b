"""The built site: complete generated references, links and marks that are right, and nothing loaded from elsewhere."""

from __future__ import annotations

import re

import click
import pytest

import _generate as generate
import _hooks as hooks
import radixkv
from radixkv.cli.main import commands
from radixkv.service.app import ENDPOINTS
from radixkv.service.error_types import ERROR_TYPES, error_classes
from radixkv.service.options import SETTINGS
from radixkv.service.schemas.ignored import TABLE, rows
from tests.docs.blocks import DOCUMENTS, ROOT


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return generate.pages()


# --- references


def test_each_public_name_has_a_place_in_the_api_reference(pages: dict[str, str]) -> None:
    page = pages["reference/api/radixkv.md"]
    assert set(re.findall(r"^::: radixkv\.(\w+)$", page, re.MULTILINE)) == {*radixkv.__all__} - {"audit"}
    for name, (_, modules) in generate.API.items():
        for module in modules:
            named = generate.public_names(module)
            assert named and all(
                f"\n::: {module}.{each}\n" in pages[f"reference/api/{name}.md"] for each in named
            )


def test_each_operation_is_in_the_http_reference(pages: dict[str, str]) -> None:
    page = pages["reference/http.md"]
    public = [each for each in ENDPOINTS if not each.internal]
    headings = re.findall(r"^### `(\w+) (\S+)` \{#(\w+)\}$", page, re.MULTILINE)
    assert sorted(headings) == sorted((each.method, each.path, each.handler.__name__) for each in public)
    for each in public:
        (section,) = re.findall(
            rf"\{{#{each.handler.__name__}\}}\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE
        )
        assert each.summary.rstrip(".") in section
        for model in [each.body] if each.body else []:
            assert all(f"| `{name}` |" in section for name in model.model_json_schema()["properties"])
    assert "the size of the vocabulary" in page and "the longest prompt of the model" in page
    assert not {"2,147,483,629", "1,073,741,789", "None", "<class"} & set(re.findall(r"[\w,<]+", page))


def test_each_ignored_field_is_in_its_reference(pages: dict[str, str]) -> None:
    page = pages["reference/ignored.md"]
    for api, places in TABLE.items():
        (section,) = re.findall(rf"^## `{re.escape(api)}`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
        found = [path for place, drops in places.items() for path, _, _ in rows(drops, place)]
        assert found == re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_pages_of_the_repository_give_way_to_generated_ones(pages: dict[str, str]) -> None:
    in_place = {
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/reference").rglob("*.md")
    }
    assert in_place and in_place <= set(pages)


def test_each_command_and_option_is_in_the_command_reference(pages: dict[str, str]) -> None:
    sections = dict(
        re.findall(
            r"^## (radixkv[\w -]+?) \{#.*?\}\n(.*?)(?=^## |\Z)",
            pages["reference/commands.md"],
            re.DOTALL | re.MULTILINE,
        )
    )

    def leaves(command: click.Command, path: str) -> dict[str, click.Command]:
        if not isinstance(command, click.Group):
            return {path: command}
        found: dict[str, click.Command] = {}
        for name, each in command.commands.items():
            found |= leaves(each, f"{path} {name}")
        return found

    expected = leaves(commands, "radixkv")
    assert sections.keys() == expected.keys()
    for path, command in expected.items():
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert all(each in sections[path] for each in option.opts), (path, option.opts)


def test_each_setting_is_on_the_page_of_settings(pages: dict[str, str]) -> None:
    serve, route = pages["reference/settings.md"].split("## radixkv route")
    for page, command in ((serve, "serve"), (route, "route")):
        rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
        assert [row[0] for row in rows] == [f"| `{name}`" for name in SETTINGS[command]]
        assert [row[-1] == "SIGHUP |" for row in rows] == [
            each.reloads for each in SETTINGS[command].values()
        ]
    assert "an integer from 0 to 65535 | `8400` | restart" in serve


def test_metrics_have_their_exported_names(pages: dict[str, str]) -> None:
    found = generate.families()
    assert {"radixkv serve", "radixkv route"} == found.keys()
    serve = {name: each for each in found["radixkv serve"] for name in each.names}
    assert serve["radixkv_http_requests_total"].labels == ("method", "path", "status")
    assert serve["radixkv_tenant_hit_tokens_total"].labels == ("tenant",)
    assert {"radixkv_cache_free_blocks", "radixkv_bodies_waiting", "radixkv_replica_ok"} <= serve.keys()
    assert "radixkv_time_to_first_token_seconds_bucket" in serve
    route = {name for each in found["radixkv route"] for name in each.names}
    assert {"radixkv_router_replicas", "radixkv_http_seconds_count"} <= route
    assert all(f"`{name}`" in pages["reference/metrics.md"] for name in {*serve, *route})


def test_each_error_has_an_anchor(pages: dict[str, str]) -> None:
    page = pages["reference/errors.md"]
    found = re.findall(r"^### `(\w+)` \{#(\w+)\}$", page, re.MULTILINE)
    assert all(name == anchor for name, anchor in found) and len(found) == len(set(found))
    anchors = {anchor for _, anchor in found}
    assert {*ERROR_TYPES} <= anchors and len(ERROR_TYPES) > 20
    assert {error.__name__ for _, error in error_classes()} <= anchors
    assert "Over HTTP: 503 [`quota_exceeded`](#quota_exceeded)." in page


def test_every_example_is_on_the_page_of_examples(pages: dict[str, str]) -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert f"## {path.name} {{#{path.stem}}}" in pages[generate.EXAMPLES]


# --- links, marks


@pytest.mark.parametrize(
    ("path", "link", "expected"),
    [
        ("overview.md", "[a](docs/glossary.md)", "[a](glossary.md)"),
        ("overview.md", "![a](docs/picture.svg)", "![a](picture.svg)"),
        ("overview.md", "[a](examples)", "[a](recipes/examples.md)"),
        (
            "reference/policies.md",
            "[a](../docs/measurements/policies.md#x)",
            "[a](../measurements/policies.md#x)",
        ),
        ("measurements/index.md", "[a](../../kernels/README.md#gpu)", "[a](../reference/kernels.md#gpu)"),
        ("glossary.md", "[a](../examples/gateway.py)", "[a](recipes/examples.md#gateway)"),
        ("glossary.md", "[costs](../radixkv/coordination/routing/costs.py)", "costs"),
        ("glossary.md", "[a](https://example.org) [b](#here)", "[a](https://example.org) [b](#here)"),
        ("glossary.md", "```python\nf[0](../x)\n```", "```python\nf[0](../x)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(path: str, link: str, expected: str) -> None:
    assert hooks.linked(link, path) == expected


def test_code_that_no_test_runs_is_marked() -> None:
    text = "<!-- not run: needs a GPU -->\n```console\n$ true\n```\n\n```console\n$ make run\n$ true\n```\n"
    marked = hooks.marked(text)
    assert '<p class="not-run">Not run by the tests – needs a GPU</p>' in marked
    assert "Not run by the tests – `make run`: sets up an environment" in marked
    assert hooks.marked("```console\n$ true\n```\n") == "```console\n$ true\n```\n"


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each.startswith("docs/")])
def test_every_page_is_in_the_navigation(document: str) -> None:
    assert f": {document.removeprefix('docs/')}\n" in (navigation := (ROOT / "mkdocs.yml").read_text()) or (
        f"- {document.removeprefix('docs/')}\n" in navigation
    )


# --- nothing from elsewhere


@pytest.mark.parametrize(
    ("kind", "text", "num_found"),
    [
        (
            ".html",
            '<a href="https://example.org/x">a link</a><link rel="canonical" href="https://e.org/">',
            0,
        ),
        (".html", '<link rel="stylesheet" href="assets/site.css"><img src="../picture.svg">', 0),
        (".html", '<link href="https://fonts.example.org/css" rel=stylesheet>', 1),
        (".html", "<script src=//cdn.example.org/x.js></script>", 1),
        (".html", '<img alt="a" src="https://example.org/x.png">', 1),
        (".html", '<style>@import "https://example.org/x.css";</style>', 1),
        (".css", "@font-face{src:url(https://example.org/x.woff2)}", 1),
        (".css", "@import url('//example.org/x.css');a{background:url(data:image/svg+xml;x)}", 1),
        (".js", 'load("https://unpkg.com/mermaid@11/dist/mermaid.min.js")', 1),
        (".js", 'create("http://www.w3.org/2000/svg");go("./search/search_index.json")', 0),
    ],
)
def test_what_a_page_would_load_from_elsewhere_is_found(kind: str, text: str, num_found: int) -> None:
    assert len(hooks.external_loads(text, kind)) == num_found
