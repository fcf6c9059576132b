"""The ``--help`` of each command ends with examples, and their command lines parse. Nothing is run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from radixkv.cli.main import commands
from radixkv.cli.output import EXAMPLES
from radixkv.service.options import RouteSettings, ServeSettings

FILES = {"keys.json": "{}", "fleet.secret": "s" * 32, "trace.jsonl": "", "models/llama/config.json": "{}"}
"""Files that examples name and that must exist when their command line is parsed."""


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from walk(each, (*path, name))


COMMANDS = dict(walk(commands, ("radixkv",)))


def examples_of(command: click.Command) -> list[str]:
    lines = (command.epilog or "").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("radixkv")]


def parsed(line: str) -> click.Context:
    """The context of the command that a line names, after click has parsed all of its words."""
    context = commands.make_context("radixkv", shlex.split(line)[1:])
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the examples, with FILES and without settings in the environment."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    for variable in [each for each in os.environ if each.startswith("RADIXKV_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_commands_are_found() -> None:
    assert ("radixkv", "bench", "ttft") in COMMANDS and len(COMMANDS) > 20


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_ends_with_examples(path: tuple[str, ...]) -> None:
    found = examples_of(COMMANDS[path])
    said = CliRunner().invoke(commands, [*path[1:], "--help"]).output.splitlines()
    assert 1 <= len(found) <= 3, "a command has one to three examples"
    end = [line.strip() for line in said[-len(found) - 1 :]]
    assert end == [EXAMPLES, *found], "each example is a line of its own, at the end"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_has_a_text_and_every_summary_fits(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert [each.name for each in options if not each.help] == []
    assert not command.get_short_help_str(45).endswith("..."), "the list of commands would cut it"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_examples_parse(folder: Path, path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    for line in examples_of(command):
        context = parsed(line)
        if isinstance(command, click.Group):
            assert shlex.split(line)[: len(path)] == list(path), (
                "an example of a group is one of its commands"
            )
        else:
            assert context.command is command, line
        settings = {"serve": ServeSettings, "route": RouteSettings}.get(str(context.command.name))
        if settings is not None:
            settings.parse({name.replace("_", "-"): value for name, value in context.params.items()})


def test_a_wrong_option_or_value_would_be_found(folder: Path) -> None:
    for line in (
        "radixkv stats --jsn",
        "radixkv purge",
        "radixkv bench fork --repeats no",
        "radixkv keys drop",
    ):
        with pytest.raises(click.UsageError):
            parsed(line)
