"""The code and the commands in the documents run as printed.

The language of a block decides how it is run:

    python          executed, all blocks of a document in order in one namespace. PRELUDES defines the names that a
                    reader has to define.
    console         each line after "$ " runs in bash, in order, against a demo server. Its working directory belongs
                    to the document and holds READERS_FILES. http://127.0.0.1:8400 is replaced by the server's address.
    text            not run, except for lines that begin with "curl "
    json            compared with the answers of the "curl " lines above: names and types
    acl             not run

Any other language fails. The line above the fence says why a block can't run:

    <!-- not run: needs a GPU -->

A line of a console block that can't run matches a pattern of NOT_RUN, which has the reason. Commands of radixkv and
make are always checked, in blocks and in the text: the subcommand, each option and each target exist.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from radixkv.cli.main import commands
from tests.docs.blocks import DOCUMENTS, ROOT, Block, blocks_in, blocks_of, commands_in_text, not_run
from tests.service.running import Process, served
from tests.waiting import LIMIT_S

SHOWN = {"text", "json", "acl"}
ADDRESS = "http://127.0.0.1:8400"
PRELUDES = {
    "docs/guides/security.md": """
from audit_your_engine import Adapter as MyAdapter
from radixkv import CacheConfig, Namespace, PrefixCache
alert, model, ids = print, "llama-3-8b@4c2f", list(range(100))
cache = PrefixCache(CacheConfig(num_blocks=64, block_size=16))
""",
    "docs/guides/providers.md": """
from radixkv.service.local import demo_service
URL = stack.enter_context(demo_service(**{"num-blocks": "1024", "threads": "1"}))
KEY, MODEL = "demo-acme", "radixkv-demo"
RULES = "Answer politely, and name the page of the manual. " * 20
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
    f"examples/prompts/{name}": (ROOT / "examples/prompts" / name).read_text()
    for name in ("support.txt", "sales.txt")
}
"""What the commands read in a checkout."""
FAILED = """set -Eeuo pipefail
trap 'echo "failed: $BASH_COMMAND" >&2' ERR
"""


def run_python(document: str) -> None:
    """Execute the Python blocks of a document."""
    with ExitStack() as stack:
        namespace: dict[str, Any] = {"__name__": document, "stack": stack}
        exec(compile(PRELUDES.get(document, ""), f"the prelude of {document}", "exec"), namespace)
        for block in blocks_of(document):
            if block.language == "python" and block.not_run is None:
                code = "\n" * (block.line - 1) + block.text  # a traceback has the document's line numbers
                exec(compile(code, document, "exec", dont_inherit=True), namespace)


def problem(block: Block) -> str | None:
    """Return why this module can't run a block, or None."""
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


def unknown_name(line: str) -> str | None:
    """Return the unknown name in a command of radixkv or make, or None."""
    words = shlex.split(line.replace("…", " "), comments=True)
    words = words[next((at for at, word in enumerate(words) if "=" not in word), 0) :]
    if words and words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"make has no target {word}" for word in words[1:2] if word not in targets), None)
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        return None if find_spec(words[2]) else f"there is no module {words[2]}"
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
    """Return the names and types of a JSON value."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory where the README's commands run and the demo records its trace."""
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="module")
def demo(folder: Path) -> Iterator[Process]:
    with served(folder / "log", "--record", str(folder / "traffic.jsonl")) as process:
        yield process


class Reader:
    """Runs the commands of a document in a shell, as a reader does."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        for name, content in READERS_FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        (folder / "bin").mkdir(exist_ok=True)
        command = folder / "bin" / "radixkv"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m radixkv "$@"\n')
        command.chmod(0o755)
        self.exported = folder / "exported"
        self.exported.touch()

    def run(self, block: Block, lines: list[str]) -> str:
        """Return the output of the lines. Later calls see the variables that they export."""
        script = "\n".join([FAILED, f". {self.exported}", *lines, f"export -p >{self.exported}"])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RADIXKV_")}
        environment["PATH"] = f"{self.folder / 'bin'}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script.replace(ADDRESS, self.url)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=environment,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{block}: {done.stderr or done.stdout}"
        return done.stdout


def run_console(document: str, reader: Reader) -> None:
    """Run the console blocks and the curl lines of a document. Compare the json blocks with the answers."""
    answers: list[str] = []
    for block in blocks_of(document):
        if block.not_run is not None:
            continue
        if block.language == "console":
            lines = [line for line in block.commands() if not_run(line) is None]
            reader.run(block, lines)
        elif block.language == "text":
            joined = block.text.replace("\\\n", " ")
            curls = [line for line in joined.splitlines() if line.startswith("curl ")]
            answers += reader.run(block, curls).splitlines() if curls else []
        elif block.language == "json":
            for line in block.text.splitlines():
                assert answers, f"{block}: no answer is left for this block"
                assert shape(json.loads(line)) == shape(json.loads(answers.pop(0))), f"{block}: {line}"
    assert not answers, f"{document}: answers without a json block: {answers}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_can_run_or_has_a_reason_not_to(document: str) -> None:
    assert [found for block in blocks_of(document) if (found := problem(block))] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_options_exist(document: str) -> None:
    lines = [
        line for block in blocks_of(document) if block.language == "console" for line in block.commands()
    ]
    assert {
        line: found for line in [*lines, *commands_in_text(document)] if (found := unknown_name(line))
    } == {}


@pytest.mark.release
@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_runs(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    run_python(document)


@pytest.mark.release
@pytest.mark.parametrize("document", ["README.md", *(each for each in DOCUMENTS if each != "README.md")])
def test_commands_run(document: str, demo: Process, folder: Path, tmp_path: Path) -> None:
    run_console(document, Reader(folder if document == "README.md" else tmp_path, demo.url))


@pytest.mark.slow
def test_the_factory_in_the_security_guide_is_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block, saved as the file that the command names, and that command with fewer lives."""
    blocks = blocks_of("docs/guides/security.md")
    (factory,) = (each for each in blocks if "def make_cache" in each.text)
    (command,) = (line for each in blocks for line in each.commands() if "--cache" in line)
    (tmp_path / "my_cache.py").write_text(factory.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("radixkv.audit.inprocess.policy_names", lambda: ("lru",))
    few = ["--examples", "2", "--steps", "5"]
    done = CliRunner().invoke(commands, [*shlex.split(command)[1:], *few])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "my_cache:make_cache: isolated"
    assert "my_cache:make_cache" in (tmp_path / "report.html").read_text()


# --- the tests above find errors


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
def test_a_block_that_cannot_run_is_found(text: str, found: str | None) -> None:
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
        ("python -m benchmarks.policies --rounds 2", None),
        ("python -m benchmarks.polices", "polices"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, found: str | None) -> None:
    assert unknown_name(line) is None if found is None else found in str(unknown_name(line))


@pytest.mark.release
def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
    reader = Reader(tmp_path, "http://127.0.0.1:9")
    block = Block("some.md", 1, "console", "", None)
    assert reader.run(block, ["export WORD=heard", "true"]) == ""
    assert reader.run(block, ['echo "$WORD"']) == "heard\n"
    with pytest.raises(AssertionError, match="failed: false"):
        reader.run(block, ["true", "false", "true"])
