"""``radixkv warm``, ``stats``, ``keys`` and ``purge``: requests to a running service, some of them to an engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import click

from radixkv.cli.engine import connect, derive_keys, purge_of, reload_keys, show_keys, stats_of
from radixkv.cli.output import (
    Number,
    client_options,
    examples,
    json_option,
    needs_extra,
    print_json,
    progress_bar,
    socket_options,
    table,
)
from radixkv.errors import ConfigError
from radixkv.index.pins import MAX_TTL_S

_LOOK_AGAIN_S = 0.2


@click.command(
    short_help="Warm the prompts in files.",
    epilog=examples(
        "radixkv warm prompts/support.txt",
        "radixkv warm prompts.jsonl --salt support-v3 --replicas all --pin 3600",
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@client_options
@click.option("--salt", help="Name of one of the tenant's namespaces.")
@click.option("--adapter", help="Name of an adapter; its prefixes are separate.")
@click.option(
    "--replicas",
    default="self",
    show_default=True,
    help="self, all, a number (the best; others replace those that fail), or names: a,b.",
)
@click.option(
    "--pin",
    "pin_s",
    type=Number(0, MAX_TTL_S, min_open=True),
    metavar="SECONDS",
    help="Keep the prefixes resident there for this time.",
)
@click.option(
    "--day",
    type=click.Choice(("today", "tomorrow")),
    default="today",
    show_default=True,
    help="The date that the model's chat template shows: tomorrow prepares messages before midnight.",
)
@json_option
@needs_extra("http")
def warm(
    files: tuple[str, ...],
    url: str,
    key: str | None,
    salt: str | None,
    adapter: str | None,
    replicas: str,
    pin_s: float | None,
    day: str,
    as_json: bool,
) -> None:
    """Warm the prompts in FILEs: a text file is one prompt, a .jsonl file has one prompt in each line."""
    from radixkv.service.api_client import Client, sources

    found, where = sources(files), _where(replicas)
    given = {name: value for name, value in (("salt", salt), ("adapter", adapter)) if value is not None}
    if day != "today":
        given["day"] = day
    rows = []
    with Client(url, key) as client, progress_bar(1000 * len(found), "warming") as advance:
        for index, source in enumerate(found):
            fields = {**given, **source.fields, "replicas": where}
            result = client.warm(fields, lambda share, index=index: advance(int(1000 * (index + share))))  # type: ignore[misc]
            rows.append({"source": source.name, **result})
            if pin_s is not None:
                pin = client.call("POST", "/v1/pins", {**fields, "ttl_s": pin_s})
                rows[-1] |= {"pin": pin["id"], "pinned": pin["replicas"] or []}
    if as_json:
        print_json(rows)
    else:
        pinned = () if pin_s is None else ("pin",)
        columns = ("source", "tokens", "cached_before", "computed", "left_out", "seconds", *pinned)
        click.echo(table(rows, columns))
        if where != "self":
            click.echo("\n".join(_outcomes(rows)))
    failed = {
        what: sum(_num_failed(row.get(field, []), where) for row in rows)
        for what, field in (("warms", "replicas"), ("pins", "pinned"))
    }
    if any(failed.values()):
        said = " and ".join(f"{number} {what}" for what, number in failed.items() if number)
        raise click.ClickException(f"{said} on replicas failed")


def _where(text: str) -> str | int | list[str]:
    """Return the replicas in the form of a request."""
    if text in ("self", "all"):
        return text
    if text.isdecimal() and text.isascii():
        return int(text)
    return [name.strip() for name in text.split(",")]


def _num_failed(replicas: list[dict[str, Any]], where: str | int | list[str]) -> int:
    """Return how many replicas failed. If a number was requested, replaced replicas don't count."""
    num_done = len([each for each in replicas if each["state"] == "done"])
    num_wanted = where if isinstance(where, int) and replicas else len(replicas)
    return max(0, num_wanted - num_done)


