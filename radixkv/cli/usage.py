"""``radixkv usage show`` and ``export``: folders of usage records, also while a service writes to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final

import click

from radixkv.cli.output import examples, json_option, print_json, table
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.metering.folder import UsageFolder
    from radixkv.metering.records import Counts, Row

Command = Callable[..., Any]
_COLUMNS: Final = (
    "requests",
    "read",
    "from host",
    "from disk",
    "written",
    "uncached",
    "generated",
    "held token-s",
    "pinned token-s",
)
BY: Final = ("hour", "tenant", "key", "model", "kind")


class _Usage(click.Group):
    """The commands; one of earlier versions is refused by name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[:1] == ["verify"]:
            allowed = (
                "show or export: usage records are plain JSON lines, and have no MACs any more. What collects them can "
                "make changes evident; the version that wrote a folder still verifies it"
            )
            raise ConfigError("radixkv usage", "verify", allowed)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Usage,
    short_help="Sum usage records.",
    epilog=examples(
        "radixkv usage show /var/lib/radixkv/usage", "radixkv usage export /var/lib/radixkv/usage /srv/usage"
    ),
)
def usage() -> None:
    """Sum the usage records that `radixkv serve --usage` writes, and copy those of earlier versions."""


@usage.command(
    short_help="Copy records of an earlier version.",
    epilog=examples("radixkv usage export /var/lib/radixkv/usage /var/lib/radixkv/usage-2"),
)
@click.argument("folder")
@click.argument("new")
def export(folder: str, new: str) -> None:
    """Copy the records in FOLDER, which an earlier version of radixkv wrote, to the folder NEW.

    FOLDER stays as it is, and nothing in it is verified. Each record keeps its id: what NEW has is not copied again.
    NEW is made if it is missing. It can be that of `serve --usage`, which counts the copies from its next start on.
    """
    from radixkv.metering.appender import FILE_BYTES, MOST_AT_ONCE, UsageAppender
    from radixkv.metering.folder import DAY_S, UsageFolder

    with closing(UsageFolder(folder)) as old, closing(UsageFolder(new, writes=True)) as made:
        known = {each.id for each in made.records()}
        missing = (each for each in old.chained_records() if each.id not in known)
        with closing(UsageAppender(made, FILE_BYTES)) as appender:
            for day, records in groupby(missing, lambda each: each.time_s // DAY_S):
                while batch := [*islice(records, MOST_AT_ONCE)]:
                    appender.append(batch, day * DAY_S)
            appender.end()
        _tell_skipped(old)
        click.echo(f"{appender.num_synced:,} records copied to {made.path}, {len(known):,} were there")


@usage.command(
    short_help="Sum the records.",
    epilog=examples(
        "radixkv usage show /var/lib/radixkv/usage",
        "radixkv usage show /var/lib/radixkv/usage --by tenant,key --from 2026-01-01 --to 2026-02-01",
    ),
)
@click.argument("folder")
@click.option("--by", default="tenant", show_default=True, help=f"Columns to sum by: {', '.join(BY)}.")
@click.option("--tenant", help="Only this tenant.  [all]")
@click.option("--from", "start", metavar="TIME", help="Only requests from this time on, UTC.  [all]")
@click.option("--to", "end", metavar="TIME", help="Only requests before this time, UTC.  [all]")
@json_option
def show(folder: str, by: str, tenant: str | None, start: str | None, end: str | None, as_json: bool) -> None:
    """Sum the records in FOLDER. A record that is there twice counts once."""
    from radixkv.metering.folder import UsageFolder
    from radixkv.metering.records import Counts

    columns = _columns(by)
    start_s, end_s = _time("--from", start, 0.0), _time("--to", end, float("inf"))
    sums: dict[tuple[str, ...], Counts] = {}
    with closing(UsageFolder(folder)) as opened:
        for each in opened.records(start_s):
            if tenant in (None, each.tenant) and start_s <= each.time_s < end_s:
                place = tuple(_cell(each.row, column) for column in columns)
                sums[place] = sums.get(place, Counts()) + each.counts
        _tell_skipped(opened)
    rows = [
        {**dict(zip(columns, place, strict=True)), **_counts(counts)}
        for place, counts in sorted(sums.items())
    ]
    if as_json:
        print_json(rows)
    else:
        click.echo(table(rows, (*columns, *_COLUMNS)))


def _tell_skipped(folder: UsageFolder) -> None:
    if folder.num_skipped:
        problems = "\n".join(folder.problems)
        click.echo(f"{folder.num_skipped:,} lines are no records and don't count:\n{problems}", err=True)


def _columns(text: str) -> list[str]:
    found = [each.strip() for each in text.split(",")]
    if not set(found) <= set(BY) or len(set(found)) < len(found):
        raise ConfigError("--by", text, f"different ones of {', '.join(BY)}, with commas between them")
    return found


def _time(option: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(option, text, "a time such as 2026-01-31 or 2026-01-31T09:00:00Z") from None


def _cell(row: Row, column: str) -> str:
    if column == "hour":
        return f"{datetime.fromtimestamp(row.hour, UTC):%Y-%m-%dT%H:%MZ}"
    return str(getattr(row, column)) or "-"


def _counts(counts: Counts) -> dict[str, int]:
    values = (
        counts.requests,
        counts.read,
        counts.read_host,
        counts.read_disk,
        sum(counts.written.values()),
        counts.uncached,
        counts.generated,
        counts.held_token_ms // 1000,
        counts.pinned_token_ms // 1000,
    )
    return dict(zip(_COLUMNS, values, strict=True))
