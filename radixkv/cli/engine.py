"""``radixkv keys derive``: the keys of an engine that runs elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from radixkv.cli.output import NewFile, examples
from radixkv.errors import ConfigError
from radixkv.signing import MIN_SECRET_BYTES, PURPOSES, KeySet

_MAX_SECRET_BYTES = 65_536


@click.command(
    "derive",
    short_help="Write the keys that an engine needs.",
    epilog=examples(
        "radixkv keys derive --fleet-secret fleet.secret --output engine.keys",
        "radixkv keys derive --fleet-secret new.secret --previous fleet.secret --purpose salts --output engine.keys",
    ),
)
@click.option("--fleet-secret", metavar="FILE", required=True, help="File with the fleet's secret.")
@click.option(
    "--previous",
    metavar="FILE",
    multiple=True,
    help="File with a previous secret, whose keys are still accepted. May be repeated, the latest first.",
)
@click.option(
    "--purpose",
    "purposes",
    type=click.Choice(PURPOSES),
    multiple=True,
    help="Derive only this purpose's keys. May be repeated.  [all]",
)
@click.option("--output", type=NewFile(), required=True, help="Write the keys to this file, mode 0600.")
def derive_keys(fleet_secret: str, previous: tuple[str, ...], purposes: tuple[str, ...], output: str) -> None:
    """Derive an engine's keys from the fleet's secret, which can't be computed from them.

    To rotate the secret, derive with --previous for every engine and gateway. When all of them have the new file, and
    no request with an old salt runs, derive again without --previous.
    """
    secrets = [_secret("--fleet-secret", fleet_secret)]
    secrets += [_secret("--previous", each) for each in previous]
    keys = KeySet.derive(secrets, purposes or PURPOSES)
    keys.write(output)
    click.echo(f"keys of {', '.join(keys.purposes)} in {output}", err=True)


def _secret(option: str, path: str) -> bytes:
    """Return the secret in a file, as ``radixkv serve --fleet-secret`` reads it."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(option, path, f"a file that can be read ({error.strerror})") from None
    if not MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        allowed = f"a file that holds {MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES:,} bytes"
        raise ConfigError(option, path, allowed)
    return secret
