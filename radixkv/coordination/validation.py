"""Checks of arguments, off a request's path. Each raises ArgumentError: argument, value and what is allowed."""

from __future__ import annotations

import re
from numbers import Real
from typing import Any

from radixkv.config import TENANT_ID_ALLOWED, Namespace, is_tenant_id
from radixkv.coordination.settings import is_text
from radixkv.coordination.store.wire import is_code
from radixkv.coordination.values import JOB_STATES
from radixkv.errors import ArgumentError

_JOB_ID = re.compile(r"[0-9a-f]{32}")


def check_text(name: str, value: object, allowed: str = "a string") -> None:
    """A string of whole characters: no half of a surrogate pair, which nobody can send."""
    if not is_text(value):
        raise ArgumentError(name, value, allowed)


def check_tenant(tenant: object) -> None:
    """What may be a tenant's id."""
    if not is_tenant_id(tenant):
        raise ArgumentError("tenant", tenant, TENANT_ID_ALLOWED)


def check_namespace(namespace: object) -> None:
    """A namespace."""
    if not isinstance(namespace, Namespace):
        raise ArgumentError("namespace", namespace, "a Namespace")


def is_job_id(job_id: object) -> bool:
    """Whether there can be a job of that id; one that is no string is an error."""
    check_text("job_id", job_id)
    return _JOB_ID.fullmatch(str(job_id)) is not None


def check_state(state: object) -> None:
    """The state of a part of a job or a pin, as its replica says it."""
    if not isinstance(state, str) or state not in JOB_STATES:
        raise ArgumentError("state", state, ", ".join(sorted(JOB_STATES)))


def check_error(error: object) -> None:
    """A code, not a text that could carry a prompt or a name."""
    if not isinstance(error, str) or not is_code(error):
        raise ArgumentError("error", error, "a code of up to 64 of a-z and _")


def check_flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(name, value, "True or False")


def check_instance(name: str, value: object, kind: type) -> None:
    """An object of a type of ours."""
    if not isinstance(value, kind):
        raise ArgumentError(name, value, f"a {kind.__name__}")


def checked_seconds(name: str, value: object, most: float, *, above: float | None = None) -> float:
    """A number of seconds, at most ``most``; negative ones unless they are to be ``above`` something."""
    number: Any = value
    least = -most if above is None else above
    if not isinstance(value, Real) or isinstance(value, bool) or not least < number <= most:
        raise ArgumentError(name, value, f"a number of seconds > {least:g}, at most {most:g}")
    return float(number)
