"""What classes say to the compiler, where the policies are compiled; nothing as pure Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_):
        """What a class is to be when it is compiled.

        ``allow_interpreted_subclasses``: as it says. ``acyclic``: it is in no cycle of references, so that the
        garbage collector need not look at its objects.
        """
        return lambda cls: cls
