"""Objects that exist once refuse to be copied: they hold blocks, memory of a device, threads, files or sockets."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


def refuse_copies(cls: type, why: str) -> None:
    """Let ``copy.copy``, ``copy.deepcopy`` and ``pickle`` of the class's instances raise a TypeError that says why.

    Subclasses refuse too. All three ask ``__reduce_ex__``, so this replaces it. It is called after the class statement:
    a compiled class can't have a Python base class, and a decorator would leave it uncompiled.
    """

    def __reduce_ex__(self: object, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{type(self).__name__} can't be copied or pickled: {why}")

    setattr(cls, "__reduce_ex__", __reduce_ex__)  # noqa: B010 - mypy allows no assignment to a method
