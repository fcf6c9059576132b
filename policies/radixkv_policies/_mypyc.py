"""Declarations for mypyc. They have no effect in pure Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_):
        """Declare properties of a compiled class.

        allow_interpreted_subclasses: uncompiled classes may subclass it. acyclic: it is in no reference cycle, so the
        garbage collector can skip its objects.
        """
        return lambda cls: cls
