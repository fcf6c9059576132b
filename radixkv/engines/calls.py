"""Calls of any engine, in steps: its own if it makes such, otherwise those of a thread for each call that has begun.

A synchronous call pauses in its callbacks, before they look at anything. So they see what happened meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, TypeVar

from radixkv.config import Namespace
from radixkv.engines.protocol import Admission, Engine, Generation, Prefill, Stepping
from radixkv.engines.steps import Pause, Steps, in_thread, run
from radixkv.errors import CapacityError
from radixkv.index.tokens import TokenIds

T = TypeVar("T")


def is_stepping(engine: object) -> TypeGuard[Stepping]:
    """Whether one thread runs the engine with all its requests."""
    return isinstance(engine, Stepping) and engine.makes_steps


def generating(
    engine: Engine, ns: Namespace, ids: Any, max_new_tokens: int, admission: Admission, **options: Any
) -> Steps[Generation]:
    """Call ``generate`` in steps, with ``stop`` among the options."""
    if is_stepping(engine):
        return engine.generating(ns, ids, max_new_tokens, admission, **options)
    return _begun(engine.generate, (ns, ids, max_new_tokens), admission, options)


def prefilling(
    engine: Engine, ns: Namespace, ids: TokenIds, admission: Admission, **options: Any
) -> Steps[Prefill]:
    """Call ``prefill`` in steps, with ``on_chunk`` among the options."""
    if is_stepping(engine):
        return engine.prefilling(ns, ids, admission, **options)
    return _begun(engine.prefill, (ns, ids), admission, options)


def publishing(
    engine: Engine,
    base_id: str,
    ns: Namespace,
    ids: TokenIds,
    readers: Iterable[str],
    admission: Admission,
    **options: Any,
) -> Steps[Prefill]:
    """Call ``publish`` in steps, with ``on_chunk`` among the options."""
    if is_stepping(engine):
        return engine.publishing(base_id, ns, ids, readers, admission, **options)
    return _begun(engine.publish, (base_id, ns, ids, readers), admission, options)


def _begun(
    method: Callable[..., T], arguments: tuple[Any, ...], admission: Admission, options: dict[str, Any]
) -> Steps[T]:
    """Begin a call in a thread of its own. The loop that runs it decides when that is."""
    admission.may_start()

    def call(pause: Pause) -> T:
        def paused(callback: Callable[..., Any]) -> Callable[..., Any]:
            def called(*told: Any) -> Any:
                pause()
                return callback(*told)

            return called

        def on_no_room(error: CapacityError) -> bool:
            return admission.on_no_room is not None and run(admission.on_no_room(error), pause)

        asked = {name: paused(options[name]) for name in ("stop", "on_chunk") if name in options}
        return method(*arguments, on_no_room=on_no_room, **options | asked)

    return (yield from in_thread(call))
