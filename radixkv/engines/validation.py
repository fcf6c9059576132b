"""Checks of the arguments of ``HFEngine``. Each error names the argument, its value and what is allowed."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from radixkv.engines.grammars import Grammar
from radixkv.engines.protocol import Logprobs, Penalties
from radixkv.errors import ArgumentError
from radixkv.index.cache import RequestHints

MAX_TOP_LOGPROBS = 20


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise ArgumentError for the first invalid argument of ``generate``."""
    for name in ("max_new_tokens", "num_beams", "num_return_sequences"):
        _require(name, arguments[name], _is_int(arguments[name]) and arguments[name] >= 1, "an integer ≥ 1")
    _require("do_sample", arguments["do_sample"], isinstance(arguments["do_sample"], bool), "true or false")
    temperature, top_k, top_p, seed = (arguments[name] for name in ("temperature", "top_k", "top_p", "seed"))
    _require("temperature", temperature, _is_number(temperature) and temperature > 0, "a finite number > 0")
    _require("top_k", top_k, top_k is None or (_is_int(top_k) and top_k >= 1), "an integer ≥ 1, or None")
    _require(
        "top_p", top_p, top_p is None or (_is_number(top_p) and 0 < top_p <= 1), "a number in (0, 1], or None"
    )
    in_range = seed is None or (_is_int(seed) and -(2**63) <= seed < 2**64)
    _require("seed", seed, in_range, "an integer from -2^63 to 2^64 - 1, or None")
    hints = arguments["hints"]
    _require("hints", hints, hints is None or isinstance(hints, RequestHints), "a RequestHints, or None")
    _check_penalties(arguments["penalties"], arguments["max_new_tokens"])
    form, logprobs = arguments["form"], arguments["logprobs"]
    _require("form", form, form is None or isinstance(form, Grammar), "what HFEngine.form returned, or None")
    _require("logprobs", logprobs, logprobs is None or isinstance(logprobs, Logprobs), "a Logprobs, or None")
    if logprobs is not None:
        num_top = logprobs.num_top
        is_right = _is_int(num_top) and 0 <= num_top <= MAX_TOP_LOGPROBS
        _require("logprobs.num_top", num_top, is_right, f"an integer from 0 to {MAX_TOP_LOGPROBS}")
    beams, returned = arguments["num_beams"], arguments["num_return_sequences"]
    if beams > 1:
        _require("num_return_sequences", returned, returned <= beams, f"at most num_beams = {beams}")
        for name in ("on_step", "form", "logprobs"):
            _require(name, arguments[name], arguments[name] is None, "None with num_beams > 1")
    elif not arguments["do_sample"]:
        _require(
            "num_return_sequences",
            returned,
            returned == 1,
            "1 for greedy decoding, because its rows would be equal",
        )


def _check_penalties(penalties: object, max_new_tokens: int) -> None:
    if not isinstance(penalties, Penalties):
        raise ArgumentError("penalties", penalties, "a Penalties, or None")
    for name in ("presence", "frequency"):
        value = getattr(penalties, name)
        _require(f"penalties.{name}", value, _is_number(value), "a finite number")
    repetition, bias, least = penalties.repetition, penalties.bias, penalties.min_new_tokens
    _require(
        "penalties.repetition", repetition, _is_number(repetition) and repetition > 0, "a finite number > 0"
    )
    is_right = isinstance(bias, Mapping) and all(map(_is_int, bias)) and all(map(_is_number, bias.values()))
    _require("penalties.bias", bias, is_right, "finite numbers by token ids")
    is_right = _is_int(least) and 0 <= least <= max_new_tokens
    _require(
        "penalties.min_new_tokens", least, is_right, f"an integer from 0 to max_new_tokens = {max_new_tokens}"
    )


def _require(argument: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ArgumentError(argument, value, allowed)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def eos_ids_of(value: Any) -> frozenset[int]:
    """End-of-sequence ids, given as None, one id or several; -1 means none.

    Raises ArgumentError for anything else.
    """
    if value is None:
        return frozenset()
    try:
        ids = (
            [operator.index(value)]
            if not isinstance(value, Iterable)
            else [operator.index(item) for item in value]
        )
    except TypeError:
        raise ArgumentError("eos_token_id", value, "an id, ids, or -1 for never") from None
    return frozenset(ids) - {-1}


def is_batch(ids: Any) -> bool:
    """Whether ``ids`` are prompts rather than one prompt."""
    if getattr(ids, "ndim", 1) == 2:
        return len(ids) > 0
    if not isinstance(ids, (list, tuple)) or not ids:
        return False
    first = ids[0]
    return isinstance(first, (list, tuple, range, bytes, array)) or getattr(first, "ndim", 0) == 1
