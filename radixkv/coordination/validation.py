"""Checks of arguments, outside a request's path. Each raises ArgumentError: argument, value and what is allowed."""

from __future__ import annotations

import re
from numbers import Real
from typing import Any

from radixkv.config import TENANT_ID_ALLOWED, Namespace, is_tenant_id
from radixkv.coordination.store.wire import is_code
from radixkv.coordination.values import JOB_STATES
from radixkv.errors import ArgumentError
from radixkv.signing import is_text

_JOB_ID = re.compile(r"[0-9a-f]{32}")


def check_text(name: str, value: object, allowed: str = "a string") -> None:
    """Check for a string without lone surrogates, which can't be encoded and sent."""
    if not is_text(value):
        raise ArgumentError(name, value, allowed)


def check_tenant(tenant: object) -> None:
    """Check for a possible tenant id."""
    if not is_tenant_id(tenant):
        raise ArgumentError("tenant", tenant, TENANT_ID_ALLOWED)


def check_namespace(namespace: object) -> None:
    """Check for a Namespace."""
    if not isinstance(namespace, Namespace):
        raise ArgumentError("namespace", namespace, "a Namespace")


def is_job_id(job_id: object) -> bool:
    """Whether a job can have that id; raises ArgumentError if it is not a string."""
    check_text("job_id", job_id)
    return _JOB_ID.fullmatch(str(job_id)) is not None


def check_state(state: object) -> None:
    """Check for a state that a replica may report for its part of a job or a pin."""
    if not isinstance(state, str) or state not in JOB_STATES:
        raise ArgumentError("state", state, ", ".join(sorted(JOB_STATES)))


def check_error(error: object) -> None:
    """Check for an error code; free text could carry a prompt or a name."""
    if not isinstance(error, str) or not is_code(error):
        raise ArgumentError("error", error, "a code of up to 64 of a-z and _")


def check_flag(name: str, value: object) -> None:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(name, value, "True or False")


def check_instance(name: str, value: object, kind: type) -> None:
    """Check for an object of the given type."""
    if not isinstance(value, kind):
        raise ArgumentError(name, value, f"a {kind.__name__}")


def checked_seconds(name: str, value: object, most: float, *, above: float | None = None) -> float:
    """Return a number of seconds, at most ``most``. It may be negative unless ``above`` gives a lower bound."""
    number: Any = value
    least = -most if above is None else above
    if not isinstance(value, Real) or isinstance(value, bool) or not least < number <= most:
        raise ArgumentError(name, value, f"a number of seconds > {least:g}, at most {most:g}")
    return float(number)
