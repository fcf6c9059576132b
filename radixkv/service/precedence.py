"""Where the value of each setting comes from: flag > environment > file > default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from radixkv.configuration.errors import raise_all
from radixkv.errors import ConfigError
from radixkv.service import config_file
from radixkv.service.options import COMMANDS, SETTINGS, RouteSettings, ServeSettings, Setting

Source = Literal["flag", "environment", "file", "default"]


class Value(NamedTuple):
    """The value of a setting that is in force, and its source.

    ``text`` is None if the setting has neither a value nor a default. ``place`` is the option, the variable, or the
    file and line; empty for a default. ``error``: what the file has in place of a value.
    """

    setting: Setting
    text: str | None
    source: Source
    place: str
    error: ConfigError | None = None

    @property
    def name(self) -> str:
        """The setting's name as its user wrote it, for errors."""
        name = self.setting.name
        return {"file": f"{self.place}: {name}", "environment": self.place}.get(self.source, f"--{name}")

    @property
    def displayed(self) -> str:
        """The value for display, without secrets; in parentheses what holds if there is none."""
        return f"({self.setting.unset})" if self.text is None else self.setting.displayed(self.text)


class Found(NamedTuple):
    """All settings of a command, in the order of lists, and the errors of the sources."""

    command: str
    values: Mapping[str, Value]
    errors: tuple[ConfigError, ...]

    def parsed(self) -> ServeSettings | RouteSettings:
        """Return the settings, frozen. Raises ConfigError, which has all errors: of the sources and of the values."""
        texts = {name: value.error or value.text for name, value in self.values.items()}
        names = {name: value.name for name, value in self.values.items()}
        return COMMANDS[self.command].parse(texts, names, self.errors)


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of one process. ``flags`` and ``environment`` are by setting; ``path`` is the file's, or None.

    ``errors``: what is wrong with flags or variables already.
    """

    command: str
    flags: Mapping[str, str]
    environment: Mapping[str, str]
    path: str | None
    errors: tuple[ConfigError, ...] = ()

    def read(self) -> Found:
        """Read the file and return what all sources have. Raises ConfigError if it can't be read to its end."""
        in_file, errors = ({}, []) if self.path is None else config_file.load(self.path, self.command)
        values = {
            name: self._value(setting, in_file.get(name)) for name, setting in SETTINGS[self.command].items()
        }
        return Found(self.command, values, (*self.errors, *errors))

    def resolve(self) -> Mapping[str, Value]:
        """Read the file and return the values. Raises ConfigError if a source has an error."""
        found = self.read()
        raise_all(found.errors)
        return found.values

    def _value(self, setting: Setting, in_file: config_file.FileValue | None) -> Value:
        name = setting.name
        if name in self.flags:
            return Value(setting, self.flags[name], "flag", f"--{name}")
        if name in self.environment:
            return Value(setting, self.environment[name], "environment", setting.variable)
        if in_file is None:
            return Value(setting, setting.default, "default", "")
        if isinstance(in_file.value, ConfigError):
            return Value(setting, None, "file", in_file.place, in_file.value)
        return Value(setting, in_file.value, "file", in_file.place)
