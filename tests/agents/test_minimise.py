"""What is taken out of a recording: places, times and ids, and the words of other projects."""

from __future__ import annotations

import json
from typing import Any

from tests.agents.minimise import LONG, Minimiser, Places, minimised

PLACES = Places("/runs/home", "/runs/work", "/runs", "http://127.0.0.1:41234", "claude-sonnet-4-5")
FIRST, SECOND = "3f2b8c1e-0a4d-4c6b-9d2e-8f7a6b5c4d3e", "9a8b7c6d-1234-4abc-8def-0123456789ab"
PROSE = "<rules>\n- Always read `notes.txt` before you answer; never guess what a file contains.\n</rules>"


def test_places_times_and_the_key_have_placeholders() -> None:
    text = "/runs/work/a at 127.0.0.1:41234, 2026-11-29, Sun Nov 29 2026, -runs-work"
    found = "/home/user/project/a at 127.0.0.1:8400, 2026-01-01, Thu Jan 1 2026, -home-user-project"
    assert Minimiser(PLACES).text(text, "id") == found
    assert Minimiser(PLACES).value({"at_ms": 1_795_997_551_703, "max_tokens": 2**31 - 1}) == {
        "at_ms": 1_767_225_600_000,
        "max_tokens": 2**31 - 1,
    }


def test_an_id_has_the_same_number_everywhere() -> None:
    minimiser = Minimiser(PLACES)
    one, two, again = (minimiser.text(each) for each in (FIRST, SECOND, f"session_{FIRST}"))
    assert one == "00000000-0000-0000-0000-000000000001" and two.endswith("2") and again == f"session_{one}"


def test_long_texts_have_other_words_and_begin_alike_as_far_as_they_did() -> None:
    minimiser = Minimiser(PLACES)
    other = PROSE.replace("guess", "invent")
    shown, changed = minimiser.text(PROSE), minimiser.text(other)
    assert "Always" not in shown and "guess" not in shown and shown.count("\n") == PROSE.count("\n")
    assert shown.startswith("<rules>\n- ") and shown.endswith("\n</rules>") and "`" in shown
    pairs = zip(shown.split(), changed.split(), strict=True)
    assert [index for index, (a, b) in enumerate(pairs) if a != b] == [PROSE.split().index("guess")]
    assert minimiser.text(PROSE[:LONG]) == PROSE[:LONG]


def test_json_in_a_text_stays_json_and_forms_of_their_own_stay() -> None:
    document: dict[str, Any] = {"note": PROSE, "done": False, "id": FIRST}
    text = json.dumps(document, separators=(",", ":"))
    shown = json.loads(Minimiser(PLACES).text(text))
    assert shown["done"] is False and shown["note"] != PROSE and shown["id"].endswith("0001")
    schema = {"pattern": "^" + "[a-z]{3} " * 20 + "$", "arguments": PROSE}
    assert Minimiser(PLACES).value(schema) == schema


def test_headers_of_the_connection_are_left_out() -> None:
    headers = {"host": "127.0.0.1:41234", "x-stainless-os": "Linux", "anthropic-beta": "effort-2025-11-24"}
    request = {
        "method": "POST",
        "path": "/v1/messages",
        "headers": headers,
        "body": {},
        "answer": None,
        "status": 200,
    }
    (found,) = minimised([request], PLACES)
    assert found["headers"] == {"anthropic-beta": "effort-2025-11-24"}
