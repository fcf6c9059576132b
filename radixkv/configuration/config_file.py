"""The configuration file: one YAML mapping from names of settings to plain values.

    num-blocks: 65536
    model: /models/my-llama
    log-level: info

It is read as YAML's events, which PyYAML makes one after the other. So the first thing that isn't allowed ends the
reading, however deep or long the rest is: a list or a map as a value, an anchor, an alias, a tag, a second document, a
name that occurs twice, an unknown name. Nothing is ever constructed of the file but texts. At most MAX_BYTES are read,
and only of a regular file.

A file never holds a secret. The settings of secrets are paths of files, and a URL with a password is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NamedTuple

from radixkv.configuration.definitions import COMMANDS, REMOVED, Setting, without_password
from radixkv.errors import ConfigError, require_extra, shown

if TYPE_CHECKING:
    from yaml import Event, ScalarEvent

MAX_BYTES: Final = 2**20
_SHOWN: Final = 80
_PLAIN: Final = frozenset({None, ""})
"""Styles of a scalar without quotes."""
_TEXT: Final = "tag:yaml.org,2002:str"


class FileValue(NamedTuple):
    """A value of the file, and its place, ``radixkv.yaml:3``."""

    text: str
    place: str


def load(path: str, command: str) -> dict[str, FileValue]:
    """Return the values in a file for a command, by setting. O(bytes), at most MAX_BYTES; it may wait for the disk.

    Raises ConfigError with the line, the value and what is allowed; never with a password. Raises MissingExtra.
    """
    require_extra("a configuration file", "http")
    return dict(_values(path, command, _text(path)))


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


def _values(path: str, command: str, text: str) -> Iterator[tuple[str, FileValue]]:
    """Yield the names and values of a document. Raises ConfigError."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        events = yaml.parse(text, Loader=loader)
        yield from _mapping(path, command, events)
    except (yaml.YAMLError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = path if mark is None else f"{path}:{mark.line + 1}"
        reason = problem or getattr(error, "reason", None) or type(error).__name__
        problem = f"is not YAML: {shown(str(reason), _SHOWN)}"
        raise ConfigError(place, None, "YAML", problem=problem) from None


def _refused(place: str, problem: str, allowed: str) -> ConfigError:
    return ConfigError(place, None, allowed, problem=f"{problem}; allowed: {allowed}")


def _mapping(path: str, command: str, events: Iterator[Event]) -> Iterator[tuple[str, FileValue]]:
    import yaml

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
    seen: dict[str, str] = {}
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        setting, place = _setting(path, command, key), _place(path, key)
        if setting.name in seen:
            problem = f"sets {setting.name} a second time, after {seen[setting.name]}"
            raise _refused(place, problem, "each name once")
        seen[setting.name] = place
        yield setting.name, FileValue(_value(path, setting, next(events)), place)
    next(events)  # the end of the document
    if not isinstance(after := next(events), yaml.StreamEndEvent):
        raise _refused(_place(path, after), "begins a second document", "one document")


def _place(path: str, event: Event) -> str:
    return path if event.start_mark is None else f"{path}:{event.start_mark.line + 1}"


def _refuse_marks(path: str, event: Event) -> None:
    """Raise ConfigError for an alias, an anchor or a tag."""
    import yaml

    found = "an alias" if isinstance(event, yaml.AliasEvent) else None
    if found is None and getattr(event, "anchor", None) is not None:
        found = "an anchor"
    if found is None and getattr(event, "tag", None) is not None:
        found = "a tag"
    if found is not None:
        raise _refused(_place(path, event), f"has {found}", "plain values")


def _setting(path: str, command: str, key: Event) -> Setting:
    """Return the setting that a key names. Raises ConfigError, with the nearest name for an unknown one."""
    import yaml

    _refuse_marks(path, key)
    if not isinstance(key, yaml.ScalarEvent):
        raise _refused(_place(path, key), "has a list or a map as a name", "names of settings")
    known = COMMANDS[command]
    if key.value in known:
        return known[key.value]
    if key.value in REMOVED[command]:
        raise _refused(f"{_place(path, key)}: {key.value}", "was removed", REMOVED[command][key.value])
    raise ConfigError(
        f"{_place(path, key)}:",
        key.value,
        "names of settings",
        problem=f"{shown(key.value, _SHOWN)} is not a setting of `radixkv {command}`{_nearest(command, key.value)}",
    )


def _nearest(command: str, name: str) -> str:
    others = [each for each, settings in COMMANDS.items() if name in settings]
    if others:
        return f", but of `radixkv {others[0]}`"
    near = get_close_matches(name[:_SHOWN].lower().replace("_", "-"), COMMANDS[command], 1, 0.0)
    return f"; the nearest is {near[0]}" if near else ""


def _value(path: str, setting: Setting, event: Event) -> str:
    """Return the text of a value. Raises ConfigError if it has another type than the setting."""
    import yaml

    _refuse_marks(path, event)
    name = f"{_place(path, event)}: {setting.name}"
    if not isinstance(event, yaml.ScalarEvent):
        kind = "list" if isinstance(event, yaml.SequenceStartEvent) else "map"
        raise _refused(name, f"is a {kind}", setting.allowed)
    text = event.value
    _refuse_type(name, setting, event)
    if setting.kind == "url" and without_password(text) != text:
        allowed = f"a URL without a password; set {setting.variable} in the environment, or redis-password"
        raise ConfigError(name, without_password(text), allowed)
    return text


def _refuse_type(name: str, setting: Setting, event: ScalarEvent) -> None:
    import yaml

    text, is_plain = event.value, event.style in _PLAIN
    if setting.kind in ("integer", "number"):
        if not is_plain:
            raise ConfigError(name, text, f"{setting.allowed}, without quotes")
        return  # its digits are checked where all sources are
    if is_plain and not text:
        raise _refused(name, "has no value", setting.allowed)
    tag = getattr(yaml.compose(text, Loader=yaml.SafeLoader), "tag", _TEXT) if is_plain else _TEXT
    if tag != _TEXT:
        value = (
            "…" if setting.kind == "secret file" else shown(text, _SHOWN)
        )  # digits may be the secret itself
        problem = f"has a value that YAML reads as {tag.rpartition(':')[2]}, {value}"
        raise _refused(name, problem, f"{setting.allowed}; put it in quotes if you mean it")
