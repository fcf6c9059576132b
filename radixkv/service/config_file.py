"""The configuration file: one YAML mapping from names of settings to plain values.

    num-blocks: 65536
    model: /models/my-llama
    log-level: info

It is read as YAML's events, which PyYAML makes one after the other, and nothing is ever constructed of it but texts. A
list or a map as a value, an anchor, an alias, a tag, a second document, a name that occurs twice and an unknown name
are errors with their line. All of them are reported, up to MAX_ERRORS. What isn't YAML, or is long or deep where a
plain value should be, ends the reading. At most MAX_BYTES are read, and only of a regular file.

A file never holds a secret. The settings of secrets are paths of files, and a URL with a password is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Final, NamedTuple

import yaml
from yaml import Event

from radixkv.configuration.errors import raise_all
from radixkv.configuration.urls import without_password
from radixkv.errors import ConfigError, shown
from radixkv.service.options import REMOVED, SETTINGS, Setting, shown_paths

MAX_BYTES: Final = 2**20
MAX_ERRORS: Final = 100
_MAX_PASSED: Final = 1_000
"""Most events of a list or a map, in place of a plain value, that are passed over to read on after it."""
_SHOWN: Final = 80
_PLAIN: Final = frozenset({None, ""})
"""Styles of a scalar without quotes."""
_TEXT: Final = "tag:yaml.org,2002:str"


class FileValue(NamedTuple):
    """A value of the file, or what is wrong with it, and its place, ``radixkv.yaml:3``."""

    value: str | ConfigError
    place: str


def load(path: str, command: str) -> tuple[dict[str, FileValue], list[ConfigError]]:
    """Return the values in a file for a command, by setting, and all errors. O(bytes), at most MAX_BYTES.

    The errors have the line, the value and what is allowed; never a password. Raises ConfigError, or ConfigErrors with
    those before it, if the file can't be read to its end: what is missing then isn't known. It may wait for the disk.
    """
    values: dict[str, FileValue] = {}
    errors: list[ConfigError] = []
    try:
        for key, value in _pairs(path, _text(path)):
            if len(errors) == MAX_ERRORS:
                raise _refused(
                    _place(path, key), f"comes after {MAX_ERRORS} errors: the rest is not read", "fewer"
                )
            try:
                _add(values, path, command, key, value)
            except ConfigError as error:
                errors.append(error)
    except ConfigError as error:  # of the file as a whole
        raise_all([*errors, error])
    return values, errors


def _add(values: dict[str, FileValue], path: str, command: str, key: Event, value: Event) -> None:
    """Add the value of one line. Raises ConfigError, which a setting then has as its value."""
    setting, place = _setting(path, command, key), _place(path, key)
    if setting.name in values:
        problem = f"sets {setting.name} a second time, after {values[setting.name].place}"
        raise _refused(place, problem, "each name once")
    try:
        values[setting.name] = FileValue(_value(path, setting, value), place)
    except ConfigError as error:
        values[setting.name] = FileValue(error, place)
        raise


def _text(path: str) -> str:
    try:
        with open(path, "rb", opener=_open_regular) as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("config", path, f"a file that can be read ({reason})") from None
    if len(content) > MAX_BYTES:
        raise ConfigError("config", path, f"a file of at most {MAX_BYTES} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError("config", path, f"text in UTF-8; byte {error.start} is not") from None


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file. A pipe or a device can't block it. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file")
    return descriptor


def _refused(place: str, problem: str, allowed: str) -> ConfigError:
    return ConfigError(place, None, allowed, problem=f"{problem}; allowed: {allowed}")


def _place(path: str, event: Event) -> str:
    return path if event.start_mark is None else f"{path}:{event.start_mark.line + 1}"


def _pairs(path: str, text: str) -> Iterator[tuple[Event, Event]]:
    """Yield the first events of each name of a document and of its value. Raises ConfigError where it has to end."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        yield from _mapping(path, yaml.parse(text, Loader=loader))
    except (yaml.YAMLError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = path if mark is None else f"{path}:{mark.line + 1}"
        reason = problem or getattr(error, "reason", None) or type(error).__name__
        problem = f"is not YAML: {shown(str(reason), _SHOWN)}"
        raise ConfigError(place, None, "YAML", problem=problem) from None


def _mapping(path: str, events: Iterator[Event]) -> Iterator[tuple[Event, Event]]:
    next(events)  # the start of the stream
    if isinstance(next(events), yaml.StreamEndEvent):
        return  # comments only
    first = next(events)
    if not isinstance(first, yaml.MappingStartEvent):
        is_empty = isinstance(first, yaml.ScalarEvent) and not first.value
        if is_empty and isinstance(next(events), yaml.DocumentEndEvent):
            return  # nothing but ---
        raise _refused(_place(path, first), "is not a map of settings", "a line NAME: VALUE for each")
    _refuse_marks(path, first)
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        is_whole = _passed(key, events)
        value = next(events) if is_whole else key
        is_whole = is_whole and _passed(value, events)
        yield key, value
        if not is_whole:
            raise _refused(
                _place(path, value), "is a list or a map too long to read on after it", "plain values"
            )
    next(events)  # the end of the document
    if not isinstance(after := next(events), yaml.StreamEndEvent):
        raise _refused(_place(path, after), "begins a second document", "one document")


def _passed(first: Event, events: Iterator[Event]) -> bool:
    """Pass over the rest of a name or a value. Returns whether that ended within _MAX_PASSED events."""
    event, depth = first, 0
    for _ in range(_MAX_PASSED):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if not depth:
            return True
        event = next(events)
    return False


def _refuse_marks(path: str, event: Event) -> None:
    """Raise ConfigError for an alias, an anchor or a tag."""
    found = "an alias" if isinstance(event, yaml.AliasEvent) else None
    if found is None and getattr(event, "anchor", None) is not None:
        found = "an anchor"
    if found is None and getattr(event, "tag", None) is not None:
        found = "a tag"
    if found is not None:
        raise _refused(_place(path, event), f"has {found}", "plain values")


def _setting(path: str, command: str, key: Event) -> Setting:
    """Return the setting that a key names. Raises ConfigError, with the nearest name for an unknown one."""
    _refuse_marks(path, key)
    if not isinstance(key, yaml.ScalarEvent):
        raise _refused(_place(path, key), "has a list or a map as a name", "names of settings")
    if key.value in SETTINGS[command]:
        return SETTINGS[command][key.value]
    if key.value in REMOVED[command]:
        raise _refused(f"{_place(path, key)}: {key.value}", "was removed", REMOVED[command][key.value])
    problem = (
        f"{shown(key.value, _SHOWN)} is not a setting of `radixkv {command}`{_nearest(command, key.value)}"
    )
    raise ConfigError(f"{_place(path, key)}:", key.value, "names of settings", problem=problem)


def _nearest(command: str, name: str) -> str:
    others = [each for each, settings in SETTINGS.items() if name in settings]
    if others:
        return f", but of `radixkv {others[0]}`"
    near = get_close_matches(name[:_SHOWN].lower().replace("_", "-"), SETTINGS[command], 1, 0.0)
    return f"; the nearest is {near[0]}" if near else ""


def _value(path: str, setting: Setting, event: Event) -> str:
    """Return the text of a value. Raises ConfigError if it has another type than the setting."""
    _refuse_marks(path, event)
    name = f"{_place(path, event)}: {setting.name}"
    if not isinstance(event, yaml.ScalarEvent):
        kind = "list" if isinstance(event, yaml.SequenceStartEvent) else "map"
        raise _refused(name, f"is a {kind}", setting.allowed)
    text: str = event.value
    is_plain = event.style in _PLAIN
    if setting.is_number:
        if not is_plain:
            raise ConfigError(name, text, f"{setting.allowed}, without quotes")
        return text  # its digits are checked where all sources are
    if is_plain and not text:
        raise _refused(name, "has no value", setting.allowed)
    tag = getattr(yaml.compose(text, Loader=yaml.SafeLoader), "tag", _TEXT) if is_plain else _TEXT
    if tag != _TEXT:
        value = (
            "…" if setting.displayed is shown_paths else shown(text, _SHOWN)
        )  # digits may be the secret itself
        problem = f"has a value that YAML reads as {tag.rpartition(':')[2]}, {value}"
        raise _refused(name, problem, f"{setting.allowed}; put it in quotes if you mean it")
    if setting.displayed is without_password and without_password(text) != text:
        allowed = f"a URL without a password; set {setting.variable} in the environment, or redis-password"
        raise ConfigError(name, without_password(text), allowed)
    return text
