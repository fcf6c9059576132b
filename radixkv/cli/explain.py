"""``radixkv explain``: its options and output; ``radixkv.service.explanations`` does the work."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Final

import click

from radixkv.cli.output import examples, int_option, json_option, needs_extra, print_json
from radixkv.errors import ConfigError, shown

if TYPE_CHECKING:
    from radixkv.service.explanations.bodies import Api, Rendering, Request
    from radixkv.service.explanations.explain import Excerpt, Explanation, Finding
    from radixkv.service.explanations.lines import Span

MAX_EARLIER: Final = 64
"""Earlier requests that one request may be compared with."""
MAX_TOKENS: Final = 2**20
"""Tokens that a prompt may have."""
_APIS: Final = ("chat", "messages", "responses", "contents", "completions")
_MOST_WIDE: Final = 100


@click.command(
    short_help="Why a request misses the cache.",
    epilog=examples(
        "radixkv explain second.json --against first.json",
        "radixkv explain third.json --against first.json --against second.json --model models/llama",
        "radixkv explain last.json --against session.jsonl --json --no-content",
    ),
)
@click.argument("file")
@click.option(
    "--against",
    metavar="FILE",
    multiple=True,
    help="An earlier request. May be repeated, the oldest first. A .jsonl file has one request a line.",
)
@click.option(
    "--model", metavar="FOLDER", help="The model's folder, whose tokenizer counts.  [the demo's tokenizer]"
)
@click.option(
    "--against-model",
    metavar="FOLDER",
    help="The folder that served the earlier requests.  [that of --model]",
)
@click.option("--api", type=click.Choice(_APIS), help="The API of all bodies.  [as their fields say]")
@int_option("--block-size", 16, "Tokens of a block.", most=4096)
@click.option(
    "--prompt-rules",
    metavar="FILE",
    help="The file of rules that serve has.  [one rule, claude-code-billing]",
)
@click.option("--no-content", is_flag=True, help="Print no text of the bodies, only places and numbers.")
@json_option
@needs_extra("http")
def explain(
    file: str,
    against: tuple[str, ...],
    model: str | None,
    against_model: str | None,
    api: Api | None,
    block_size: int,
    prompt_rules: str | None,
    no_content: bool,
    as_json: bool,
) -> None:
    """Explain why the request in FILE doesn't find the prefix of an earlier one.

    FILE and the earlier requests are bodies as they were sent: JSON of a chat completion, a response, a message, of
    contents or a completion. "-" reads one from the standard input. Nothing is sent, and no server is needed.

    Prints where the prefix ends, each cause, what to change, and how many tokens that saves: computed, by rendering the
    changed requests.
    """
    from radixkv.service.explanations.explain import explain as explained
    from radixkv.service.problems import ApiError
    from radixkv.service.prompt_times import local_time, wall_clock

    now = local_time(None, wall_clock)
    rendering = _rendering(model, prompt_rules, block_size, now)
    earlier = rendering if against_model is None else _rendering(against_model, prompt_rules, block_size, now)
    if [file, *against].count("-") > 1:
        raise ConfigError("FILE", "-", "the standard input once")
    history = [
        _request(earlier, raw, name, api)
        for each in against
        for name, raw in _bodies(each, may_be_lines=True)
    ]
    if len(history) > MAX_EARLIER:
        raise ConfigError(
            "--against", len(history), f"at most {MAX_EARLIER} earlier requests: the latest ones"
        )
    ((name, raw),) = _bodies(file, may_be_lines=False)
    new = _request(rendering, raw, name, api)
    try:
        found = explained(new, history, block_size)
    except ApiError as error:
        raise _problem(file, str(error)) from None
    if as_json:
        print_json({"api": new.api, **found.document(with_content=not no_content)})
    else:
        click.echo("\n".join(_text(new, history, found, with_content=not no_content)))


# ---- reading


def _rendering(model: str | None, prompt_rules: str | None, block_size: int, now: str) -> Rendering:
    from radixkv.service.explanations.bodies import Rendering
    from radixkv.service.prompt_lines import DEFAULT_RULES, load
    from radixkv.service.prompt_times import NO_TIMES, Times
    from radixkv.service.prompts import PromptRules
    from radixkv.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    lines = DEFAULT_RULES if prompt_rules is None else load("--prompt-rules", Path(prompt_rules))
    rules = PromptRules(tokenizer.vocab_size, MAX_TOKENS, block_size, lines=lines)
    times = Times(now) if tokenizer.uses_clock else NO_TIMES
    return Rendering(tokenizer, rules, times)


def _bodies(path: str, *, may_be_lines: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each body of a file. Reads no more than the bounds allow."""
    from radixkv.service.limits import Limits

    most = Limits().max_body_bytes
    try:
        with sys.stdin.buffer if path == "-" else Path(path).open("rb") as opened:
            if not (may_be_lines and path.endswith(".jsonl")):
                yield path, _bounded(opened.read(most + 1), path, most)
                return
            for number in range(1, MAX_EARLIER + 2):
                line = opened.readline(most + 2)
                if not line:
                    return
                if line.strip():
                    yield f"{path}:{number}", _bounded(line.rstrip(b"\r\n"), f"{path}:{number}", most)
    except OSError as error:
        raise ConfigError("FILE", path, f"a file that can be read ({error.strerror})") from None
    raise ConfigError(
        "--against", path, f"at most {MAX_EARLIER} lines: the latest ones, with tail -n {MAX_EARLIER}"
    )


