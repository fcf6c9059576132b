"""A plan as text for a terminal, the figures first that decide."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from radixkv.sizes import in_units
from radixkv.tables import columns

_WIDTH = 100
_NAMES = {"gpu": "GPUs", "host": "host memory", "disk": "disk"}


def text(plan: dict[str, Any]) -> str:
    """Return a plan as text, sections with empty lines between them."""
    sections = [
        _model(plan),
        _memory(plan),
        _kv(plan),
        _tiers(plan),
        _requests(plan),
        _dtypes(plan),
        _trace(plan),
        _cost(plan),
        _command(plan),
    ]
    return "\n\n".join(each for each in sections if each)


def _model(plan: dict[str, Any]) -> str:
    model, parts = plan["model"], [f"{plan['model']['layers']} layers"]
    if model["parameters"]:
        parts.append(f"{model['parameters'] / 1e9:,.4g} billion parameters")
    if model["active_parameters"] != model["parameters"]:
        parts.append(f"{model['active_parameters'] / 1e9:,.3g} billion active")
    if model["max_tokens"]:
        parts.append(f"{model['max_tokens']:,} tokens of context")
    return f"{model['path']}: {model['model_type']}, {', '.join(parts)}"


def _memory(plan: dict[str, Any]) -> str:
    gpu, weights = plan["gpu"], plan["weights"]
    source = {"safetensors": "from the files", "config": "computed from the config", "--weights": "given"}
    kind = source[weights["source"]] + ("" if not weights["quantisation"] else f", {weights['quantisation']}")
    whole = "" if gpu["count"] == 1 else f"; {in_units(weights['bytes'])} in all"
    estimate = "an estimate of activations and graphs" if gpu["reserved_is_estimate"] else "given"
    rows = [
        ("memory of a GPU", in_units(gpu["bytes"]), f"{gpu['count']} of them" if gpu["count"] > 1 else ""),
        ("used", in_units(gpu["usable_bytes"]), f"{gpu['utilisation']:.0%}"),
        ("weights", in_units(weights["bytes_of_a_gpu"]), kind + whole),
        ("reserved", in_units(gpu["reserved_bytes"]), estimate),
        ("KV", in_units(gpu["kv_bytes"]), "what is left"),
    ]
    return _aligned(rows)


def _kv(plan: dict[str, Any]) -> str:
    kv, count = plan["kv"], plan["gpu"]["count"]
    lines = [f"KV a token: {in_units(kv['bytes_per_token'])} in {kv['dtype']}"]
    if count > 1:
        lines[0] += f", {in_units(kv['bytes_per_token_of_a_gpu'])} on each GPU"
    if kv["bytes_per_token_of_a_gpu_beyond_windows"] != kv["bytes_per_token_of_a_gpu"]:
        beyond = in_units(kv["bytes_per_token_of_a_gpu_beyond_windows"])
        lines[0] += f"; {beyond} on each GPU beyond the windows"
    for each in kv["layers"]:
        size = each["bytes_per_token"]
        found = (
            f"{in_units(size)} a token"
            if size is not None
            else f"{in_units(each['bytes_per_request'])} a request"
        )
        lines.append(f"  {each['kind']}: {each['formula']} = {found}")
    return "\n".join(lines)


def _tiers(plan: dict[str, Any]) -> str:
    rows = [("tier", "memory", "a block", "blocks", "tokens")]
    rows += [
        (
            _NAMES[each["tier"]],
            in_units(each["bytes"]),
            in_units(each["block_bytes"]),
            f"{each['blocks']:,}",
            f"{each['tokens']:,}",
        )
        for each in plan["tiers"]
    ]
    kept = "" if plan["tier_dtype"] == "exact" else f"; host memory and disk keep {plan['tier_dtype']}"
    return f"blocks of {plan['kv']['block_size']} tokens{kept}\n{columns(rows)}"


def _requests(plan: dict[str, Any]) -> str:
    found = plan["requests"]
    rows = [
        (f"{name}: {found[name]['tokens']:,} tokens each", f"{found[name]['requests']:,}")
        for name in ("pessimistic", "expected")
    ]
    return "requests at once\n" + columns(rows)


def _dtypes(plan: dict[str, Any]) -> str:
    has_rates = plan["trace"] is not None
    rows = [
        ("KV dtype", "a token", "blocks", "pessimistic", "expected", *(("hit rate",) if has_rates else ()))
    ]
    for each in plan["kv_dtypes"]:
        rate = each["token_hit_rate"]
        rows.append(
            (
                each["dtype"],
                in_units(each["bytes_per_token_of_a_gpu"]),
                f"{each['blocks']:,}",
                f"{each['pessimistic_requests']:,}",
                f"{each['expected_requests']:,}",
                *((("–" if rate is None else _percent(rate)),) if has_rates else ()),
            )
        )
    parts = [f"what another dtype of the KV changes, on one GPU\n{columns(rows)}"] if len(rows) > 2 else []
    if len(plan["tier_dtypes"]) > 1:
        tiers = [("dtype of the tiers", "blocks of host memory", "blocks of the disk")]
        tiers += [
            (each["dtype"], f"{each['host_blocks']:,}", f"{each['disk_blocks']:,}")
            for each in plan["tier_dtypes"]
        ]
        parts.append(f"what another dtype of the tiers changes\n{columns(tiers)}")
    return "\n\n".join(parts)


def _trace(plan: dict[str, Any]) -> str:
    trace = plan["trace"]
    if trace is None:
        return ""
    head = (
        f"the trace: {trace['requests']:,} requests, {trace['mean_tokens']:,.0f} tokens on average, 95 % within "
        f"{trace['p95_tokens']:,}; policy {trace['policy']}; "
        f"hit rate {_percent(trace['token_hit_rate'])} of prompt tokens, {_percent(trace['endless_token_hit_rate'])} "
        "without bounds"
    )
    rows = [("tier", "adds to the hit rate", "seconds of prefill saved", "of all")]
    for each in trace["tiers"]:
        saved = each["prefill_seconds_saved"]
        share = _percent(saved / trace["prefill_seconds"]) if trace["prefill_seconds"] else "–"
        rows.append((_NAMES[each["tier"]], _percent(each["token_hit_rate"]), f"{saved:,.1f}", share))
    return "\n".join([*wrap(head, _WIDTH), columns(rows)])


def _cost(plan: dict[str, Any]) -> str:
    cost = plan["cost"]
    if cost is None:
        return ""
    rows = [(f"{_NAMES[tier]}", f"${cost[f'{tier}_dollars_per_hour']:,.4f}") for tier in _NAMES]
    rows.append(("together", f"${cost['dollars_per_hour']:,.4f}"))
    for tier, saved in cost.get("prefill_dollars_saved_per_hour", {}).items():
        rows.append((f"prefill that the {_NAMES[tier]} save" + "s" * (tier != "gpu"), f"${saved:,.4f}"))
    return "dollars an hour\n" + columns(rows)


def _command(plan: dict[str, Any]) -> str:
    lines = [line for note in plan["notes"] for line in wrap(note, _WIDTH)]
    if plan["command"] is not None:
        lines += ["", "Run:", plan["command"]] if lines else ["Run:", plan["command"]]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _aligned(rows: list[tuple[str, str, str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in (0, 1)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {size.rjust(widths[1])}  {what}".rstrip() for name, size, what in rows
    )
