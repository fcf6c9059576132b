"""Policies that aren't built in: an error in one costs its tenant the order of eviction, and no request.

Such a policy may be any code. When one of its hooks raises an error or answers what can't be right, ``lru`` takes the
tenant's blocks over, in the order that the policy still tells. That is logged once, and counted. The call goes on, also
if it is another tenant's. Settings with another policy end this state.

Built-in policies are called directly: they may have C methods as hooks. If one raised an error, ``recovery`` would
repair the cache and make a new one.

MemoryError is no fault of a policy: it interrupts the call, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from radixkv.index.tree import Node
from radixkv_policies import LRU, Policy

_BUILT_IN: Final = "radixkv_policies"


class Guarded:
    """A hook of a foreign policy. Once ``fail`` has been called, it is the same hook of ``lru``."""

    __slots__ = ("_fail", "hook", "name")

    def __init__(self, name: str, hook: Callable[..., Any], fail: Callable[[str, Exception], object]) -> None:
        self.name, self.hook, self._fail = name, hook, fail

    def __call__(self, *args: Any) -> Any:
        try:
            return _checked(self.name, self.hook(*args))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a policy may be any code
            self._fail(self.name, error)
        if self.name in ("victim", "most", "opened", "admit"):
            return self.hook(*args)
        if self.name == "removed":  # lru has taken the node over, because it is still in its tree
            with suppress(KeyError):
                self.hook(*args)
        return None


def _checked(name: str, answer: Any) -> Any:
    if name == "most" and (type(answer) is not int or answer < 1):
        raise ValueError(f"most returned {answer!r}, not a number of blocks from 1")
    return bool(answer) if name == "admit" else answer


def is_foreign(policy: Policy) -> bool:
    """Whether a policy isn't built in."""
    return type(policy).__module__.partition(".")[0] != _BUILT_IN


def fallback() -> LRU:
    """The policy that follows one that failed."""
    return LRU(1, float, 0)  # it reads neither capacity nor clock


def hook_of(policy: LRU, name: str) -> Callable[..., Any]:
    """A hook of ``lru``, or what does nothing and answers what the cache takes for it."""
    leased, unleased, removed = policy.order()
    required = {"leased": leased, "unleased": unleased, "removed": removed, "victim": policy.victim}
    return required.get(name) or policy.hook(name) or _ANSWERS.get(name, _nothing)


def _all_blocks(node: Node) -> int:
    return node.num_blocks


def _hints(nodes: object, num_blocks: int, hints: object) -> object:
    return hints


def _yes(node: object) -> bool:
    return True


def _nothing(*args: object) -> None:
    pass


_ANSWERS: Final[dict[str, Callable[..., Any]]] = {"most": _all_blocks, "opened": _hints, "admit": _yes}


def report(policy: str, tenant: str, where: str, error: Exception) -> None:
    """Log that the policy of a tenant failed in ``where`` and is replaced."""
    import logging  # here: `import radixkv` needs neither
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    logging.getLogger("radixkv.index").error(
        "policy %s of tenant %r failed in %s, so lru replaces it until the tenant's policy is set anew: %s: %s%s",
        policy,
        tenant,
        where,
        type(error).__name__,
        error,
        place,
    )


# --- the order of another policy


def taken_over(policy: Policy, old: Policy, nodes: list[Node], evictable: list[Node], most: int) -> Policy:
    """Fill the new ``policy`` with a tenant's nodes (given parents first), ``most`` of them, in the old order."""
    for node in nodes:
        parent = node.parent if node.parent is not None and node.parent.parent is not None else None
        policy.inserted(node, node.num_blocks, node.depth, parent=parent)
    for node in _in_order(evictable, _drained(old, most)):
        policy.unleased(node)
    return policy


def _in_order(nodes: list[Node], order: list[Node]) -> list[Node]:
    """Sort evictable nodes, given parents first, by their old order.

    Missing nodes are last, children before parents.
    """
    place = dict.fromkeys(nodes, len(order))
    place.update((node, at) for at, node in enumerate(order) if node in place)
    children_first = nodes[::-1]
    for node in children_first:
        if node.parent in place:
            place[node.parent] = max(place[node.parent], place[node])
    return sorted(children_first, key=place.__getitem__)


def _drained(policy: Policy, most: int) -> list[Node]:
    """Return the policy's victims in order, until the policy fails."""
    found: list[Node] = []
    try:
        while len(found) < most and isinstance(node := policy.victim(), Node):
            found.append(node)
            policy.removed(node)
    except Exception:  # noqa: BLE001 - it was interrupted too: the rest is missing
        return found
    return found
