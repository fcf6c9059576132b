"""``radixkv audit run``: audits a library in this process, a server, or an engine's live cache."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from radixkv import __version__
from radixkv.cli.engine import audit_of
from radixkv.cli.output import (
    NewFile,
    examples,
    json_option,
    needs_extra,
    print_json,
    progress_bar,
    socket_options,
    table,
)
from radixkv.clock import monotonic
from radixkv.config import CacheConfig
from radixkv.errors import ArgumentError, ConfigError, RadixKVError

if TYPE_CHECKING:
    from radixkv.audit.limit import Limit
    from radixkv.audit.verdict import AuditReport

LIMIT_S = 150.0
"""The time of a run without --thorough: with start and report it is three minutes at most, on a busy machine too."""
QUIET_S = 10.0
"""Without a terminal, a line says after so many seconds how far a check is."""
JSON_QUIET_S = 30.0
"""With --json, programs read the output: without a terminal, a run that is shorter than this writes no line."""
Progress = Callable[[str, int, int], None]


@click.group(epilog=examples("radixkv audit run --html report.html"))
def audit() -> None:
    """Audit the isolation of tenants."""


@audit.command(
    "run",
    short_help="Audit a library or a server.",
    epilog=examples(
        "radixkv audit run --html report.html",
        "radixkv audit run --url http://127.0.0.1:8400 --key KEY_OF_A --key KEY_OF_B --no-timing",
        "radixkv audit run --url http://127.0.0.1:8000 --salt SALT_OF_A --salt SALT_OF_B --thorough",
    ),
)
@socket_options()
@click.option(
    "--cache",
    metavar="MODULE:FACTORY",
    help="Audit the caches that this factory makes.  [radixkv:PrefixCache]",
)
@click.option("--url", help="Audit the server at this base URL: radixkv, or an OpenAI-compatible one.")
@click.option("--key", "keys", multiple=True, help="With --url: the keys of two tenants, --key A --key B.")
@click.option(
    "--salt",
    "salts",
    multiple=True,
    help="With --url, for engines without keys: two salts, sent as cache_salt, --salt A --salt B.",
)
@click.option("--model", help="With --url: the model in requests.  [the first that the server lists]")
@click.option(
    "--thorough",
    is_flag=True,
    help="No limit of time, ten times the random sequences, six times the timed requests and a margin of 0.02.  "
    "[at most three minutes, and a margin of 0.05]",
)
@click.option(
    "--examples",
    type=click.IntRange(1),
    help="Random sequences of calls to try.  [200; 2000 with --thorough]",
)
@click.option(
    "--steps", type=click.IntRange(1), default=50, show_default=True, help="Most calls in a sequence."
)
@click.option(
    "--probes",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="With --url: prompts of each probe.",
)
@click.option(
    "--samples",
    type=click.IntRange(20),
    help="With --url: timed requests of each kind.  [1200; 7200 with --thorough]",
)
@click.option(
    "--control",
    type=click.IntRange(20),
    default=250,
    show_default=True,
    help="With --url: most timed own hits, and as many own misses, for the control.",
)
@click.option(
    "--prompt-words",
    type=click.IntRange(1),
    default=24,
    show_default=True,
    help="With --url: words in a prompt.",
)
@click.option(
    "--no-timing",
    is_flag=True,
    help="With --url: skip the timing checks 9, 10 and 12; the report names them.",
)
@click.option("--operator-key", help="With --url: the operator's key, to probe bases; only for radixkv.")
@click.option("--adapter", help="With --url: an adapter of the server.  [a made-up name]")
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    help="With --url: names of the tenants, in the order of the keys.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random choices."
)
@click.option("--html", type=NewFile(), help="Write the report to this HTML file.")
@json_option
@needs_extra("audit", unless="socket")
def audit_run(
    url: str | None,
    socket: str | None,
    engine_keys: str | None,
    html: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Audit a library's caches in this process, or a server with the keys of two of its tenants.

    With --socket: check the laws of an engine's live cache, and nothing else. The exit code is 1 if one is broken.

    Use tenants made for the audit: it clears their caches. If a tenant has cached prefixes before, they stay, and the
    checks that would clear them are not done.

    A run takes three minutes at most, if not --thorough. What doesn't fit is not checked. Ctrl-C and SIGTERM end it
    too, with the report and the exit code of what is known by then.

    Exit codes: 0 isolated, 1 leaks, 3 inconclusive, 4 instrument blind, 5 no verdict (the audit failed), 6 isolated in
    what was checked (some checks were not done; the report names them).
    """
    if socket is not None:
        if url is not None or options["cache"] is not None or html is not None:
            raise ConfigError("--socket", socket, "--socket without --url, --cache and --html")
        raise click.exceptions.Exit(0 if audit_of(socket, engine_keys, as_json) else 1)
    from radixkv.audit.limit import Limit

    limit = Limit(None if options["thorough"] else LIMIT_S)
    try:
        with (
            _ended_by_signals(limit),
            _phases(first_line_after_s=JSON_QUIET_S if as_json else 0.0) as progress,
        ):
            if url is None:
                report = _audit_cache(options, progress, limit)
            else:
                report = _audit_server(url, options, progress, limit)
    except (ConfigError, ArgumentError):
        raise
    except RadixKVError as error:
        raise _NoVerdict(str(error)) from error
    if html is not None:
        from pathlib import Path

        from radixkv.audit.page import page

        Path(html).write_text(page(report), "utf-8")
    if as_json:
        print_json(report.as_dict())
    else:
        click.echo(shown(report))
    raise click.exceptions.Exit(report.exit_code)


