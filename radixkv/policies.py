"""Eviction policies by name: built in, registered by another distribution, or a class of any module.

    lru, learned, …        built in
    NAME                   an entry point of the group ``radixkv.policies``; imported when the name is first asked for
    package.module:Class   imported when it is first asked for

Only ``resolve`` imports. It is for names from code, the command line and the configuration file. A name from HTTP, a
keys file, Redis or a trace goes to ``require_loaded``, which imports nothing: it takes what is built in, and the entry
points that were loaded before (``load_registered``, at the start of a service).
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from radixkv.errors import ArgumentError, ConfigError
from radixkv_policies import POLICIES, Policy

GROUP: Final = "radixkv.policies"
"""Entry points of this group are policies, each under its name."""

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_loaded: dict[str, type[Policy]] = {}
"""What was imported in this process, by the name that was asked for."""

log = logging.getLogger("radixkv.policies")


def resolve(setting: str, name: object, others: Iterable[str] = ()) -> type[Policy]:
    """The policy of a name, which may import its module. Not for names from outside: see ``require_loaded``.

    ``others``: names that the caller takes without asking here; the error lists them too.
    Raises ConfigError, with ``setting``, for a name that no policy has, a module that can't be imported, and what is
    no policy.
    """
    if isinstance(name, str):
        found = POLICIES.get(name) or _loaded.get(name)
        if found is not None:
            return found
        if _CLASS.fullmatch(name):
            _loaded[name] = _imported(setting, name)
            return _loaded[name]
        for entry in _registered():
            if entry.name == name:
                _loaded[name] = _from_entry_point(setting, entry)
                return _loaded[name]
    raise ConfigError(setting, name, _allowed([*others, *(entry.name for entry in _registered())]))


def require_loaded(argument: str, name: str) -> None:
    """Raise ArgumentError unless a policy of this name is built in, or its entry point was loaded. Imports nothing."""
    if name not in loaded_names():
        raise ArgumentError(argument, name, f"one of {', '.join(loaded_names())}")


def loaded_names() -> tuple[str, ...]:
    """The names that are built in, and those of entry points that were loaded."""
    return (*POLICIES, *(name for name in _loaded if not _CLASS.fullmatch(name)))


def load_registered() -> None:
    """Load all entry points of the group, so that ``require_loaded`` takes them. One that is broken is logged."""
    for entry in _registered():
        if entry.name not in POLICIES and entry.name not in _loaded:
            try:
                _loaded[entry.name] = _from_entry_point("policy", entry)
            except ConfigError as error:
                log.warning("%s", error)


def is_class(name: str) -> bool:
    """Whether a name has the form ``package.module:Class``."""
    return _CLASS.fullmatch(name) is not None


def _registered() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


def _allowed(others: Iterable[str]) -> str:
    return f"one of {', '.join(dict.fromkeys((*POLICIES, *others)))}, or package.module:Class"


def _imported(setting: str, name: str) -> type[Policy]:
    module_name, _, path = name.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 the module is anybody's: what is wrong with it is told as such
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            setting, name, f"a module that can be imported; {module_name} can't ({why})"
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(setting, name, f"a class that the module has; {module_name} has no {path}")
        found = getattr(found, part)
    return _checked(setting, name, found)


def _from_entry_point(setting: str, entry: EntryPoint) -> type[Policy]:
    whose = f"entry point {entry.value!r} of {entry.dist.name if entry.dist else 'an unknown distribution'}"
    try:
        found: object = entry.load()
    except Exception as error:  # noqa: BLE001 the same
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            setting, entry.name, f"an entry point that can be loaded; {whose} can't ({why})"
        ) from None
    try:
        return _checked(setting, entry.name, found)
    except ConfigError as error:
        raise ConfigError(setting, entry.name, f"{error.allowed} (the {whose})") from None


def _checked(setting: str, name: str, found: object) -> type[Policy]:
    if not isinstance(found, type):
        raise ConfigError(setting, name, f"a class; this is a {type(found).__name__}")
    if not issubclass(found, Policy):
        raise ConfigError(setting, name, "a subclass of radixkv_policies.Policy; this class is none")
    missing = [each for each in found.required if getattr(found, each) is getattr(Policy, each)]
    if missing:
        allowed = f"a policy with {', '.join(found.required)}; this one lacks {', '.join(missing)}"
        raise ConfigError(setting, name, allowed)
    return found
