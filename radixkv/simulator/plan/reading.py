"""Reads what describes a model: config.json, and the headers of its safetensors files. All of it may be hostile.

Sizes are bounded before anything is parsed, and each field is checked when it is read: its type, its range. An error
names the file, the field, its value and what is allowed. No tensor's data is read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from radixkv.errors import ConfigError, shown

MAX_CONFIG_BYTES: Final = 1 << 20
MAX_HEADER_BYTES: Final = 1 << 26
"""Of one safetensors file. The largest known have a few MiB."""
MAX_HEADERS_BYTES: Final = 1 << 29
"""Of all files of a folder."""
MAX_FILES: Final = 2_048
MAX_LAYERS: Final = 1_024
MAX_COUNT: Final = 1 << 24
"""The largest number in a config that counts something: heads, experts, dimensions, ids."""
MAX_TENSOR_BYTES: Final = 1 << 50
_LENGTH_BYTES: Final = 8

ELEMENT_BITS: Final[Mapping[str, int]] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "C64": 64,
}  # fmt: skip
"""The element types of safetensors."""


class Fields:
    """The fields of a JSON object, each checked when it is read. ``null`` counts as missing."""

    def __init__(self, path: Path, values: Mapping[str, Any], inside: str = "") -> None:
        self.path, self._values, self._inside = path, values, inside

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def refused(self, name: str, allowed: str) -> ConfigError:
        """Return the error for a field."""
        value = self._values.get(name)
        where = f"{self.path}: {self._inside}{name}"
        if isinstance(value, list | dict):
            return ConfigError(
                where, value, allowed, problem=f"={shown(value, 80)} is not allowed; allowed: {allowed}"
            )
        return ConfigError(where, value, allowed)

    def count(self, *names: str, low: int = 1, high: int = MAX_COUNT) -> int:
        """Return an integer from ``low`` to ``high``, of the first name that is there. Required."""
        found = self.optional_count(*names, low=low, high=high)
        if found is None:
            raise self.refused(names[0], f"an integer from {low} to {high}")
        return found

    def optional_count(self, *names: str, low: int = 1, high: int = MAX_COUNT) -> int | None:
        """Return the same; None if none of the names is there."""
        name = next((each for each in names if each in self), names[0])
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refused(name, f"an integer from {low} to {high}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refused(name, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str | None:
        """Return a string of at most 200 characters, of the first name that is there."""
        name = next((each for each in names if each in self), names[0])
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or not 0 < len(value) <= 200:
            raise self.refused(name, "a string of 1 to 200 characters")
        return value

    def texts(self, name: str, most: int = MAX_LAYERS) -> list[str] | None:
        """Return a list of strings; None if there is none."""
        value = self._values.get(name)
        if value is None:
            return None
        is_list = isinstance(value, list) and len(value) <= most
        if not is_list or not all(isinstance(each, str) and len(each) <= 1_000 for each in value):
            raise self.refused(name, f"a list of at most {most} strings")
        return list(value)

    def counts(self, name: str, *, low: int = 0, most: int = MAX_LAYERS) -> list[int] | None:
        """Return a list of integers; None if there is none."""
        value = self._values.get(name)
        if value is None:
            return None
        is_list = isinstance(value, list) and len(value) <= most
        if not is_list or not all(type(each) is int and low <= each <= MAX_COUNT for each in value):
            raise self.refused(name, f"a list of at most {most} integers from {low} to {MAX_COUNT}")
        return list(value)

    def extents(self, name: str, length: int | None = None) -> tuple[int, ...]:
        """Return a list of at most eight integers ≥ 0, as shapes and offsets of tensors have. Required."""
        value = self._values.get(name)
        is_list = isinstance(value, list) and len(value) <= 8 and length in (None, len(value))
        if is_list and all(type(each) is int and 0 <= each <= MAX_TENSOR_BYTES for each in value or ()):
            return tuple(value or ())
        raise self.refused(name, f"a list of {'at most 8' if length is None else length} integers ≥ 0")

    def inner(self, name: str) -> Fields | None:
        """Return an object inside; None if there is none."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refused(name, "an object")
        return Fields(self.path, value, f"{self._inside}{name}.")

    def says(self, name: str) -> bool:
        """Whether a field is there and says something: not null, false, 0 or empty."""
        return bool(self._values.get(name))

    def is_text(self, name: str) -> bool:
        """Whether a field is a string."""
        return isinstance(self._values.get(name), str)

    def only(self, names: Iterable[str]) -> Fields:
        """Return the fields of these names."""
        return Fields(self.path, {name: self._values[name] for name in names if name in self}, self._inside)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return these fields, and the defaults of those that aren't there. A null is there."""
        return Fields(self.path, {**defaults, **self._values}, self._inside)

    def over(self, others: Fields) -> Fields:
        """Return these fields, and the others where these have none."""
        merged = {**others._values, **{name: each for name, each in self._values.items() if each is not None}}
        return Fields(self.path, merged, self._inside)


