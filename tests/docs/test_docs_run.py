"""What the documents show runs, as it stands there.

How a block is run is said by its language:

    python          executed, all blocks of a document in order in one namespace. PRELUDES holds the names that the
                    text around says are the reader's own.
    console         each line after "$ " runs in bash, in order, in a folder of the document's own that holds
                    READERS_FILES, against a demo server; http://127.0.0.1:8400 stands for its address.
    text            shown, but lines that begin with "curl " run
    json            the shape (names and types) of what the "curl " lines before have answered
    acl             shown

Any other language fails. A block that can't run says so in the line above its fence:

    <!-- not run: needs a GPU -->

A line of a console block that can't run is matched by NOT_RUN, with the reason. Commands of radixkv and make are
checked in any case, in blocks and in the text: the subcommand, each option and each target exist.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from radixkv.cli.main import commands
from tests.docs.blocks import DOCUMENTS, ROOT, Block, blocks_in, blocks_of, commands_in_text
from tests.service.running import Process, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHOWN = {"text", "json", "acl"}
ADDRESS = "http://127.0.0.1:8400"
NOT_RUN = {
    r"make |python fuzz/": "sets up an environment, or takes minutes",
    r"(RADIXKV_COMPILE=0 )?pip install ": "installs; tests/packaging builds wheels and imports them",
    r"radixkv serve ": "goes on for ever; the demo server is one, and writes a trace with --record",
    r"radixkv audit run": "takes minutes; tests/cli runs it at fewer examples",
    r"radixkv .*--device cuda": "needs a GPU",
}
PRELUDES = {
    "docs/security.md": """
from audit_your_engine import Adapter as MyAdapter
from radixkv import CacheConfig, Namespace, PrefixCache
alert, model, ids = print, "llama-3-8b@4c2f", list(range(100))
cache = PrefixCache(CacheConfig(num_blocks=64, block_size=16))
""",
    "policies/README.md": """
from radixkv import CacheConfig, Namespace, PrefixCache, RequestHints, TokenRange
ns, ids = Namespace("acme", "llama-3-8b@4c2f"), list(range(100))
cache = PrefixCache(CacheConfig(num_blocks=64, block_size=16))
""",
    "kernels/README.md": """
import torch
from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache
layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
cache = PrefixCache(CacheConfig(num_blocks=256, block_size=16, layout=layout))
prompt = cache.open(Namespace("acme", "llama-3-8b@4c2f"), list(range(100)))
prompt.commit(100)
sequences = prompt.fork(4)
parents, token_ids = torch.arange(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
""",
}
READERS_FILES = {
    "prompts/support.txt": "Answer politely, and name the page of the manual. " * 20,
    "prompts/sales.txt": "Answer politely, and name the price. " * 20,
}
FAILED = """set -Eeuo pipefail
trap 'echo "failed: $BASH_COMMAND" >&2' ERR
"""


def run_python(document: str) -> None:
    """Execute the python blocks of a document."""
    namespace: dict[str, Any] = {"__name__": document}
    exec(compile(PRELUDES.get(document, ""), f"the prelude of {document}", "exec"), namespace)
    for block in blocks_of(document):
        if block.language == "python" and block.not_run is None:
            code = "\n" * (block.line - 1) + block.text  # so that a traceback has the document's lines
            exec(compile(code, document, "exec"), namespace)


def problem(block: Block) -> str | None:
    """Why a block is none of those that this file knows how to run."""
    if block.not_run is not None or block.language in ("python", "console"):
        return (
            None if block.language != "console" or block.commands() else f"{block}: no line begins with '$ '"
        )
    if block.language not in SHOWN:
        return f"{block}: the language {block.language!r} is unknown"
    hidden = [
        line for line in block.text.splitlines() if re.match(r"\$ |(radixkv (?!serves )|make |pip )", line)
    ]
    return f"{block}: commands belong in a console block: {hidden}" if hidden else None


def wrong(line: str) -> str | None:
    """What a command of radixkv or make names that doesn't exist."""
    words = shlex.split(line.replace("…", " "), comments=True)
    words = words[next((at for at, word in enumerate(words) if "=" not in word), 0) :]
    if words and words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"make has no target {word}" for word in words[1:2] if word not in targets), None)
    if not words or words[0] != "radixkv":
        return None
    found: click.Command = commands
    rest = words[1:]
    while isinstance(found, click.Group) and rest and not rest[0].startswith("-"):
        if rest[0] not in found.commands:
            return f"{found.name} has no command {rest[0]}"
        found = found.commands[rest.pop(0)]
    known = {"--help", "--version"}.union(*(each.opts + each.secondary_opts for each in found.params))
    options = {word.partition("=")[0] for word in rest if word.startswith("--")}
    return f"{found.name} has no option {options - known}" if options - known else None