class _NoVerdict(click.ClickException):
    """The audit could not be made. No verdict has this exit code."""

    exit_code = 5


def shown(report: AuditReport) -> str:
    """Return the report as text: what leaks first, then what else was seen, then what was not checked."""
    rows = [{**each.as_dict(), "verdict": each.verdict or "measured"} for each in report.evidence]
    seen = [f"{each.number} {each.name}: {each.detail}" for each in report.evidence]
    left_out = [f"not checked: {each.number} {each.name}: {each.detail}" for each in report.not_checked]
    parts = [
        [table(rows, ("name", "check", "verdict", "seconds"))] if rows else [],
        seen,
        [f"tried: {report.tried}"] if report.tried else [],
        [*left_out, f"{report.target}: {report.verdict}"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


@contextmanager
def _ended_by_signals(limit: Limit) -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM stop the audit, which then reports what it knows. A third one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
    received = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 2:
            raise KeyboardInterrupt
        limit.stop(names[signal.Signals(number)])

    before = {each: signal.signal(each, stop) for each in names}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _phases(first_line_after_s: float) -> Iterator[Progress]:
    """Show on stderr how far each check is: by bars on a terminal, otherwise by lines.

    A line is written when a check begins, and then every QUIET_S. The first one is written after so many seconds.
    """
    if not sys.stderr.isatty():
        yield _lines(monotonic() + first_line_after_s)
        return
    with ExitStack() as bars:
        current: tuple[str, Callable[[int], None]] | None = None

        def advance(phase: str, done: int, of: int) -> None:
            nonlocal current
            if current is None or current[0] != phase:
                bars.close()
                current = phase, bars.enter_context(progress_bar(of, phase))
            current[1](done)

        yield advance


def _lines(first_at: float) -> Progress:
    current, next_at = "", first_at

    def advance(phase: str, done: int, of: int) -> None:
        nonlocal current, next_at
        now = monotonic()
        if now >= next_at or (phase != current and now >= first_at and done < of):
            how_far = f": {done} of {of}" if of > 1 else ""
            click.echo(f"audit: {phase}{how_far}", err=True)
            current, next_at = phase, now + QUIET_S

    return advance


def _audit_cache(options: Mapping[str, Any], progress: Progress, limit: Limit) -> AuditReport:
    for name in ("keys", "salts", "operator_key", "adapter", "tenants"):
        if options[name]:
            singular = {"keys": "key", "salts": "salt", "tenants": "tenant"}.get(name, name)
            option = f"--{singular.replace('_', '-')}"
            raise ConfigError(option, "given", f"{option} only with --url")
    name = options["cache"] or "radixkv:PrefixCache"
    factory = _factory(name)
    from radixkv.audit import inprocess

    usual = inprocess.THOROUGH_EXAMPLES if options["thorough"] else inprocess.EXAMPLES
    return inprocess.run(
        factory,
        target=name,
        version=__version__,
        examples=options["examples"] or usual,
        steps=options["steps"],
        seed=options["seed"],
        progress=progress,
        limit=limit,
    )


def _factory(name: str) -> Callable[..., Any]:
    """Return the object that ``module:factory`` names. The working directory is searched too."""
    from importlib import import_module
    from pathlib import Path

    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory: Callable[..., Any] = getattr(import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError("--cache", name, f"MODULE:FACTORY that can be imported ({error})") from None
    _require_makes_caches(factory, name)
    return factory


def _require_makes_caches(factory: Callable[..., Any], name: str) -> None:
    allowed = "a factory of caches, with the arguments of radixkv:PrefixCache: a CacheConfig, clock and scrub_blocks"
    try:
        made = factory(CacheConfig(num_blocks=2), clock=monotonic, scrub_blocks=lambda _: None)
    except Exception as error:
        raise ConfigError("--cache", name, f"{allowed} ({type(error).__name__}: {error})") from error
    missing = [call for call in ("match", "open", "snapshot") if not hasattr(made, call)]
    if missing:
        raise ConfigError("--cache", name, f"{allowed} (a {type(made).__name__} has no {', '.join(missing)})")


def _audit_server(url: str, options: Mapping[str, Any], progress: Progress, limit: Limit) -> AuditReport:
    if options["cache"]:
        raise ConfigError("--cache", options["cache"], "either --cache or --url")
    _require_two_sides(options["keys"], options["salts"])
    tenants = options["tenants"]
    if len(tenants) not in (0, 2):
        raise ConfigError(
            "--tenant", len(tenants), "the names of both tenants, --tenant A --tenant B, or no name"
        )
    from radixkv.audit import remote
    from radixkv.audit.timing import TimingPlan

    sides: Any = options["keys"]
    if options["salts"]:
        from radixkv.audit.target import Principal

        sides = tuple(Principal.salted(salt, next(iter(options["keys"]), None)) for salt in options["salts"])
    plan = TimingPlan(**{each: options[each] for each in ("control", "prompt_words", "seed")})
    if not options["thorough"]:
        plan = replace(plan, samples=remote.QUICK_SAMPLES, margin=remote.QUICK_MARGIN)
    if options["samples"] is not None:
        plan = replace(plan, samples=options["samples"])
    return remote.run(
        url,
        sides,
        plan,
        version=__version__,
        probes=options["probes"],
        timing=not options["no_timing"],
        options=remote.Options(
            options["model"], options["operator_key"], options["adapter"], tenants or (None, None)
        ),
        progress=progress,
        limit=limit,
    )


def _require_two_sides(keys: tuple[str, ...], salts: tuple[str, ...]) -> None:
    """Raise ConfigError unless there are the keys of two tenants, or two salts with at most one key for both."""
    if not salts:
        if len(keys) != 2 or keys[0] == keys[1]:
            raise ConfigError("--key", len(keys), "the keys of two tenants, --key A --key B")
        return
    if len(salts) != 2 or salts[0] == salts[1] or not all(salts):
        raise ConfigError("--salt", len(salts), "two different salts, --salt A --salt B")
    if len(keys) > 1:
        raise ConfigError("--key", len(keys), "with --salt at most one key, which both sides send")