def _outcomes(rows: list[dict[str, Any]]) -> list[str]:
    warmed = [
        f"{row['source']} on {each['replica']}: {each['state']}, "
        + (each["error"] or f"{each['tokens']} tokens, {each['computed']} computed")
        for row in rows
        for each in row.get("replicas", ())
    ]
    unpinned = [
        f"{row['source']} on {each['replica']}: not pinned, {each['error']}"
        for row in rows
        for each in row.get("pinned", ())
        if each["state"] != "done"
    ]
    return warmed + unpinned


@click.command(
    short_help="Print the statistics of tenants.",
    epilog=examples(
        "radixkv stats",
        "radixkv stats --key demo-operator --json",
        "radixkv stats --socket /run/radixkv/control.sock --engine-keys engine.keys",
    ),
)
@client_options
@socket_options()
@json_option
@needs_extra("http", unless="socket")
def stats(url: str, key: str | None, socket: str | None, engine_keys: str | None, as_json: bool) -> None:
    """Print the statistics of the key's tenant; with the operator's key or a socket those of all tenants."""
    if socket is not None:
        document = stats_of(socket, engine_keys)
    else:
        from radixkv.service.api_client import Client

        with Client(url, key) as client:
            document = client.call("GET", "/v1/stats")
    if as_json:
        print_json(document)
        return
    tenants = document.get("tenants", [document])
    if tenants:
        click.echo(table(tenants, tuple(tenants[0])))
    if "cache" in document:
        click.echo()
        click.echo(
            table([{"cache": name, "": value} for name, value in document["cache"].items()], ("cache", ""))
        )
    if tiers := document.get("tiers"):
        names = next(iter(tiers.values()))
        rows = [{"tier": name, **{tier: tiers[tier][name] for tier in tiers}} for name in names]
        click.echo()
        click.echo(table(rows, ("tier", *tiers)))
    if verdicts := document.get("tier_verdicts"):
        click.echo()
        for name, each in verdicts.items():
            reason = "" if each["reason"] is None else f" ({each['reason']})"
            click.echo(f"{name} is {each['worth']}{reason}: {each['text']}")


@click.group(
    short_help="Manage the keys of a service.",
    epilog=examples("radixkv keys list", "radixkv keys create acme"),
)
def keys() -> None:
    """Create, list, rotate and revoke keys of a running service, with the operator's key. Derive engines' keys."""


keys.add_command(derive_keys)
keys.add_command(reload_keys)


@keys.command(
    "list",
    short_help="List all keys.",
    epilog=examples("radixkv keys list", "radixkv keys list --url http://10.0.0.7:8400 --key KEY --json"),
)
@client_options
@socket_options()
@json_option
@needs_extra("http", unless="socket")
def list_keys(url: str, key: str | None, socket: str | None, engine_keys: str | None, as_json: bool) -> None:
    """List the id, prefix, owner and date of each key. Of an engine: the id, purpose and place of each of its keys."""
    if socket is not None:
        with connect(socket, engine_keys) as client:
            return show_keys(client.call("keys")["keys"], as_json)
    found = _asked(url, key, "GET", "/v1/keys")["keys"]
    if as_json:
        print_json(found)
    else:
        rows = [
            {
                "id": each["id"],
                "tenant": each["tenant"] or "(operator)",
                "prefix": each["prefix"] or "-",
                "created": each["created"] or "-",
            }
            for each in found
        ]
        click.echo(table(rows, ("id", "tenant", "prefix", "created")))


@keys.command(
    "create",
    short_help="Create a key.",
    epilog=examples("radixkv keys create acme", "radixkv keys create --json"),
)
@click.argument("tenant", required=False)
@client_options
@json_option
@needs_extra("http")
def create_key(tenant: str | None, url: str, key: str | None, as_json: bool) -> None:
    """Create a key of TENANT, and the tenant if it doesn't exist. Without TENANT: a key of the operator."""
    path = "/v1/keys" if tenant is None else f"/v1/tenants/{quote(tenant, safe='')}/keys"
    _show_new(_asked(url, key, "POST", path), as_json)


