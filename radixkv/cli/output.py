"""Options and output that the commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from math import isnan
from typing import Any, NoReturn

import click

from radixkv.configuration.errors import each_of
from radixkv.errors import ArgumentError, ConfigError, MissingExtra, RadixKVError, require_extra
from radixkv.tables import columns

DEFAULT_URL = "http://127.0.0.1:8400"
Command = Callable[..., Any]

EXAMPLES = "Examples:"


def examples(*lines: str) -> str:
    """Return the epilog of a command: its examples, one a line, at the end of ``--help``."""
    return "\n".join(["\b", EXAMPLES, *(f"  {line}" for line in lines)])  # \b: click doesn't wrap the lines


def int_option(
    name: str, default: int, help: str, *, least: int = 1, most: int | None = None
) -> Callable[[Command], Command]:
    """An option for an integer from ``least`` to ``most``."""
    return click.option(name, type=click.IntRange(least, most), default=default, show_default=True, help=help)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
seed_option = int_option("--seed", 0, "Seed of all random choices.", least=0)


class NewFile(click.Path):
    """The path of a file to write. A path that can't be written is refused before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path as given."""
        from pathlib import Path

        path = str(super().convert(value, param, ctx))
        folder = Path(path).parent
        if not os.access(folder, os.W_OK):
            said = f"File {path!r} can't be written: '{folder}' is not a writable directory."
            self.fail(said, param, ctx)
        return path


class Number(click.FloatRange):
    """A number within bounds. ``FloatRange`` alone allows NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def needs_extra(extra: str, *, unless: str | None = None) -> Callable[[Command], Command]:
    """If the extra isn't installed, end the command with one line before it does anything.

    ``unless``: an option with which the command doesn't need it.
    """

    def add(command: Command) -> Command:
        @wraps(command)
        def checked(*arguments: Any, **options: Any) -> Any:
            if unless is None or options.get(unless) is None:
                require_extra(click.get_current_context().command_path, extra)
            return command(*arguments, **options)

        return checked

    return add


def client_options(command: Command) -> Command:
    """``--url`` and ``--key``."""
    options = (
        click.option(
            "--url",
            envvar="RADIXKV_URL",
            default=DEFAULT_URL,
            show_default=True,
            help="Base URL of the service.",
        ),
        click.option(
            "--key",
            envvar="RADIXKV_KEY",
            help="Key of a tenant or of the operator.  [on loopback a demo key]",
        ),
    )
    for option in options:
        command = option(command)
    return command


def socket_options(*, required: bool = False) -> Callable[[Command], Command]:
    """``--socket`` and ``--engine-keys``: an engine's control channel in place of a service."""

    def add(command: Command) -> Command:
        for option in (
            click.option(
                "--engine-keys",
                envvar="RADIXKV_ENGINE_KEYS",
                metavar="FILE",
                required=required,
                help="With --socket: keys that `radixkv keys derive` wrote.",
            ),
            click.option(
                "--socket",
                envvar="RADIXKV_SOCKET",
                metavar="PATH",
                required=required,
                help="Control socket of an engine, in place of --url.",
            ),
        ):
            command = option(command)
        return command

    return add


def print_json(document: object) -> None:
    """Print a document on stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


@contextmanager
def progress_bar(length: int, label: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal. The function takes how much is done in total."""
    with click.progressbar(
        length=length, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as bar:
        yield lambda done: bar.update(done - bar.pos)


@contextmanager
def counter(what: str) -> Iterator[Callable[[int], None]]:
    """A running count on stderr, if that is a terminal, for work of unknown length."""
    shown = sys.stderr.isatty()

    def count(done: int) -> None:
        if shown:
            click.echo(f"\r{done} {what}", err=True, nl=False)

    yield count
    if shown:
        click.echo(err=True)


def print_result(result: dict[str, Any], table: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    """Print a result as JSON, or as the text that ``table`` makes of it."""
    if as_json:
        print_json(result)
    else:
        click.echo(table(result))


def listed(text: str | None) -> list[str] | None:
    """Return the parts of ``a, b``."""
    return None if text is None else [name.strip() for name in text.split(",")]


def table(rows: Sequence[Mapping[str, Any]], names: Sequence[str], *, left: bool = False) -> str:
    """Return rows as text: the first column aligned left, the others right; ``left``: all left."""
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    return columns(cells, num_left=len(names) if left else 1)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def find_in_working_directory(policies: str | None) -> None:
    """If a policy is named as package.module:Class, search the working directory too, as the last one."""
    from pathlib import Path

    here = str(Path.cwd())
    if policies is not None and ":" in policies and here not in sys.path:
        sys.path.append(here)


def finish(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line, by default the process's, then end the process with the exit code.

    An error is one line on stderr, and so is each invalid setting. The code is 2 for what the user can correct, 1 for
    what failed.
    """
    try:
        code = command.main(args=arguments, prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        code = 2
    except click.ClickException as error:
        code = _complain(name, error.format_message(), error.exit_code)
    except ConfigError as error:
        for each in each_of(error):
            code = _complain(name, str(each), 2)
    except (ArgumentError, MissingExtra) as error:
        code = _complain(name, str(error), 2)
    except (RadixKVError, OSError) as error:  # OSError: output that can't be written
        code = _complain(name, str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        code = _complain(name, "stopped", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(name: str, message: str, code: int) -> int:
    click.echo(f"{name}: " + " ".join(message.split()), err=True)
    return code
