"""``radixkv disk check``, ``repair``, ``forget`` and ``reset``: the folder of a disk tier, while no process uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from radixkv.cli.output import examples, json_option, needs_extra, print_json, progress_bar
from radixkv.cli.secret_files import secrets_in

if TYPE_CHECKING:
    from radixkv.tiers.disk.inspection import Inspection

Command = Callable[..., Any]

_ROWS = (
    ("num_good", "records that open"),
    ("num_free", "free slots"),
    ("num_orphaned", "records whose key was destroyed"),
    ("num_damaged", "damaged records"),
    ("num_torn", "damaged headers"),
    ("num_unreadable", "slots that the disk doesn't read"),
    ("num_tenants", "tenants with a key"),
    ("num_damaged_tenants", "damaged generations and keys"),
)


_MOST_SHOWN = 10
"""Tenants with a line of their own. ``--json`` has all."""


def _secret_options(*, required: bool) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        text = "File with the fleet's secret."
        for option in (
            click.option(
                "--previous",
                metavar="FILE",
                multiple=True,
                help="File with a previous secret. May be repeated, the latest first.",
            ),
            click.option(
                "--fleet-secret",
                envvar="RADIXKV_FLEET_SECRET",
                metavar="FILE",
                required=required,
                help=text if required else f"With --tenant: {text[0].lower()}{text[1:]}",
            ),
        ):
            command = option(command)
        return command

    return add


@click.group(
    short_help="Check, repair, forget or reset a disk tier's folder.",
    epilog=examples(
        "radixkv disk check /var/lib/radixkv --fleet-secret fleet.secret",
        "radixkv disk forget /var/lib/radixkv",
    ),
)
def disk() -> None:
    """Check, repair, forget or reset the folder of a disk tier, while no process uses it."""


@disk.command(
    short_help="Read and verify every record.",
    epilog=examples("radixkv disk check /var/lib/radixkv --fleet-secret fleet.secret"),
)
@click.argument("folder")
@_secret_options(required=True)
@json_option
@needs_extra("tiers")
def check(folder: str, fleet_secret: str, previous: tuple[str, ...], as_json: bool) -> None:
    """Read and decrypt every record in FOLDER. Changes no record. The exit code is 1 if something is damaged.

    Shows the tenants with the most records too, by their names in FOLDER: keyed digests.

    Damaged records do no harm: a tier that reads one counts it as a miss. A crash leaves some, of the last seconds.
    """
    found = _inspected(folder, fleet_secret, previous, repair=False)
    _show(found, as_json)
    raise click.exceptions.Exit(0 if found.is_good else 1)


@disk.command(
    short_help="Free the slots of damaged records.",
    epilog=examples("radixkv disk repair /var/lib/radixkv --fleet-secret fleet.secret"),
)
@click.argument("folder")
@_secret_options(required=True)
@json_option
@needs_extra("tiers")
def repair(folder: str, fleet_secret: str, previous: tuple[str, ...], as_json: bool) -> None:
    """Free the slots of all records in FOLDER that don't open. Shows what was found before.

    Forgets tenants whose generation is damaged: nobody knows what was purged.
    """
    _show(_inspected(folder, fleet_secret, previous, repair=True), as_json)


@disk.command(
    short_help="Forget all records, or those of a tenant.",
    epilog=examples(
        "radixkv disk forget /var/lib/radixkv",
        "radixkv disk forget /var/lib/radixkv --tenant acme --fleet-secret fleet.secret",
    ),
)
@click.argument("folder")
@click.option("--tenant", help="Forget only the records of this tenant.  [all tenants]")
@_secret_options(required=False)
@click.option("--yes", is_flag=True, help="Don't ask.")
@needs_extra("tiers")
def forget(
    folder: str, tenant: str | None, fleet_secret: str | None, previous: tuple[str, ...], yes: bool
) -> None:
    """Destroy the keys of the records in FOLDER, then remove the records. Asks first. Needs no secret for all of them.

    Purge a tenant of a running service with `radixkv purge`: it reaches every tier and replica.
    """
    from radixkv.errors import ConfigError
    from radixkv.tiers.disk import inspection

    if tenant is not None and fleet_secret is None:
        raise ConfigError("--fleet-secret", None, "with --tenant, a file with the fleet's secret")
    whose = "all tenants" if tenant is None else f"tenant {tenant!r}"
    if not yes:
        click.confirm(f"Forget the records of {whose} in {folder}?", abort=True, err=True)
    if tenant is None:
        size = inspection.forget(folder)
        click.echo(f"forgot all records in {folder}: {size / 1e6:,.1f} MB")
    else:
        num_records = inspection.forget_tenant(folder, secrets_in(fleet_secret, previous), tenant)
        click.echo(f"forgot {num_records} records of {whose} in {folder}")


@disk.command(
    short_help="Delete what a folder has, also if it is damaged.",
    epilog=examples("radixkv disk reset /var/lib/radixkv", "radixkv disk reset /var/lib/radixkv --yes"),
)
@click.argument("folder")
@click.option("--yes", is_flag=True, help="Don't ask.")
@needs_extra("tiers")
def reset(folder: str, yes: bool) -> None:
    """Show what FOLDER has, and delete it: keys first, then records. Asks first. Needs no secret, and no whole file.

    For a folder whose key file is damaged: nothing in it can be read. Also for the folder of --lossy-disk of an
    earlier version, with a disk tier for each dtype. The next start with it begins with an empty disk.
    """
    from radixkv.tiers.disk import inspection

    found = inspection.contents(folder)
    if not found:
        click.echo(f"{folder} has nothing to delete")
        return
    click.echo(f"{folder} has:")
    for name, (num_files, num_bytes) in found.items():
        click.echo(
            f"  {name:<14}{num_files:>8,} {'file ' if num_files == 1 else 'files'}{num_bytes:>20,} bytes"
        )
    if not yes:
        click.confirm("Delete all of it? No record can be read afterwards.", abort=True, err=True)
    inspection.forget(folder)
    click.echo(f"deleted {sum(num_files for num_files, _ in found.values()):,} files in {folder}")


def _inspected(folder: str, fleet_secret: str, previous: tuple[str, ...], *, repair: bool) -> Inspection:
    from radixkv.tiers.disk import inspection

    secrets = secrets_in(fleet_secret, previous)
    with progress_bar(1_000, "reading") as advance:
        return inspection.inspect(
            folder, secrets, repair=repair, progress=lambda done, of: advance(1_000 * done // of)
        )


def _show(found: Inspection, as_json: bool) -> None:
    if as_json:
        print_json({**found._asdict(), "is_good": found.is_good})
        return
    size = (
        f"{found.num_slots:,} slots for records of {found.record_bytes:,} bytes, "
        f"last written {found.written_s:,.0f} s ago"
    )
    lines = [f"{getattr(found, name):>10,}  {text}" for name, text in _ROWS]
    counts = list(found.records_of.items())
    lines += [f"{count:>10,}  records of tenant {tag}" for tag, count in counts[:_MOST_SHOWN]]
    if rest := counts[_MOST_SHOWN:]:
        lines.append(f"{sum(count for _, count in rest):>10,}  records of {len(rest):,} other tenants")
    click.echo("\n".join([size, *lines, "good" if found.is_good else "damaged"]))
