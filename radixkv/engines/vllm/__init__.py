"""radixkv inside vLLM 0.32.

    ``--scheduler-cls radixkv.engines.vllm.Scheduler``    the cache in the place of vLLM's own: ``manager``
    ``radixkv.engines.vllm.connector``                    host memory and a disk behind vLLM's own cache
    ``radixkv serve --engine vllm``                       a vLLM that the service starts: ``serve``

``plugin`` is the entry point that vLLM loads in each of its processes. So this package imports neither vLLM nor torch
before somebody asks for a scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixkv._compiled import follow

follow(__path__, "engines/vllm")

if TYPE_CHECKING:
    from radixkv.engines.vllm.manager import AsyncScheduler as AsyncScheduler
    from radixkv.engines.vllm.manager import Scheduler as Scheduler


def __getattr__(name: str) -> Any:
    """Import vLLM's scheduler with radixkv's cache, by which ``--scheduler-cls`` names it."""
    if name not in ("AsyncScheduler", "Scheduler"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from radixkv.engines.vllm import manager

    return getattr(manager, name)