def _bounded(raw: bytes, name: str, most: int) -> bytes:
    if len(raw) > most:
        raise ConfigError("FILE", name, f"a body of at most {most} bytes")
    return raw


def _request(rendering: Rendering, raw: bytes, name: str, api: Api | None) -> Request:
    from radixkv.service.problems import ApiError

    try:
        return rendering.read(raw, api)
    except ApiError as error:
        raise _problem(name, str(error)) from None


def _problem(name: str, message: str) -> ConfigError:
    return ConfigError(_printable(name), None, "", problem=f"can't be explained: {_printable(message)}")


def _printable(text: str) -> str:
    """Return a text of a body without what a terminal could take for a command."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


# ---- writing


def _text(
    new: Request, history: Sequence[Request], found: Explanation, *, with_content: bool
) -> Iterator[str]:
    from radixkv.service.explanations.explain import num_blocks

    width = min(shutil.get_terminal_size((_MOST_WIDE, 24)).columns, _MOST_WIDE)
    yield from _wrapped(found.verdict, width)
    yield ""
    yield _row("this request", f"{found.num_tokens:,} tokens ({new.api})")
    if found.earlier is not None:
        which = "" if len(history) == 1 else f" {found.earlier + 1} of {len(history)}"
        api = history[found.earlier].api
        yield _row(f"earlier request{which}", f"{found.earlier_tokens:,} tokens ({api})")
        blocks = f"{num_blocks(found.matched_blocks)} of {found.block_size}"
        yield _row("found", f"{found.matched_tokens:,} tokens, {blocks}")
        yield _row("lost", f"{found.lost_tokens:,} tokens, {num_blocks(found.lost_blocks)}")
    if found.excerpt is not None and with_content:
        yield from ("", f"Their tokens differ from token {found.excerpt.offset:,} on:")
        yield from _excerpt(found.excerpt, width)
    for number, each in enumerate(found.findings, 1):
        yield ""
        yield from _finding(number, each, width, with_content=with_content)
    if found.num_more:
        yield from ("", f"{found.num_more} further differences are not explained.")
    if found.unrelated:
        names = ", ".join(_printable(name) for name in found.unrelated[:8])
        yield ""
        yield from _wrapped(f"These fields differ and cost nothing here: {names}.", width)


def _row(name: str, text: str) -> str:
    return f"  {name:<24}{text}"


def _excerpt(excerpt: Excerpt, width: int) -> Iterator[str]:
    for name, text in (
        ("both", excerpt.both),
        ("then, earlier", excerpt.earlier),
        ("then, now", excerpt.new),
    ):
        yield _row(name, _quoted(text, width - 26, from_end=name == "both"))


def _quoted(text: str, most: int, *, from_end: bool = False) -> str:
    text = text[-most // 2 :] if from_end else text
    return shown(text, max(most, 20))


def _finding(number: int, found: Finding, width: int, *, with_content: bool) -> Iterator[str]:
    from radixkv.service.explanations.explain import num_blocks

    difference = found.difference
    place = (
        f"at {difference.place or difference.earlier_place}, "
        if difference.place or difference.earlier_place
        else ""
    )
    span = (
        "" if difference.span is None else f", bytes {difference.span.new[0]:,} to {difference.span.new[1]:,}"
    )
    yield from _wrapped(f"{number}. {found.cause} {place}token {found.offset:,}{span}", width)
    yield from _wrapped(f"Why: {found.said}.", width, "   ")
    if with_content:
        for line in difference.lines:
            yield f"   earlier: {_quoted(line.earlier, width - 12)}"
            yield f"   now:     {_quoted(line.new, width - 12)}"
    saves = f"saves {found.saved_tokens:,} tokens, {num_blocks(found.saved_blocks)}"
    joint = "saves nothing without the next one"
    yield from _wrapped(f"Do: {found.change} This {joint if found.is_joint else saves}.", width, "   ")
    if with_content and found.rules:
        rules = ", ".join(
            f'"{each.name}": {{"starts_with": {json.dumps(each.starts_with)}, "lines": "all", "do": "move"}}'
            for each in found.rules
        )
        yield f"   Rules: {{{rules}}}"


def _spans(span: Span) -> str:
    (start, end), (earlier_start, earlier_end) = span.new, span.earlier
    earlier = "" if span.new == span.earlier else f", earlier {earlier_start:,} to {earlier_end:,}"
    return f", bytes {start:,} to {end:,}{earlier}"


def _wrapped(text: str, width: int, first: str = "", then: str | None = None) -> Iterator[str]:
    wrapper = TextWrapper(
        width, initial_indent=first, subsequent_indent=first if then is None else then, break_on_hyphens=False
    )
    yield from wrapper.wrap(_printable(text))
