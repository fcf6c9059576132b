"""The text that ``radixkv serve`` prints when it listens: the served model, the address, and commands to paste.

Each curl command is one line that works in any POSIX shell. ``printf`` makes the prompt, so nothing has to be
downloaded or copied. With the shipped tokenizer the prompt has about 1,500 tokens.
"""

from __future__ import annotations

from radixkv.engines.kv_memory import at_once
from radixkv.engines.protocol import Tiered
from radixkv.service.auth import DEMO_KEYS, DEMO_OPERATOR_KEY
from radixkv.service.core import Service
from radixkv.service.options import ServeSettings

_PROMPT = (
    "$(printf 'Rule %d: answer politely, name the page of the manual, and ask if in doubt. ' $(seq 1 53))"
)


def banner(settings: ServeSettings, service: Service, url: str, config: str | None = None) -> str:
    """Return the text, several lines, without a newline at its end. ``config``: the path of the configuration file."""
    lines = [f"radixkv serves {service.model_name} at {url}", *_model(settings, service), *_keys(settings)]
    if service.events is not None:
        content = "prompts in clear" if settings.events_content == "prompts-in-clear" else "digests"
        lines.append(
            f"  events   {service.events.endpoint}, replays {service.events.replay_endpoint}: {content}"
        )
    if config is not None:
        lines.append(f"  config   {config}")
    lines.append(f"  docs     {url}/docs")
    if settings.keys is None:
        lines += ["", *_commands(url)]
    return "\n".join([*lines, "", "Ctrl-C stops it."])


def _model(settings: ServeSettings, service: Service) -> list[str]:
    limits = service.engine.limits
    size, room = limits.block_size, limits.num_cache_tokens
    lines = [f"  cache    {limits.num_blocks} blocks of {size} tokens ({room} tokens), {settings.device}"]
    fits = at_once(limits.num_blocks, size, limits.max_model_len)
    lines.append(
        f"  room     for {fits.pessimistic} requests of {fits.pessimistic_tokens} tokens at once (pessimistic), "
        f"{fits.expected} of {fits.expected_tokens} (expected)"
    )
    lines += _tiers(settings, service)
    if settings.model is None:
        lines.insert(0, "  model    random weights: its text is random, its cache and its timings are real")
    if settings.redis is None:
        lines.append(f"  replica  {settings.replica}, alone (no --redis)")
    else:
        health = service.fleet.coordinator.health()
        note = "" if health.is_ok else f": {health.reason or health.state}"
        lines.append(f"  replica  {settings.replica}, coordination {health.state}{note}")
    return lines


def _tiers(settings: ServeSettings, service: Service) -> list[str]:
    counts = service.cache.tier_counts() if isinstance(service.cache, Tiered) else {}
    sizes = (
        f"{tier}: {each['resident_blocks']:.0f} of {each['capacity_blocks']:.0f} blocks"
        if each["capacity_blocks"]
        else f"{tier}: can't be used, see the log"
        for tier, each in counts.items()
    )
    kept = "" if settings.tier_dtype == "exact" else f"; KV as {settings.tier_dtype}"
    return [f"  tiers    {', '.join(sizes)}{kept}"] if counts else []


def _keys(settings: ServeSettings) -> list[str]:
    if settings.keys is not None:
        return [f"  keys     from {settings.keys}"]
    tenants = ", ".join(f"{tenant}: {key}" for tenant, key in DEMO_KEYS.items())
    return [f"  keys     demo tenants {tenants}; operator: {DEMO_OPERATOR_KEY}"]


def _commands(url: str) -> list[str]:
    warm = _curl(url, "warm", "")
    lookup = _curl(url, "lookup", "")
    cold = _curl(
        url, "completions", r"\"max_tokens\": 8, \"temperature\": 0, \"salt\": \"cold-$(date +%s)\", "
    )
    again = _curl(url, "completions", r"\"max_tokens\": 8, \"temperature\": 0, ").removeprefix("curl ")
    return [
        "Warm a long prompt:",
        warm,
        "Look it up:",
        lookup,
        "Complete it cold (with a new salt), then warm. Compare cached_tokens and time_to_first_token_s:",
        f"{cold} --next {again}",
    ]


def _curl(url: str, endpoint: str, fields: str) -> str:
    key = next(iter(DEMO_KEYS.values()))
    headers = f"-H 'Authorization: Bearer {key}' -H 'Content-Type: application/json'"
    return f'curl -sS {url}/v1/{endpoint} {headers} -d "{{{fields}\\"prompt\\": \\"{_PROMPT}\\"}}"'
