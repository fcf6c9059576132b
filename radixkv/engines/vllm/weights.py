"""New weights in a running vLLM 0.32: who keeps KV is told before they change.

vLLM forgets its KV at ``pause`` (unless ``clear_cache`` is off) and at ``sleep`` from level 1 on. At all other changes
it leaves that to its user: ``reload_weights``, ``update_weights``, ``apply_model`` and any function that
``collective_rpc`` runs in the workers. All of them pass the engine core, between two steps. ``watch`` looks there.

A call changes the weights unless it is known not to. So does a new ``weight_version``, an adapter that is removed or
loaded in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final
from weakref import WeakMethod

from vllm.v1.engine.core import EngineCore

HARMLESS: Final = frozenset(
    {
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_encoder_timing_stats",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Methods of vLLM's workers that leave the weights as they are."""

_told: list[WeakMethod[Callable[[], object]]] = []


def watch(change: Callable[[], object]) -> None:
    """Call the bound method ``change`` before weights change, while its object lives.

    Engines of one process tell all of them: a cache may then forget more than it must.
    """
    if not _told:
        _wrap()
    _told[:] = [each for each in _told if each() is not None]
    _told.append(WeakMethod(change))


def changed() -> None:
    """Tell everyone."""
    for each in list(_told):
        if (change := each()) is not None:
            change()


def _wrap() -> None:
    EngineCore.collective_rpc = _telling(EngineCore.collective_rpc, _may_change)
    EngineCore.set_weight_version = _telling(
        EngineCore.set_weight_version,
        lambda core, weight_version: weight_version != core.get_weight_version(),
    )
    EngineCore.add_lora = _telling(EngineCore.add_lora, lambda _, lora_request: lora_request.load_inplace)
    EngineCore.remove_lora = _telling(EngineCore.remove_lora, lambda *_, **__: True)


def _may_change(_: Any, method: Any, *__: Any, **___: Any) -> bool:
    return not isinstance(method, str) or method not in HARMLESS


def _telling(stock: Callable[..., Any], is_change: Callable[..., bool]) -> Callable[..., Any]:
    """Return ``stock`` as it is, signature included, but for who is told before."""

    @wraps(stock)
    def telling(*args: Any, **named: Any) -> Any:
        if is_change(*args, **named):
            changed()
        return stock(*args, **named)

    return telling
