"""Chat templates are programs of others: what they may cost, and where they run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.errors import ArgumentError, ConfigError
from radixkv.service.intake import Intake
from radixkv.service.problems import ApiError
from radixkv.service.prompts import PromptRules
from radixkv.service.schemas.chat import ChatRequest
from radixkv.service.schemas.prompts import LookupRequest
from radixkv.tokenizer import load_tokenizer, templates
from radixkv.tokenizer.chat import RenderingTooLong, TemplateChat
from tests.tokenizer.kinds import train_byte_level
from tests.waiting import finished

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWS = (
    "{% set ns = namespace(x=messages[0].content) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x | length }}"
)
LONG = "{% set x = messages[0].content * 1000 %}{% for i in range(99999) %}{{ x }}{% endfor %}"
POWER = "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}"
MESSAGES = [{"role": "user", "content": "hello"}]
FINE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates have little time."""
    monkeypatch.setattr(templates, "RENDER_S", 0.3)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("template", [NESTED, GROWS, LONG, POWER], ids=["loops", "memory", "text", "power"])
def test_a_template_that_costs_too_much_is_ended_and_the_next_one_is_rendered(template: str) -> None:
    with pytest.raises(RenderingTooLong, match="chat template needs more than") as caught:
        TemplateChat(template, {}, {}).segments(MESSAGES, False)
    assert isinstance(caught.value, ArgumentError) and caught.value.argument == "messages"
    assert TemplateChat(FINE, {}, {}).segments(MESSAGES, False) == ["hello"]


@pytest.mark.usefixtures("hasty")
def test_a_template_that_cannot_be_compiled_in_time_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ConfigError, match="needs more than"):
        TemplateChat("{{ 9 ** (9 ** 9) }}", {}, {})


@pytest.mark.usefixtures("hasty")
def test_a_continuation_that_costs_too_much_is_not_taken_as_refused() -> None:
    slow_once_continued = "{% if messages | length > 1 %}" + NESTED + "{% endif %}" + FINE
    tokenizer = _tokenizer_with(slow_once_continued)
    with pytest.raises(RenderingTooLong):
        tokenizer[0].stable_messages(MESSAGES)


_folders: dict[str, Path] = {}


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    _folders["all"] = tmp_path_factory.mktemp("templates")


def _tokenizer_with(template: str) -> tuple:  # type: ignore[type-arg]
    place = _folders["all"] / str(len(list(_folders["all"].iterdir())))
    place.mkdir()
    train_byte_level().save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return load_tokenizer(str(place)), str(place)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_the_event_loop_renders_no_template_and_goes_on() -> None:
    tokenizer, path = _tokenizer_with(FINE)
    rules = PromptRules(tokenizer.vocab_size, 8192, 16)
    asked: list[str] = []

    async def test() -> None:
        intake = Intake(tokenizer, rules, path)
        try:
            spoken = json.dumps({"messages": MESSAGES}).encode()
            for model in (LookupRequest, ChatRequest):
                assert intake.read_now("a", spoken, model) is None
            read = intake.read_now("a", b'{"prompt": "hello there, everyone here"}', LookupRequest)
            assert read is not None, "other prompts are read on the loop as before"
            ticks, is_over = 0, False

            async def tick() -> None:
                nonlocal ticks
                while not is_over:
                    ticks += 1
                    await asyncio.sleep(0.001)

            ticking = asyncio.create_task(tick())
            reading = await finished(intake.read("a", spoken, ChatRequest))
            is_over = True
            await ticking
            assert reading.prompts[0].num_tokens and ticks > 1
        finally:
            intake.close()

    original = templates.render
    templates.render = lambda *args: asked.append("here") or original(*args)  # type: ignore[func-returns-value, assignment]
    try:
        asyncio.run(test())
    finally:
        templates.render = original
    assert not asked, "rendered in a process that reads bodies"


@pytest.mark.slow
def test_a_slow_template_refuses_the_conversation_in_the_service_too() -> None:
    tokenizer, path = _tokenizer_with(
        "{% if messages[0].content == 'slow' %}" + NESTED + "{% endif %}" + FINE
    )

    async def test() -> None:
        intake = Intake(tokenizer, PromptRules(tokenizer.vocab_size, 8192, 16), path)
        try:
            slow = json.dumps({"messages": [{"role": "user", "content": "slow"}]}).encode()
            with pytest.raises(ApiError, match="chat template needs more") as caught:
                await finished(intake.read("a", slow, ChatRequest))
            assert caught.value.status == 422 and caught.value.body["field"] == "messages"
            fine = json.dumps({"messages": MESSAGES}).encode()
            assert (await finished(intake.read("a", fine, ChatRequest))).prompts[0].num_tokens
        finally:
            intake.close()

    asyncio.run(test())


def test_the_process_gets_no_secret_and_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_FLEET_SECRET", "pa55word")
    code = (
        "from radixkv.tokenizer import templates\n"
        "assert templates.render('{{ x }}', {'x': 'y'}) == 'y'\n"
        "p = templates._process._process.pid\n"
        "print(p, b'pa55word' in open(f'/proc/{p}/environ', 'rb').read())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    pid, has_secret = found.stdout.split()
    assert has_secret == "False" and not Path(f"/proc/{pid}").exists() and not found.stderr


def test_a_fork_renders_in_a_process_of_its_own() -> None:
    assert templates.render("{{ x }}", {"x": "before"}) == "before"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writing, "w") as out:
            out.write(templates.render("{{ x }}", {"x": "in the child"}))
        templates._process.close()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert told.read() == "in the child"
    assert os.waitpid(child, 0)[1] == 0
    assert templates.render("{{ x }}", {"x": "after"}) == "after"
