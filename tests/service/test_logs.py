"""``logs``: lines as text and as JSON, and what the access log says of a request, which is nothing of its content."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from radixkv.service.logs import JsonLines, TextLines
from tests.service.running import KEYS, client, served
from tests.waiting import eventually

WORDS = "the emerald lies under the seventh flagstone"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(message: str, *args: Any, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("radixkv.service", logging.WARNING, "file", 1, message, args, None)
    made.__dict__.update(fields)
    return made


def test_a_text_line_has_time_level_logger_and_message() -> None:
    assert re.fullmatch(
        rf"{TIME} WARNING radixkv\.service: 3 of 4", TextLines().format(record("%d of %d", 3, 4))
    )


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\x1b[31mb", "a\u2028b", "a\x00b"])
def test_no_message_makes_two_lines_or_controls_a_terminal(text: str) -> None:
    for form in (TextLines(), JsonLines()):
        line = form.format(record("%s", text))
        assert len(line.splitlines()) == 1 and line.isprintable()
    assert json.loads(JsonLines().format(record("%s", text)))["message"] == text


def test_a_traceback_follows_the_line() -> None:
    try:
        raise ValueError("no such thing")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    assert TextLines().format(made).splitlines()[-1] == "ValueError: no such thing"
    line = json.loads(JsonLines().format(made))
    assert re.fullmatch(TIME, line["time"]) and line["exception"].endswith("ValueError: no such thing")
    assert (line["level"], line["logger"], line["message"]) == ("warning", "radixkv.service", "failed")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "text"])
def test_each_answered_request_is_a_line_of_the_access_log(tmp_path: Path, form: str) -> None:
    options = ["--num-blocks", "64", "--log-format", form, "--access-log", "all"]
    with served(tmp_path / "log", *options) as process:
        with client(process.url, KEYS["acme"]) as acme, client(process.url, None) as nobody:
            body = {"prompt": WORDS, "max_tokens": 2}
            whole = acme.post("/v1/completions", json=body)
            streamed = acme.post("/v1/completions", json={**body, "stream": True})
            acme.post("/v1/lookup", json={"prompt": WORDS, WORDS: 1})
            acme.get(f"/{WORDS}", params={"q": WORDS})
            nobody.get("/v1/stats")
        eventually(lambda: process.output.count("radixkv.access") >= 5)
        assert process.stop() == 0
    lines = [line for line in process.output.splitlines() if "radixkv.access" in line]
    if form == "json":
        found = [json.loads(line) for line in lines]
    else:
        assert all(re.match(rf"{TIME} INFO radixkv\.access: ", line) for line in lines)
        found = [dict(part.split("=", 1) for part in line.split(": ", 1)[1].split()) for line in lines]
    asked = [(each.get("method"), each.get("path"), int(each["status"])) for each in found]
    assert asked[-5:] == [
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/lookup", 422),
        ("GET", None, 404),
        ("GET", "/v1/stats", 401),
    ]
    first, second, third, fourth, fifth = found[-5:]
    assert first["request_id"] == whole.headers["x-request-id"] != second["request_id"]
    assert int(first["bytes"]) == len(whole.content) and int(second["bytes"]) == len(streamed.content)
    assert first["tenant"] == third["tenant"] == "acme" and "tenant" not in fifth and "key" not in fifth
    assert first["key"] == fourth["key"] and "request_id" not in fourth and float(first["seconds"]) > 0
    assert not any(each in line for line in lines for each in (KEYS["acme"], "emerald", "flagstone"))


@pytest.mark.slow
def test_there_is_no_access_log_unless_it_is_asked_for(tmp_path: Path) -> None:
    with served(tmp_path / "log", "--num-blocks", "64", "--log-level", "info") as process:
        with client(process.url, KEYS["acme"]) as acme:
            assert acme.get("/v1/stats").status_code == 200
        assert process.stop() == 0
    assert "radixkv.access" not in process.output