def read_config(place: str | Path, setting: str = "--model") -> Fields:
    """Return the fields of a folder's config.json, or of such a file. Raises ConfigError, with the setting."""
    path = Path(place)
    try:
        file = path / "config.json" if path.is_dir() else path
        with open(file, "rb", opener=_without_waiting) as source:
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                raise ConfigError(setting, str(place), "a folder with a config.json, or such a file")
            raw = source.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            setting, str(place), f"a folder with a config.json, or such a file ({why})"
        ) from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(setting, str(place), f"a config.json of at most {MAX_CONFIG_BYTES:,} bytes")
    return Fields(file, _object(raw, str(file)))


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a named pipe is opened too, at once, and then refused."""
    return os.open(path, flags | os.O_NONBLOCK)


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(raw, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, shown(bytes(raw[:40])), f"JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(where, type(found).__name__, "a JSON object")
    return found


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


class Tensor(NamedTuple):
    """A tensor of a safetensors file: its name, element type, shape, and bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """The product of its shape."""
        found = 1
        for each in self.shape:
            found *= each
        return found


def tensors_in(folder: Path) -> list[Tensor] | None:
    """Return the tensors of all ``*.safetensors`` files of a folder; None if it has none. Reads headers only.

    Raises ConfigError for damaged, cut off or too many files, and for a name in two files.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    if len(files) > MAX_FILES:
        raise ConfigError(
            "--model", str(folder), f"at most {MAX_FILES:,} safetensors files; it has {len(files):,}"
        )
    found: dict[str, Tensor] = {}
    room = MAX_HEADERS_BYTES
    for file in files:
        header, num_bytes = _header(file, room)
        room -= num_bytes
        for tensor in header:
            if tensor.name in found:
                raise ConfigError(str(file), tensor.name, "names of tensors that no other file has")
            found[tensor.name] = tensor
    return list(found.values())


def _header(file: Path, room: int) -> tuple[list[Tensor], int]:
    """Return the tensors of a file, and the bytes of its header."""
    try:
        with open(file, "rb", opener=_without_waiting) as source:
            status = os.fstat(source.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(str(file), "no regular file", "a safetensors file")
            size = int.from_bytes(source.read(_LENGTH_BYTES), "little")
            if not 2 <= size <= min(MAX_HEADER_BYTES, room, max(status.st_size - _LENGTH_BYTES, 0)):
                allowed = f"a header of 2 to {MAX_HEADER_BYTES:,} bytes inside the file, {MAX_HEADERS_BYTES:,} in all"
                raise ConfigError(str(file), size, allowed)
            raw = source.read(size)
    except OSError as error:
        raise ConfigError(str(file), error.strerror, "a safetensors file that can be read") from None
    parsed = _object(raw, str(file))
    parsed.pop("__metadata__", None)
    tensors = [_tensor(file, name, each) for name, each in parsed.items()]
    wanted = _LENGTH_BYTES + size + sum(each.num_bytes for each in tensors)
    if wanted != status.st_size:
        raise ConfigError(str(file), status.st_size, f"{wanted} bytes, as its header says: a whole file")
    return tensors, size


def _tensor(file: Path, name: str, given: object) -> Tensor:
    fields = Fields(file, given if isinstance(given, dict) else {}, f"{shown(name, 80)}.")
    dtype = fields.text("dtype")
    if dtype is None or dtype not in ELEMENT_BITS:
        raise fields.refused("dtype", f"one of {', '.join(ELEMENT_BITS)}")
    shape = fields.extents("shape")
    start, stop = fields.extents("data_offsets", 2)
    made = Tensor(name, dtype, shape, stop - start)
    if made.num_bytes * 8 != made.num_elements * ELEMENT_BITS[dtype]:
        raise fields.refused("data_offsets", f"the bytes of {dtype} {list(shape)}")
    return made
