"""``radixkv explain``: files, options, hostile bodies, and the page of the documentation about it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from radixkv.cli.explain import MAX_EARLIER
from radixkv.cli.main import commands
from radixkv.errors import ConfigError
from radixkv.service.explanations.causes import WORDS
from radixkv.service.limits import Limits
from tests.docs.blocks import ROOT, blocks_of
from tests.waiting import LIMIT_S

GUIDE = "docs/guides/raise-your-hit-rate.md"
RULES = "Answer politely, and name the page of the manual. " * 8


def invoke(*arguments: object, input: str | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(commands, ["explain", *map(str, arguments)], input=input)


def refused(*arguments: object, input: str | None = None) -> str:
    """Return the error, which is one line that a terminal can show."""
    done = invoke(*arguments, input=input)
    assert isinstance(done.exception, ConfigError) and not done.stdout, done.output
    assert str(done.exception).isprintable()
    return str(done.exception)


def body(system: str, *turns: str, **fields: Any) -> str:
    messages = [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    messages += [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    return json.dumps({"messages": messages, **fields})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two requests: the second one's system text says something else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.json").write_text(body(f"You help Anna.\n{RULES}", "one"))
    (tmp_path / "second.json").write_text(body(f"You help Bernd.\n{RULES}", "one", "two", "three"))
    return tmp_path


def test_the_cause_is_printed_and_as_json(files: Path) -> None:
    done = invoke("second.json", "--against", "first.json")
    assert done.exit_code == 0 and "system_changed at messages[0]" in done.stdout and "Anna" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    document = json.loads(invoke("second.json", "--against", "first.json", "--json").stdout)
    (cause,) = document["causes"]
    assert (cause["cause"], cause["anthropic"], cause["openai"]) == (
        "system_changed",
        "system_changed",
        "input_changed",
    )
    assert document["api"] == "chat" and cause["saved_tokens"] == document["lost_tokens"] > 50
    for option in ((), ("--json",)):
        hidden = invoke("second.json", "--against", "first.json", "--no-content", *option).stdout
        assert "Anna" not in hidden and "Bernd" not in hidden and "system_changed" in hidden


def test_requests_come_from_files_lines_and_the_standard_input(files: Path) -> None:
    first, second = ((files / name).read_text() for name in ("first.json", "second.json"))
    (files / "session.jsonl").write_text(f"{first}\n\n{second}\n")
    for arguments, given, earlier in (
        (["-", "--against", "first.json"], second, 0),
        (["second.json", "--against", "-"], first, 0),
        (["second.json", "--against", "session.jsonl"], None, 1),
        (["second.json", "--against", "second.json", "--against", "session.jsonl"], None, 2),
        (["second.json"], None, None),
    ):
        done = invoke(*arguments, "--json", input=given)
        assert done.exit_code == 0 and json.loads(done.stdout)["earlier"] == earlier, done.output


def test_the_block_size_and_the_rules_count(files: Path) -> None:
    found = [
        json.loads(invoke("second.json", "--against", "first.json", "--json", *more).stdout)
        for more in ((), ("--block-size", "4"), ("--prompt-rules", "rules.json"))
        if (files / "rules.json").write_text('{"user": {"starts_with": "You help"}}')
    ]
    assert [each["block_size"] for each in found] == [16, 4, 16]
    assert found[1]["matched_blocks"] == found[0]["matched_tokens"] // 4
    assert [each["lost_tokens"] > 0 for each in found] == [True, True, False]


def test_what_cannot_be_explained_is_refused_with_its_place(files: Path) -> None:
    most = Limits().max_body_bytes
    for name, content, words in (
        ("bad.json", '{"messages": [', "bad.json can't be explained: the body is no JSON: EOF"),
        ("escape.json", '{"\\u001b[2J\\u009b": 1}', "\\x1b[2J\\x9b"),
        ("role.json", '{"messages": [{"role": "\\u009b", "content": "x"}]}', "messages[0].role"),
        ("shape.json", '{"query": "x"}', "one of contents, input, prompt, messages"),
        ("long.json", " " * (most + 1), f"at most {most} bytes"),
        ("lines.jsonl", (body("Rules.", "one") + "\n") * (MAX_EARLIER + 1), f"at most {MAX_EARLIER} lines"),
        ("line.jsonl", "\n" + "x" * (most + 1), "line.jsonl:2"),
        ("second.jsonl", (files / "first.json").read_text() + "\n{", "second.jsonl:2 can't be explained"),
    ):
        (files / name).write_text(content)
        assert words in refused("second.json", "--against", name), name
    assert "nowhere.json" in refused("nowhere.json") and "can be read" in refused(files)
    assert "once" in refused("-", "--against", "-", input="{}")
    assert "tokenizer" in refused("second.json", "--model", "nowhere")
    assert "rules.json" in refused("second.json", "--prompt-rules", "rules.json")
    many = [word for _ in range(MAX_EARLIER + 1) for word in ("--against", "first.json")]
    assert f"at most {MAX_EARLIER}" in refused("second.json", *many)


def test_texts_of_bodies_are_no_commands_for_a_terminal(files: Path) -> None:
    for name, text in (("first.json", "\x1b[2J\x9b31m one"), ("second.json", "\x1b]0;x\x07\u202e two")):
        (files / name).write_text(body(f"{text} {RULES}", "one"))
    done = invoke("second.json", "--against", "first.json")
    assert done.exit_code == 0 and all(line.isprintable() for line in done.stdout.splitlines())


@pytest.mark.slow
def test_the_guide_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of output follows the commands that print it, and is a part of what they print."""
    monkeypatch.chdir(tmp_path)
    printed, causes = "", set[str]()
    for block in blocks_of(GUIDE):
        if block.language == "text":
            assert block.text in printed + "\n", block
            continue
        for line in block.commands():
            words = shlex.split(line)
            if words[0] == "radixkv":
                done = invoke(*words[2:])
                assert done.exit_code == 0, done.output
                printed = done.stdout
                causes |= {
                    each["cause"] for each in json.loads(invoke(*words[2:], "--json").stdout)["causes"]
                }
            else:
                subprocess.run(["bash", "-c", line], check=True, timeout=LIMIT_S)
    assert len(causes) >= 14, "each section has an example of its cause"


def test_the_guide_names_every_cause() -> None:
    assert {f"`{name}`" for name in WORDS} <= {*re.findall(r"`\w+`", (ROOT / GUIDE).read_text())}
