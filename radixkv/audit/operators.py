"""Check 3 over HTTP for bases: A must not find a prefix that the operator publishes for B.

Needs the operator's key. The audit doesn't know which tenants A's and B's keys belong to. So it makes each listed
tenant the only reader in turn, until A and B have each found the base.
"""

from __future__ import annotations

from radixkv.audit.probe_prompts import Prompt, Prompts, canary
from radixkv.audit.surfaces import Extra, lookup
from radixkv.audit.target import Target, count, granted
from radixkv.audit.verdict import Check, Verdict, not_checked

NAME = "cross-tenant probe, bases"
MAX_TENANTS = 1_000


def bases(
    a: Target, b: Target, operator: Target | None, prompts: Prompts, form: str, leaks: list[str]
) -> Check:
    """Publish a base for one tenant at a time, look it up as A and as B, then unpublish it and look again.

    It adds what it finds to ``leaks``.
    """
    if operator is None:
        return not_checked(
            3, NAME, "only the operator can publish a base, and the option --operator-key was not given"
        )
    name, prompt = f"audit-{canary()}", prompts.fresh(form)
    looked_up = lookup(a, prompt, Extra())
    if not looked_up.is_ok:
        return not_checked(3, NAME, f"it needs lookups, {looked_up.reason}")
    published = operator.send("POST", "/v1/bases", {"id": name, "readers": [], **prompt.of_prefix()})
    if not published.is_ok:
        return not_checked(3, NAME, f"no base could be published, {published.reason}")
    try:
        return _published(a, b, operator, name, prompt, leaks)
    finally:
        with operator.cleaning():
            operator.send("DELETE", f"/v1/bases/{name}")


def _published(a: Target, b: Target, operator: Target, name: str, prompt: Prompt, leaks: list[str]) -> Check:
    leaks += ["A finds a base without readers"] if _found(a, prompt) else []
    seen = {"A": False, "B": False}
    for tenant in _tenants(operator):
        operator.send("PUT", f"/v1/bases/{name}/readers", {"readers": [tenant]})
        found = {"A": _found(a, prompt) > 0, "B": _found(b, prompt) > 0}
        if found["A"] and found["B"]:
            leaks.append(f"A and B both find a base that only {tenant} may read")
        seen = {who: seen[who] or found[who] for who in seen}
        if all(seen.values()):
            break
    operator.send("DELETE", f"/v1/bases/{name}")
    leaks += [
        f"{who} finds a base that was unpublished" for who, it in (("A", a), ("B", b)) if _found(it, prompt)
    ]
    figures = {"leaks": leaks, "readers that found it": [who for who in seen if seen[who]]}
    if leaks:
        return Check(3, NAME, Verdict.LEAKS, "; ".join(leaks), figures)
    if not all(seen.values()):
        return Check(3, NAME, Verdict.BLIND, "a reader of the base doesn't find it", figures)
    return Check(
        3,
        NAME,
        Verdict.ISOLATED,
        "only its reader finds a base, and no tenant finds it after it is unpublished",
        figures,
    )


def _found(target: Target, prompt: Prompt) -> int:
    """Return how many tokens of a prompt a lookup finds. Raises TargetError if there is no answer."""
    return count(granted(lookup(target, prompt, Extra())).document.get("matched_tokens")) or 0


def _tenants(operator: Target) -> list[str]:
    listed = operator.send("GET", "/v1/tenants").document.get("tenants")
    names = (
        [each.get("tenant") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    )
    return [name for name in names if isinstance(name, str)][:MAX_TENANTS]
