"""Time to first token over HTTP, cold against warmed.

A pair is a completion of a new prompt (cold), and one of the same prompt under another salt after warming it (warm).
Cold and warm take turns, and which of them comes first alternates. The first request is discarded, because it
includes one-time costs of the process. Times are the service's own ``timings.time_to_first_token_s``, from the
request's arrival to its first token. Results are medians over pairs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from statistics import median
from typing import Any

from radixkv.bench.measure import machine
from radixkv.errors import ArgumentError
from radixkv.service.api_client import Client

_SENTENCE = "Rule {}: answer politely, name the page of the manual, and ask if in doubt. "


def run(
    client: Client,
    *,
    tokens: int = 1_500,
    pairs: int = 5,
    max_tokens: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure ``pairs`` pairs with prompts of at least ``tokens`` tokens. Returns a dict that JSON can encode.

    Clears its prefixes from the cache. Raises ArgumentError for counts below 1, and ServiceError.
    """
    for name, value in (("tokens", tokens), ("pairs", pairs), ("max_tokens", max_tokens)):
        if value < 1:
            raise ArgumentError(name, value, "an integer ≥ 1")
    mark = secrets.token_hex(4)
    prompt = _prompt(client, tokens, mark)
    salts: list[str] = []
    try:
        _complete(client, prompt, _new(salts, mark), max_tokens)
        measured = []
        for index in range(pairs):
            measured.append(_pair(client, prompt, salts, mark, max_tokens, cold_first=index % 2 == 0))
            if progress is not None:
                progress(index + 1, pairs)
    finally:
        for salt in salts:
            client.call("DELETE", f"/v1/cache?salt={salt}")
    return _result(measured, max_tokens)


def _new(salts: list[str], mark: str) -> str:
    salts.append(f"ttft-{mark}-{len(salts)}")
    return salts[-1]


def _prompt(client: Client, tokens: int, mark: str) -> str:
    """Return a text of at least ``tokens`` tokens. The service counts the tokens of a sentence."""
    sample = "".join(_SENTENCE.format(number) for number in range(20))
    asked = client.call("POST", "/v1/warm", {"prompt": sample, "salt": f"ttft-{mark}"})
    client_tokens = asked["tokens"] + asked["left_out"]
    if asked["tokens"]:
        client.call("DELETE", f"/v1/cache?salt=ttft-{mark}")
    count = -(-tokens * 20 // client_tokens) + 1
    return "".join(_SENTENCE.format(number) for number in range(count))


def _pair(
    client: Client, prompt: str, salts: list[str], mark: str, max_tokens: int, *, cold_first: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    warmed, fresh = _new(salts, mark), _new(salts, mark)
    client.call("POST", "/v1/warm", {"prompt": prompt, "salt": warmed})
    if cold_first:
        cold = _complete(client, prompt, fresh, max_tokens)
        return cold, _complete(client, prompt, warmed, max_tokens)
    warm = _complete(client, prompt, warmed, max_tokens)
    return _complete(client, prompt, fresh, max_tokens), warm


def _complete(client: Client, prompt: str, salt: str, max_tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt, "salt": salt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = client.call("POST", "/v1/completions", body)
    return {
        "ttft_s": answer["timings"]["time_to_first_token_s"],
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "text": answer["choices"][0]["text"],
    }


def _result(measured: list[tuple[dict[str, Any], dict[str, Any]]], max_tokens: int) -> dict[str, Any]:
    cold = median(pair[0]["ttft_s"] for pair in measured)
    warm = median(pair[1]["ttft_s"] for pair in measured)
    return {
        "benchmark": "ttft",
        "machine": machine(),
        "pairs": len(measured),
        "max_tokens": max_tokens,
        "prompt_tokens": measured[0][0]["prompt_tokens"],
        "cached_tokens": min(pair[1]["cached_tokens"] for pair in measured),
        "cold_s": cold,
        "warm_s": warm,
        "ratio": warm / cold,
        "same_text": all(pair[0]["text"] == pair[1]["text"] for pair in measured),
        "measured": [{"cold_s": pair[0]["ttft_s"], "warm_s": pair[1]["ttft_s"]} for pair in measured],
    }


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    rows = [f"{index:>4}{1e3 * each['cold_s']:>12.1f}{1e3 * each['warm_s']:>12.1f}"
            for index, each in enumerate(result["measured"], 1)]  # fmt: skip
    return "\n".join(
        [
            f"{result['prompt_tokens']} prompt tokens, {result['cached_tokens']} cached when warm; {result['machine']}",
            f"{'pair':>4}{'cold ms':>12}{'warm ms':>12}",
            *rows,
            f"median{1e3 * result['cold_s']:>10.1f}{1e3 * result['warm_s']:>12.1f}   "
            f"warm is {result['ratio']:.2f} of cold; texts {'equal' if result['same_text'] else 'DIFFER'}",
        ]
    )
