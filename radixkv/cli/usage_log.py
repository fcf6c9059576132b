"""``radixkv usage verify`` and ``show``: the folder of a usage log, also while a service writes to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from radixkv.cli.output import examples, json_option, print_json, table
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.billing.usage_check import UsageCheck
    from radixkv.billing.usage_record import Counts, Row

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
_SAID: Final = {
    "intact": "intact: every line follows from the one before",
    "torn": "intact, with the torn end of a crash",
    "unproven": "UNPROVEN: the secret doesn't prove all lines",
    "truncated": "TRUNCATED: lines that were there are missing",
    "tampered": "TAMPERED: lines were changed, moved, added or removed",
}


@click.group(
    short_help="Check and sum usage records.",
    epilog=examples(
        "radixkv usage verify /var/lib/radixkv/usage", "radixkv usage show /var/lib/radixkv/usage"
    ),
)
def usage() -> None:
    """Check and sum the usage records that `radixkv serve --usage` writes."""


@usage.command(
    short_help="Check that no record was changed or removed.",
    epilog=examples(
        "radixkv usage verify /var/lib/radixkv/usage",
        "radixkv usage verify /var/lib/radixkv/usage --fleet-secret fleet.secret",
    ),
)
@click.argument("folder")
@click.option(
    "--fleet-secret", envvar="RADIXKV_FLEET_SECRET", metavar="FILE",
    help="File with the fleet's secret, if the service has one.  [the key in FOLDER]",
)  # fmt: skip
@click.option(
    "--previous",
    metavar="FILE",
    multiple=True,
    help="File with a previous secret. May be repeated.",
)
@click.option(
    "--trust-folder-key",
    is_flag=True,
    help="Accept lines that only the key in FOLDER proves: those from before the service had a secret.",
)
@json_option
def verify(
    folder: str, fleet_secret: str | None, previous: tuple[str, ...], trust_folder_key: bool, as_json: bool
) -> None:
    """Check the chain of MACs in FOLDER.

    The exit code is 1 if records were changed, are missing at the end, or aren't proven by a secret that was given. The
    oldest files may be gone. An older state of the whole folder isn't noticed.
    """
    from radixkv.billing import usage_check
    from radixkv.billing.usage_folder import key_from
    from radixkv.cli.secret_files import secrets_in

    keys = [key_from(secret) for secret in secrets_in(fleet_secret, previous)]
    found = usage_check.verify(folder, keys, trusts_folder_key=trust_folder_key)
    _show_check(found, as_json)
    raise click.exceptions.Exit(0 if found.verdict in ("intact", "torn") else 1)


def _show_check(found: UsageCheck, as_json: bool) -> None:
    if as_json:
        print_json({"verdict": found.verdict, **asdict(found)})
        return
    end = "ended" if found.is_ended else "not ended: a service writes to it, or was killed"
    by_folder_key = (
        f"{found.num_by_folder_key:,} lines are proven only by the key in the folder: "
        "anybody who can write to the folder could have made them"
    )
    click.echo("\n".join([
        _SAID[found.verdict],
        f"{found.num_records:,} records in {found.num_files:,} files, {end}",
        *([by_folder_key] if found.num_by_folder_key else []),
        *found.problems,
    ]))  # fmt: skip


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
    """Sum the records in FOLDER. Checks nothing: run `radixkv usage verify` before."""
    from radixkv.billing import usage_check
    from radixkv.billing.usage_record import Counts

    columns = _columns(by)
    start_s, end_s = _time("--from", start, 0.0), _time("--to", end, float("inf"))
    sums: dict[tuple[str, ...], Counts] = {}
    for each in usage_check.records(Path(folder), start_s, lambda problem: click.echo(problem, err=True)):
        if tenant in (None, each.tenant) and start_s <= each.time_s < end_s:
            place = tuple(_cell(each.row, column) for column in columns)
            sums[place] = sums.get(place, Counts()) + each.counts
    rows = [
        {**dict(zip(columns, place, strict=True)), **_counts(counts)}
        for place, counts in sorted(sums.items())
    ]
    if as_json:
        print_json(rows)
    else:
        click.echo(table(rows, (*columns, *_COLUMNS)))


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
