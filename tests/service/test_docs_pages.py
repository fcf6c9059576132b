"""``/docs`` and ``/docs/errors``: they need no key, have a policy of their own, and describe every type of error."""

from __future__ import annotations

import ast
import re
import select
import socket
import struct
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import radixkv.errors
from radixkv.errors import RadixKVError
from radixkv.service import connection
from radixkv.service.error_types import DOCS_PATH, ERROR_TYPES, docs_url, error_classes
from radixkv.service.static import accepts_gzip
from tests.service.running import Running
from tests.waiting import LIMIT_S, eventually

SERVICE = Path(radixkv.errors.__file__).parent / "service"
PAGES = ("/docs", "/docs/errors")
BUNDLE = "/docs/assets/swagger-ui-bundle.js"


class Page(HTMLParser):
    """The ids, links and inline code of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.inline: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [str(found["id"])] if "id" in found else []
        self.links += [str(found[name]) for name in ("href", "src") if name in found]
        self.inline += [name for name in found if name == "style" or name.startswith("on")]
        self._script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script and data.strip():
            self.inline.append(data)


def resolved(path: str, link: str) -> str:
    """A relative link of a page as a path."""
    folder = path.rpartition("/")[0]
    while link.startswith("../"):
        folder, link = folder.rpartition("/")[0], link[3:]
    return f"{folder}/{link}"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_needs_no_key_and_loads_only_from_this_service(live: Running, path: str) -> None:
    answer = live.nobody.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    sources = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert set(sources.values()) <= {"'none'", "'self'"} and sources["default-src"] == "'none'"
    page = Page(answer.text)
    assert page.links and not page.inline
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if not link.startswith("#"):
            assert not re.match(r"\w+:|/", link), "links are relative: a proxy may add a prefix"
            assert live.nobody.get(resolved(path, link)).status_code == 200, link


def test_assets_are_sent_whole_and_may_be_cached(live: Running) -> None:
    answer = live.nobody.get(BUNDLE, headers={"accept-encoding": "identity"})
    assert answer.headers["content-type"].startswith("text/javascript")
    assert int(answer.headers["content-length"]) == len(answer.content) > 500_000
    assert "max-age" in answer.headers["cache-control"]
    assert live.nobody.head("/docs/assets/docs.css").status_code == 200


@pytest.mark.parametrize("path", [*PAGES, BUNDLE, "/docs/assets/errors.css"])
def test_what_never_changes_is_sent_compressed_and_once(live: Running, path: str) -> None:
    plain = live.nobody.get(path, headers={"accept-encoding": "identity, gzip;q=0"})
    packed = live.nobody.get(path, headers={"accept-encoding": "br, gzip;q=0.5"})
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content and plain.headers["etag"] != packed.headers["etag"]
    assert int(packed.headers["content-length"]) < 0.7 * int(plain.headers["content-length"])
    for answer in (plain, packed):
        encoding = answer.request.headers["accept-encoding"]
        assert "Accept-Encoding" in answer.headers["vary"]
        known = {"accept-encoding": encoding, "if-none-match": f'"x", W/{answer.headers["etag"]}'}
        again = live.nobody.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b"")
        for name in ("etag", "cache-control", "vary", "content-security-policy"):
            assert again.headers.get(name) == answer.headers.get(name), name
        head = live.nobody.head(path, headers={"accept-encoding": encoding})
        assert head.headers["content-length"] == answer.headers["content-length"]


def test_which_clients_get_gzip() -> None:
    for text in ("gzip", "GZIP;q=1", "deflate, gzip", "*", "*;q=0.1"):
        assert accepts_gzip([text]), text
    for text in ("", "identity", "gzip;q=0", "gzip; q=0.000", "*;q=0", "*, gzip;q=0", "br"):
        assert not accepts_gzip([text]), text


def test_a_download_that_the_client_ends_early_logs_at_most_one_line(
    live: Running, caplog: pytest.LogCaptureFixture
) -> None:
    place = urlsplit(live.url)
    head = f"GET {BUNDLE} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
    for how_much in (0, 1, 20_000):
        for _ in range(5):
            with socket.create_connection((place.hostname, place.port), timeout=LIMIT_S) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(head)
                while how_much > 0:
                    how_much -= len(client.recv(how_much))
    assert live.nobody.get(BUNDLE).status_code == 200
    assert len(caplog.records) <= 1, [each.getMessage() for each in caplog.records]


def test_an_unread_download_ends_its_connection(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_S", 0.05)
    place = urlsplit(live.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect((place.hostname, place.port))
        client.sendall(f"GET {BUNDLE} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        ended = select.poll()
        ended.register(client, select.POLLHUP)
        eventually(lambda: ended.poll(0), "the server ends the connection")


@pytest.mark.parametrize(
    "name", ["index.html", "docs.html", "%2e%2e", "%2e%2e%2ferrors.py", "swagger-ui.js", ""]
)
def test_other_files_are_not_served(live: Running, name: str) -> None:
    answer = live.nobody.get(f"/docs/assets/{name}")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such path")


def test_every_type_and_class_has_an_entry(live: Running) -> None:
    page = Page(live.nobody.get(DOCS_PATH).text)
    assert set(ERROR_TYPES) <= set(page.ids)
    classes = {
        name
        for name, each in vars(radixkv.errors).items()
        if isinstance(each, type) and issubclass(each, RadixKVError)
    }
    assert {each.__name__ for _, each in error_classes()} == classes <= set(page.ids)


def test_every_error_class_has_its_own_hint() -> None:
    hints = [each.__dict__.get("hint") for _, each in error_classes()]
    assert all(isinstance(each, str) and each.endswith(".") and "\n" not in each for each in hints)
    assert len(set(hints)) == len(hints), "each class has its own"


def used_types() -> set[tuple[str, int | None]]:
    """Types of errors in the code of the service: in calls of ApiError with their status, and without one of _listed,
    which takes it from the table."""
    found: set[tuple[str, int | None]] = set()
    for path in SERVICE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError":
                status, kind = node.args[:2]
                if isinstance(status, ast.Constant) and isinstance(kind, ast.Constant):
                    found.add((str(kind.value), int(str(status.value))))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_listed":
                assert isinstance(node.args[0], ast.Constant)
                found.add((str(node.args[0].value), None))
    return found


@pytest.mark.slow
def test_the_table_has_the_types_of_the_code_with_their_statuses() -> None:
    used = used_types()
    assert len(used) > 25
    for kind, status in used:
        assert kind in ERROR_TYPES and (status is None or status in ERROR_TYPES[kind].statuses), (
            kind,
            status,
        )
    source = "".join(
        path.read_text("utf-8") for path in SERVICE.rglob("*.py") if path.name != "error_types.py"
    )
    for each in ERROR_TYPES.values():
        assert f'"{each.type}"' in source, f"no code uses {each.type}"
        assert each.meaning.endswith(".") and each.action.endswith(".")


def test_an_error_links_to_its_entry(live: Running) -> None:
    error = live.nobody.get("/v1/stats").json()["error"]
    assert error["docs_url"] == "/docs/errors#unauthorized"
    path, _, anchor = error["docs_url"].partition("#")
    assert anchor in Page(live.nobody.get(path).text).ids
    assert docs_url("a_type_of_another_version") == DOCS_PATH
