"""Calls of any engine, in steps: its own if it makes such, otherwise those of a thread for each call that has begun.

A synchronous call pauses in its callbacks, before they look at anything. So ``stop`` sees what happened meanwhile.
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
    engine: Engine,
    ns: Namespace,
    ids: Any,
    max_new_tokens: int,
    admission: Admission,
    *,
    stop: Callable[[], bool],
    **options: Any,
) -> Steps[Generation]:
    """Call ``generate`` in steps."""
    if is_stepping(engine):
        return engine.generating(ns, ids, max_new_tokens, admission, stop=stop, **options)

    def call(pause: Pause, on_no_room: Any) -> Generation:
        def asked() -> bool:
            pause()
            return stop()

        return engine.generate(ns, ids, max_new_tokens, stop=asked, on_no_room=on_no_room, **options)

    return _begun(admission, call)


def prefilling(
    engine: Engine,
    ns: Namespace,
    ids: TokenIds,
    admission: Admission,
    *,
    on_chunk: Callable[[int, int], None],
    **options: Any,
) -> Steps[Prefill]:
    """Call ``prefill`` in steps."""
    if is_stepping(engine):
        return engine.prefilling(ns, ids, admission, on_chunk=on_chunk, **options)

    def call(pause: Pause, on_no_room: Any) -> Prefill:
        told = _paused(pause, on_chunk)
        return engine.prefill(ns, ids, on_chunk=told, on_no_room=on_no_room, **options)

    return _begun(admission, call)


def publishing(
    engine: Engine,
    base_id: str,
    ns: Namespace,
    ids: TokenIds,
    readers: Iterable[str],
    admission: Admission,
    *,
    on_chunk: Callable[[int, int], None],
    **options: Any,
) -> Steps[Prefill]:
    """Call ``publish`` in steps."""
    if is_stepping(engine):
        return engine.publishing(base_id, ns, ids, readers, admission, on_chunk=on_chunk, **options)

    def call(pause: Pause, on_no_room: Any) -> Prefill:
        told = _paused(pause, on_chunk)
        return engine.publish(base_id, ns, ids, readers, on_chunk=told, on_no_room=on_no_room, **options)

    return _begun(admission, call)


def _paused(pause: Pause, on_chunk: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def told(done: int, total: int) -> None:
        pause()
        on_chunk(done, total)

    return told


def _begun(admission: Admission, call: Callable[[Pause, Any], T]) -> Steps[T]:
    """Begin a call in a thread of its own. The loop that runs it decides when that is."""
    admission.may_start()
    waiting = admission.on_no_room

    def started(pause: Pause) -> T:
        def on_no_room(error: CapacityError) -> bool:
            return waiting is not None and run(waiting(error), pause)

        return call(pause, None if waiting is None else on_no_room)

    return (yield from in_thread(started))
