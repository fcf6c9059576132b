"""Rules for lines of prompts that change: what they drop and move, their file, and hostile texts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.service.options import RouteSettings, ServeSettings
from radixkv.service.prompt_lines import DEFAULT_RULES, MAX_BYTES, MAX_RULES, LineRule, applied
from tests.service.running import Running, service_in_thread

BILLING = "x-anthropic-billing-header: cc_version=2.1.328.{}; cc_entrypoint=sdk-cli;"
CLOCK = LineRule("clock", "Current time:", lines="all", do="move")


def system(*texts: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": each} for each in texts]}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


# ---- turns


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([system(BILLING, "Rules."), user("?")], [system("Rules."), user("?")]),
        ([system(f"{BILLING}\nRules.\n"), user("?")], [system("Rules.\n"), user("?")]),
        ([{"role": "developer", "content": f"{BILLING}\nRules."}, user("?")],
         [{"role": "developer", "content": "Rules."}, user("?")]),
        ([system(BILLING), user("?")], [user("?")]),
        ([{"role": "system", "content": BILLING}, user("?")], [user("?")]),
    ],
)  # fmt: skip
def test_a_line_is_dropped_with_its_block_and_its_turn(given: Any, left: Any) -> None:
    before = json.dumps(given)
    assert applied(DEFAULT_RULES, given) == (left, ("claude-code-billing",))
    assert json.dumps(given) == before, "the turns that were given stay as they are"


@pytest.mark.parametrize(
    "turns",
    [
        [system("Rules.", f"Rules.\n{BILLING}"), user("?")],
        [system("Rules."), user(BILLING)],
        [system(" " + BILLING), user("?")],
        [system(BILLING.upper()), user("?")],
        [user("?"), {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        [user(""), user([])],
        [system(BILLING)],
        [],
    ],
)
def test_what_no_rule_is_for_stays_as_it_is(turns: Any) -> None:
    assert applied(DEFAULT_RULES, turns) == (turns, ())


def test_a_line_is_moved_behind_all_that_stays() -> None:
    turns = [system("Rules.\nCurrent time: 10:01\nMore."), user("one"), {"role": "assistant", "content": "a"},
             user([{"type": "text", "text": "two"}]), {"role": "tool", "content": "t"}]  # fmt: skip
    found, used = applied([CLOCK], turns)
    assert used == ("clock",)
    assert found[0] == system("Rules.\nMore.") and found[1:3] == turns[1:3] and found[4] == turns[4]
    assert found[3]["content"] == [
        {"type": "text", "text": "two"},
        {"type": "text", "text": "\nCurrent time: 10:01"},
    ]
    assert applied([CLOCK], turns, is_beginning=True)[0][3] == turns[3], "it comes with the turns that follow"
    (alone,), _ = applied([CLOCK], [turns[0]])
    assert alone["content"][-1]["text"] == "\nCurrent time: 10:01"


def test_rules_follow_each_other() -> None:
    rules = [*DEFAULT_RULES, LineRule("more", "Build: ", do="drop"), LineRule("user", "<env", "user")]
    turns = [system(f"{BILLING}\nBuild: 7\nRules."), user("<env a>\nWhy?"), user("<env b>\nHow?")]
    found, used = applied(rules, turns)
    assert found == [system("Rules."), user("Why?"), user("How?")]
    assert used == ("claude-code-billing", "more", "user")


def test_a_hostile_text_costs_as_much_as_any_of_its_length() -> None:
    """A fixed text is looked for once. Twice the characters take about twice the CPU time, not four times."""
    rules = [CLOCK, LineRule("again", "Current time: Current", lines="all")]

    def cost(num: int) -> float:
        hostile = [system("Current time\n" * num + "Current time:" * num + "\n" * num)]
        began = time.thread_time()
        for _ in range(5):
            applied(rules, hostile)
        return time.thread_time() - began

    cost(1000)
    assert cost(80_000) < 4 * 10 * max(cost(8_000), 1e-3)


# ---- the file


def loaded(path: Path, content: str | bytes) -> tuple[LineRule, ...]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ServeSettings.parse({"prompt-rules": str(path)}).prompt_rules


def test_a_file_adds_replaces_and_switches_off(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    assert ServeSettings.parse({}).prompt_rules == DEFAULT_RULES
    assert loaded(path, "{}") == DEFAULT_RULES
    assert loaded(path, '{"claude-code-billing": false}') == ()
    clock = {"starts_with": "Current time:", "lines": "all", "do": "move"}
    assert loaded(path, json.dumps({"clock": clock})) == (*DEFAULT_RULES, CLOCK)
    other = loaded(path, json.dumps({"claude-code-billing": {"starts_with": "x-billing:"}}))
    assert other == (LineRule("claude-code-billing", "x-billing:"),)
    (tmp_path / "secret").write_bytes(b"a secret of this test's fleet")
    route = {"redis": "redis://127.0.0.1", "fleet-secret": str(tmp_path / "secret")}
    assert RouteSettings.parse({**route, "prompt-rules": str(path)}).prompt_rules == other


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "JSON"),
        ("[]", "object"),
        ("[" * 100_000, "at most"),
        ("[" * 60_000, "JSON"),
        (b"\xff{}", "JSON"),
        ('{"a": {"starts_with": "long"}, "a": false}', "JSON"),
        ('{"no-rule": false}', "false only for"),
        ('{"a": true}', "starts_with"),
        ('{"a": {"starts_with": "long", "regex": ".*"}}', "starts_with"),
        ('{"a": {"starts_with": "abc"}}', "4 to 256"),
        (json.dumps({"a": {"starts_with": "x" * 257}}), "4 to 256"),
        ('{"a": {"starts_with": "two\\nlines"}}', "one line"),
        ('{"a": {"starts_with": 7}}', "4 to 256"),
        ('{"a": {"starts_with": "long", "role": "assistant"}}', "system, user"),
        ('{"a": {"starts_with": "long", "lines": ["all"]}}', "first, all"),
        ('{"a": {"starts_with": "long", "do": null}}', "drop, move"),
        ('{"a": {"starts_with": "long", "role": "user", "do": "move"}}', "drop"),
        ('{"A B": {"starts_with": "long"}}', "small letters"),
        (json.dumps({f"r{n}": {"starts_with": "long"} for n in range(MAX_RULES + 1)}), str(MAX_RULES)),
        (" " * (MAX_BYTES + 1), str(MAX_BYTES)),
    ],
)
def test_a_bad_file_stops_the_start_and_says_what_is_allowed(
    tmp_path: Path, content: str | bytes, named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path / "rules.json", content)
    assert caught.value.setting == "--prompt-rules" and named in caught.value.allowed


# ---- a service


def chat(checksum: str, question: str = "Which page?") -> list[dict[str, str]]:
    rules = "".join(f"Rule {number}: answer politely, name the page.\n" for number in range(12))
    return [
        {"role": "system", "content": f"{BILLING.format(checksum)}\n{rules}"},
        {"role": "user", "content": question},
    ]


def tokens(live: Running, messages: Any) -> list[int]:
    return list(live.acme.post("/tokenize", json={"messages": messages}).json()["tokens"])


def test_conversations_share_what_follows_a_line_that_changes(live: Running, salt: str) -> None:
    """In a warm, a lookup and a chat alike; the metric and the statistics count each of them."""
    before = uses(live)
    warmed = live.acme.post("/v1/warm", json={"messages": chat("62e")[:1], "salt": salt}).json()
    assert warmed["tokens"] > 100
    looked = live.acme.post("/v1/lookup", json={"messages": chat("dbe")[:1], "salt": salt}).json()
    assert looked["matched_tokens"] == warmed["tokens"]
    body = {"model": live.service.model_name, "messages": chat("af0"), "max_tokens": 2, "cache_salt": salt}
    answer = live.acme.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= warmed["tokens"]
    assert uses(live) == before + 3
    (rule,) = live.operator.get("/v1/stats").json()["prompt_rules"]
    assert (rule["name"], rule["do"], rule["uses"]) == ("claude-code-billing", "drop", before + 3)
    first, question = chat("62e")
    without = {**first, "content": first["content"].partition("\n")[2]}
    assert tokens(live, [first, question]) == tokens(live, [without, question])


def uses(live: Running) -> int:
    name = 'radixkv_prompt_rule_uses_total{rule="claude-code-billing"} '
    (line,) = [each for each in live.operator.get("/metrics").text.splitlines() if each.startswith(name)]
    return int(float(line.removeprefix(name)))


@pytest.mark.slow
def test_a_switched_off_rule_changes_nothing_and_a_moved_line_leaves_the_rest_shared(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text('{"claude-code-billing": false, "clock": {"starts_with": "Current time:", "do": "move"}}')
    with service_in_thread(**{"prompt-rules": str(path), "num-blocks": "256"}) as live:
        assert tokens(live, chat("62e")) != tokens(live, chat("dbe"))
        (rule,) = live.operator.get("/v1/stats").json()["prompt_rules"]
        assert rule["name"] == "clock" and rule["uses"] == 0
        rules = chat("x")[0]["content"]
        one, other = (
            tokens(live, [{"role": "system", "content": f"Current time: {at}\n{rules}"}, user("Which page?")])
            for at in ("10:01", "23:59")
        )
        assert len(one) == len(other) and one != other
        assert next(at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b) > len(one) - 12
        long = [{"role": "system", "content": f"Current time: 1\n{rules * 5}"}, user("?")]
        assert "Current time: 1" in live.service.tokenizer.decode(tokens(live, long)[-20:])
