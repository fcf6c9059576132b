"""``radixkv keys derive`` and ``keys reload``, and what other commands do over an engine's control socket."""

from __future__ import annotations

from typing import Any

import click

from radixkv.cli.output import NewFile, examples, json_option, print_json, socket_options, table
from radixkv.cli.secret_files import secrets_in
from radixkv.engines.control.client import ControlClient
from radixkv.errors import ConfigError
from radixkv.signing import PURPOSES, KeySet


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
    keys = KeySet.derive(secrets_in(fleet_secret, previous), purposes or PURPOSES)
    keys.write(output)
    click.echo(f"keys of {', '.join(keys.purposes)} in {output}", err=True)


def connect(socket: str, engine_keys: str | None, timeout_s: float = 60.0) -> ControlClient:
    """Connect to an engine. Raises ConfigError, ControlError."""
    if engine_keys is None:
        raise ConfigError("--engine-keys", None, "a file that `radixkv keys derive` wrote")
    return ControlClient(socket, KeySet.load(engine_keys), timeout_s=timeout_s)


def stats_of(socket: str, engine_keys: str | None) -> dict[str, Any]:
    """Return what ``GET /v1/stats`` answers to an operator, of an engine."""
    with connect(socket, engine_keys) as client:
        return {**client.call("stats"), "tenants": list(client.tenants())}


def purge_of(
    tenant: str, socket: str, engine_keys: str | None, generation: int | None, timeout_s: float
) -> dict[str, Any]:
    """Purge a tenant of an engine. Returns what ``POST /v1/tenants/{tenant}/purge`` answers, and ``known``."""
    fields = {"tenant": tenant} if generation is None else {"tenant": tenant, "generation": generation}
    with connect(socket, engine_keys, timeout_s) as client:
        done = client.call("purge", fields)
    owed = bool(done.get("owed"))
    named = {"confirmed": [] if owed else [socket], "pending": [socket] if owed else [], "unconfirmed": []}
    state = {"generation": done["generation"], "complete": not owed, **named}
    return {"blocks": done["blocks"], **state, "owed": owed, "known": bool(done.get("known", True))}


def audit_of(socket: str, engine_keys: str | None, as_json: bool) -> bool:
    """Print the audit of an engine's live cache. Returns whether all laws hold."""
    with connect(socket, engine_keys, 3_600.0) as client:
        report = client.call("audit")
    if as_json:
        print_json(report)
    else:
        counted = ", ".join(f"{number} {name}" for name, number in report["counts"].items())
        found = [f"{each['law']}: {each['detail']}" for each in report["violations"]]
        held = "all laws hold" if report["ok"] else f"{report['num_violations']} violations"
        click.echo("\n".join([*found, f"{held}: {counted}; {report['seconds'] * 1e3:.1f} ms"]))
    return bool(report["ok"])


def show_keys(keys: list[dict[str, Any]], as_json: bool) -> None:
    """Print the ids of an engine's keys."""
    if as_json:
        print_json(keys)
        return
    rows = [{**each, "place": "previous" if each["place"] else "current"} for each in keys]
    click.echo(table(rows, ("id", "purpose", "place")))


@click.command(
    "reload",
    short_help="Let an engine read its keys again.",
    epilog=examples("radixkv keys reload --socket /run/radixkv/control.sock --engine-keys engine.keys"),
)
@socket_options(required=True)
@json_option
def reload_keys(socket: str, engine_keys: str, as_json: bool) -> None:
    """Let a running engine read its file of keys again, and list their ids. No key is sent."""
    with connect(socket, engine_keys) as client:
        show_keys(client.call("reload_keys")["keys"], as_json)
