"""For SGLang on a CPU: two packages that it imports and that exist only for CUDA are empty there.

Python imports this in each process whose PYTHONPATH names this folder, also in those that SGLang starts. Everything
in the two packages is a class that can be called, subclassed and combined, and does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

EMPTY = ("sgl_kernel", "torchvision")


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **named: Any) -> Any:
        """A decorator gives back what it decorates; everything else gives nothing."""
        return args[0] if len(args) == 1 and callable(args[0]) else cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Nothing(metaclass=_Nothing):
    """What every name in the empty packages stands for."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the modules of the empty packages."""
        if fullname.partition(".")[0] not in EMPTY:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a module in which every name exists."""
        module = _Module(spec.name)
        vars(module)["__version__"] = "0.0.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


sys.meta_path.append(_Finder())
