"""Several invalid settings, reported as one error."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.errors import ConfigError


class ConfigErrors(ConfigError):
    """Several invalid settings: ``errors`` has all of them. The other fields are those of the first."""

    errors: tuple[ConfigError, ...] = ()


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise the error if there is one, and ConfigErrors if there are several."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        first = errors[0]
        several = ConfigErrors(first.setting, first.value, first.allowed, problem=first.problem)
        several.errors, several.args = tuple(errors), ("; ".join(map(str, errors)),)
        raise several


def each_of(error: ConfigError) -> tuple[ConfigError, ...]:
    """Return the errors that were raised as one."""
    return error.errors if isinstance(error, ConfigErrors) else (error,)
