"""Handling of errors: an answer for the client, and a line in the log.

The log has types and places in the code. It has no message of an unexpected error, because it may quote a client.
"""

from __future__ import annotations

import logging
import traceback

from radixkv.errors import ControlError, IntegrityError, RadixKVError
from radixkv.service import problems
from radixkv.service.draining import Ended
from radixkv.service.engine_loop import Busy, Cancelled, Closed, Stalled
from radixkv.service.limits import TooFast
from radixkv.service.problems import ApiError

log = logging.getLogger("radixkv.service")


class Failures:
    """The errors of one process.

    ``has_broken_laws``: an invariant of the cache was broken, so the process is unhealthy.
    """

    def __init__(self) -> None:
        self.has_broken_laws = False

    def note(self, error: Exception) -> None:
        """Remember a broken invariant."""
        if isinstance(error, IntegrityError):
            self.has_broken_laws = True

    def answer(self, error: Exception) -> ApiError:
        """Return the answer to an error."""
        self.note(error)
        return answer_to(error)

    def log(self, error: Exception) -> None:
        """Log an error that no request waits for."""
        self.note(error)
        log_unforeseen(error)


def answer_to(error: Exception) -> ApiError:
    """Return the answer to an error; an unexpected one is logged and answered with 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return problems.busy()
    if isinstance(error, TooFast):
        return problems.too_fast(error.wait_s, str(error))
    if isinstance(error, Stalled):
        return problems.stalled()
    if isinstance(error, Closed | Cancelled | Ended):
        return problems.shutting_down()
    if isinstance(error, ControlError):
        log.warning("the engine's process: %s", error)
    answer = problems.of_library(error) if isinstance(error, RadixKVError) else problems.internal()
    if answer.status >= 500 and answer.status != 503:
        log_unforeseen(error)
    return answer


def log_unforeseen(error: Exception) -> None:
    """Log a bug in radixkv: its type and place, but not its message."""
    is_ours = isinstance(error, IntegrityError)
    kind = f"an invariant of the cache is broken: {error}" if is_ours else "unexpected error"
    log.error("%s\n%s", kind, _places(error))


def _places(error: BaseException | None) -> str:
    """Return the types of an error and of its causes, and where they were raised, without their messages."""
    lines: list[str] = []
    while error is not None:
        lines += [f"{type(error).__qualname__}:\n", *traceback.format_tb(error.__traceback__)]
        error = error.__cause__ or error.__context__
    return "".join(lines)
