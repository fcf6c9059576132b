"""Where the value of each setting comes from: flag > environment > file > default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from radixkv.configuration import config_file
from radixkv.configuration.definitions import COMMANDS, Setting, displayed

Source = Literal["flag", "environment", "file", "default"]


class Value(NamedTuple):
    """The value of a setting that is in force, and its source.

    ``text`` is None if the setting has neither a value nor a default. ``place`` is the option, the variable, or the
    file and line; empty for a default.
    """

    setting: Setting
    text: str | None
    source: Source
    place: str

    @property
    def name(self) -> str:
        """The setting's name as its user wrote it, for errors."""
        name = self.setting.name
        return {"file": f"{self.place}: {name}", "environment": self.place}.get(self.source, f"--{name}")

    @property
    def displayed(self) -> str:
        """The value for display, without secrets; in parentheses what holds if there is none."""
        return f"({self.setting.unset})" if self.text is None else displayed(self.setting, self.text)


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of one process. ``flags`` and ``environment`` are by setting; ``path`` is the file's, or None."""

    command: str
    flags: Mapping[str, str]
    environment: Mapping[str, str]
    path: str | None

    def resolve(self) -> dict[str, Value]:
        """Read the file and return all settings of the command, in their order. Raises ConfigError, MissingExtra."""
        found = {} if self.path is None else config_file.load(self.path, self.command)
        return {
            name: self._value(setting, found.get(name)) for name, setting in COMMANDS[self.command].items()
        }

    def _value(self, setting: Setting, in_file: config_file.FileValue | None) -> Value:
        name = setting.name
        if name in self.flags:
            return Value(setting, self.flags[name], "flag", f"--{name}")
        if name in self.environment:
            return Value(setting, self.environment[name], "environment", setting.variable)
        if in_file is not None:
            return Value(setting, in_file.text, "file", in_file.place)
        return Value(setting, setting.default, "default", "")


def texts(values: Mapping[str, Value]) -> dict[str, str | None]:
    """Return the values by setting, as ``ServeSettings.parse`` takes them."""
    return {name: value.text for name, value in values.items()}


def names(values: Mapping[str, Value]) -> dict[str, str]:
    """Return the names by setting that errors show."""
    return {name: value.name for name, value in values.items()}