def shape(value: Any) -> Any:
    """Names and types of a JSON value."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's commands run, and the demo records its trace."""
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="module")
def demo(folder: Path) -> Iterator[Process]:
    with served(folder / "log", "--record", str(folder / "traffic.jsonl")) as process:
        yield process


class Reader:
    """Somebody who pastes the commands of a document into a shell."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        for name, content in READERS_FILES.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)
        (folder / "bin").mkdir(exist_ok=True)
        command = folder / "bin" / "radixkv"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m radixkv "$@"\n')
        command.chmod(0o755)
        self.exported = folder / "exported"
        self.exported.touch()

    def run(self, block: Block, lines: list[str]) -> str:
        """What the lines print. Variables that they export are there for the next ones."""
        script = "\n".join([FAILED, f". {self.exported}", *lines, f"export -p >{self.exported}"])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RADIXKV_")}
        environment["PATH"] = f"{self.folder / 'bin'}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script.replace(ADDRESS, self.url)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=environment,
            timeout=300,
        )
        assert done.returncode == 0, f"{block}: {done.stderr or done.stdout}"
        return done.stdout


def run_console(document: str, reader: Reader) -> None:
    """Run the console blocks and the curl lines of a document; compare the json blocks with what those answered."""
    answers: list[str] = []
    for block in blocks_of(document):
        if block.not_run is not None:
            continue
        if block.language == "console":
            lines = [line for line in block.commands() if not any(re.match(each, line) for each in NOT_RUN)]
            reader.run(block, lines)
        elif block.language == "text":
            curls = [line for line in block.text.splitlines() if line.startswith("curl ")]
            answers += reader.run(block, curls).splitlines() if curls else []
        elif block.language == "json":
            for line in block.text.splitlines():
                assert answers, f"{block}: nothing has answered this"
                assert shape(json.loads(line)) == shape(json.loads(answers.pop(0))), f"{block}: {line}"
    assert not answers, f"{document}: answers that it doesn't show: {answers}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_can_be_run_or_says_why_not(document: str) -> None:
    assert [found for block in blocks_of(document) if (found := problem(block))] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_name_what_exists(document: str) -> None:
    lines = [
        line for block in blocks_of(document) if block.language == "console" for line in block.commands()
    ]
    assert {line: found for line in [*lines, *commands_in_text(document)] if (found := wrong(line))} == {}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_runs(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    run_python(document)


@pytest.mark.parametrize("document", ["README.md", *(each for each in DOCUMENTS if each != "README.md")])
def test_commands_run(document: str, demo: Process, folder: Path, tmp_path: Path) -> None:
    run_console(document, Reader(folder if document == "README.md" else tmp_path, demo.url))


# --- what the tests above would find


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```ruby\nputs 1\n```\n", "the language 'ruby' is unknown"),
        ("```\nplain\n```\n", "the language '' is unknown"),
        ("```console\nradixkv serve\n```\n", "no line begins with"),
        ("```text\n$ radixkv serve\n```\n", "belong in a console block"),
        ("<!-- not run: needs a GPU -->\n```ruby\nputs 1\n```\n", None),
        ("<!-- not run: -->\n```ruby\nputs 1\n```\n", "unknown"),
    ],
)
def test_a_block_that_nothing_runs_is_found(text: str, found: str | None) -> None:
    (block,) = blocks_in("some.md", text)
    assert found is None if problem(block) is None else found is not None and found in str(problem(block))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("radixkv serve --port 8500  # with --colour", None),
        ("radixkv serve --colour red", "--colour"),
        ("radixkv keys mislay", "mislay"),
        ("make nothing", "nothing"),
        ('make test PYTEST="tests/index -q"', None),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, found: str | None) -> None:
    assert wrong(line) is None if found is None else found in str(wrong(line))


def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
    reader = Reader(tmp_path, "http://127.0.0.1:9")
    block = Block("some.md", 1, "console", "", None)
    assert reader.run(block, ["export WORD=heard", "true"]) == ""
    assert reader.run(block, ['echo "$WORD"']) == "heard\n"
    with pytest.raises(AssertionError, match="failed: false"):
        reader.run(block, ["true", "false", "true"])