@keys.command("rotate", short_help="Replace a key.", epilog=examples("radixkv keys rotate 0f3a5c7e91b2d4f6"))
@click.argument("key_id", metavar="ID")
@client_options
@json_option
@needs_extra("http")
def rotate_key(key_id: str, url: str, key: str | None, as_json: bool) -> None:
    """Replace key ID by a new key. The old key is refused from then on. `keys list` shows the IDs."""
    _show_new(_asked(url, key, "POST", f"/v1/keys/{quote(key_id, safe='')}/rotate"), as_json)


@keys.command("revoke", short_help="Revoke a key.", epilog=examples("radixkv keys revoke 0f3a5c7e91b2d4f6"))
@click.argument("key_id", metavar="ID")
@client_options
@needs_extra("http")
def revoke_key(key_id: str, url: str, key: str | None) -> None:
    """Revoke key ID: it is refused from now on. `keys list` shows the IDs."""
    _asked(url, key, "DELETE", f"/v1/keys/{quote(key_id, safe='')}")
    click.echo(f"revoked {key_id}", err=True)


@click.command(
    short_help="Purge a tenant on all replicas.",
    epilog=examples("radixkv purge acme", "radixkv purge acme --timeout 10 --json"),
)
@click.argument("tenant")
@client_options
@socket_options()
@click.option(
    "--generation",
    type=click.IntRange(0),
    help="With --socket: refuse cache salts of earlier generations from now on.  [refuse none]",
)
@click.option(
    "--timeout",
    type=Number(0),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the replicas.",
)
@json_option
@needs_extra("http", unless="socket")
def purge(
    tenant: str,
    url: str,
    key: str | None,
    socket: str | None,
    engine_keys: str | None,
    generation: int | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Remove all cached prefixes, pins and jobs of TENANT on all replicas, and wait until each live one has confirmed.

    Replicas whose lease has expired are listed as unconfirmed. The exit code is 1 if a live replica didn't confirm in
    time. With --socket: of one engine, where TENANT is the fleet's name of the tenant, or the id that `stats` shows.
    """
    if socket is not None:
        state = purge_of(tenant, socket, engine_keys, generation, timeout)
    elif generation is not None:
        raise ConfigError("--generation", generation, "none without --socket")
    else:
        state = _purged(tenant, url, key, timeout)
    if as_json:
        print_json(state)
    else:
        names = {name: ", ".join(state[name]) or "-" for name in ("confirmed", "pending", "unconfirmed")}
        row = {"tenant": tenant, "generation": state["generation"], **names}
        click.echo(table([row], tuple(row)))
    if not state.get("known", True):
        click.echo(f"nothing was there: the engine knows no tenant {tenant!r}", err=True)
    if not state["complete"]:
        who = ", ".join(state["pending"])
        if socket is not None:
            raise click.ClickException(f"not confirmed by {who}: its disk owes it, so purge again")
        owed = "; the disk of the replica that was asked owes it" * state["owed"]
        raise click.ClickException(f"not confirmed by {who} within {timeout:g} s{owed}")


def _purged(tenant: str, url: str, key: str | None, timeout: float) -> dict[str, Any]:
    """Purge a tenant of a service and its fleet. Returns the state when it is complete, or when the time is over."""
    from radixkv.service.api_client import Client

    path = f"/v1/tenants/{quote(tenant, safe='')}/purge"
    with Client(url, key, as_operator=True) as client:
        state = client.call("POST", path)
        until = time.monotonic() + timeout
        while not state["complete"] and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_S)
            state = {**state, **client.call("GET", path)}
    return state


def _asked(url: str, key: str | None, method: str, path: str) -> dict[str, Any]:
    from radixkv.service.api_client import Client

    with Client(url, key, as_operator=True) as client:
        return client.call(method, path)


def _show_new(made: Mapping[str, Any], as_json: bool) -> None:
    """Print only the key to stdout, so that a script can read it."""
    if as_json:
        print_json(made)
        return
    click.echo(made["key"])
    whose = "the operator" if made["tenant"] is None else made["tenant"]
    click.echo(f"key {made['id']} of {whose}; it is shown only now", err=True)
