"""Writes docstrings and signatures into the C code that mypyc makes. A compiled build then has the help of its sources.

mypyc drops all docstrings. It also drops a signature with a default that is no literal. CPython reads both from strings
in C: ``ml_doc`` of a method, ``tp_doc`` of a class, ``doc`` of a property, ``m_doc`` of a module. It reads them only
when ``__doc__`` or ``__text_signature__`` is accessed, so calls cost the same as before. The libraries grow by a few
percent. Such a string can't hold annotations. Editors and type checkers read annotations in the ``.py`` files, which
are installed too.
"""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

from mypyc.codegen.cstring import c_string_initializer
from mypyc.namegen import NameGenerator

STRING = r'(NULL|"(?:[^"\\]|\\.)*")'
CALLABLE = re.compile(rf"(\(PyCFunction\)CPyPy_(\w+),\s*[\w |]+, PyDoc_STR\(){STRING}")
CLASS = re.compile(
    rf"(\.tp_doc = PyDoc_STR\(){STRING}(\),\s*\}};\s*static PyTypeObject \*CPyType_(\w+)_template\b)"
)
PROPERTY = re.compile(r"(\(getter\)(\w+),\s*(?:\(setter\)\w+|NULL),\s*)NULL(, NULL\})")
MODULE = re.compile(r'("([\w.]+)",\s*)NULL(, /\* docstring \*/)')
FILLER = re.compile(
    r"( = )CPyStatics\[\d+\]; /\* 'mypyc filler docstring' \*/"
    r'((?:(?!mypyc filler).)*?CPy_AddTraceback\("([^"]+)", "<module>", (\d+),)',
    re.DOTALL,
)
"""The docstring of a class that stays a Python class, for example a NamedTuple. Its line number follows, for
tracebacks.
"""
INFINITE = {"inf", "math.inf", "np.inf", "numpy.inf"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def document(generated: Path, root: Path, sources: list[str]) -> None:
    """Write the docstrings and signatures of ``sources``, relative to ``root``, into the C files below ``generated``.

    ``sources`` are all modules of one library.
    """
    known = Documentation(root, sources)
    for file in generated.rglob("*.c"):
        file.write_text(known.written_into(file.read_text()))


class Documentation:
    """Docstrings and signatures of the modules of one library, as C strings. Keys are the C names of the described
    objects.
    """

    def __init__(self, root: Path, sources: list[str]) -> None:
        modules = {source: source.removesuffix(".py").replace("/", ".") for source in sources}
        self._names = NameGenerator([list(modules.values())])
        self._callables: dict[str, str] = {}
        self._classes: dict[str, tuple[str | None, str]] = {}
        """Signature, if the class has its own ``__init__``, and docstring."""
        self._properties: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        self._lines: dict[tuple[str, int], str] = {}
        """Docstrings of classes by file and line."""
        for source, module in modules.items():
            self._read(source, module, ast.parse((root / source).read_text()))

    def written_into(self, code: str) -> str:
        """Return the C code with the strings inserted."""
        code = CALLABLE.sub(self._callable, code)
        code = CLASS.sub(self._class, code)
        code = PROPERTY.sub(lambda found: _filled(found, self._properties), code)
        code = MODULE.sub(lambda found: _filled(found, self._modules), code)
        return FILLER.sub(self._python_class, code)

    def _callable(self, found: re.Match[str]) -> str:
        start, name, old = found.groups()
        return start + self._callables.get(name, old)

    def _class(self, found: re.Match[str]) -> str:
        start, old, end, name = found.groups()
        signature, doc = self._classes.get(name, (None, '""'))
        before = signature or (
            "" if old == "NULL" else old
        )  # without its own signature, mypyc has used the inherited one
        return f"{start}{before} {doc}{end}"

    def _python_class(self, found: re.Match[str]) -> str:
        start, rest, source, line = found.groups()
        doc = self._lines.get((source, int(line)))
        return found[0] if doc is None else f"{start}PyUnicode_FromString({doc});{rest}"

    def _read(self, source: str, module: str, tree: ast.Module) -> None:
        self._modules[module] = _doc(tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self._read_class(module, node)
                self._lines[source, node.lineno] = _doc(node)
            elif isinstance(node, Function):
                described = _signature(node.name, node.args) + _doc(node)
                self._callables[self._names.private_name(module, node.name)] = described

    def _read_class(self, module: str, node: ast.ClassDef) -> None:
        class_name = self._names.private_name(module, node.name)
        signature = None
        for method in (each for each in node.body if isinstance(each, Function)):
            decorators = {ast.unparse(each) for each in method.decorator_list}
            if "property" in decorators:
                self._properties[f"{class_name}_get_{method.name}"] = _doc(method)
                continue
            prefix = "" if "staticmethod" in decorators else "$"
            name = self._names.private_name(module, f"{node.name}.{method.name}")
            self._callables[name] = _signature(method.name, method.args, prefix) + _doc(method)
            if method.name == "__init__":
                signature = _signature(node.name, _without_first(method.args))
        self._classes[class_name] = signature, _doc(node)


def _filled(found: re.Match[str], docs: dict[str, str]) -> str:
    start, name, end = found.groups()
    return start + docs.get(name, "NULL") + end


def _doc(node: ast.Module | ast.ClassDef | Function) -> str:
    return _c_string(ast.get_docstring(node) or "")


def _c_string(text: str) -> str:
    return c_string_initializer(text.encode())


def _without_first(given: ast.arguments) -> ast.arguments:
    rest = copy.deepcopy(given)
    del (rest.posonlyargs or rest.args)[0]
    return rest


def _signature(name: str, given: ast.arguments, prefix: str = "") -> str:
    """Return the signature, in the form that CPython splits from a docstring.

    ``prefix`` is put before the first name. It is ``$`` where a bound method has that argument already.
    """
    shown = copy.deepcopy(given)
    named = [*shown.posonlyargs, *shown.args, shown.vararg, *shown.kwonlyargs, shown.kwarg]
    for argument in filter(None, named):
        argument.annotation = None
    for argument in (shown.posonlyargs or shown.args)[:1]:
        argument.arg = prefix + argument.arg
    shown.defaults = [_default(each) for each in shown.defaults]
    shown.kw_defaults = [each and _default(each) for each in shown.kw_defaults]
    return _c_string(f"{name}({ast.unparse(shown)})\n--\n\n")


def _default(value: ast.expr) -> ast.expr:
    """Return the default if it is a literal or infinity, otherwise ``...`` as in a stub. ``inspect`` evaluates no
    other.
    """
    if ast.unparse(value) in INFINITE:
        return ast.Attribute(ast.Name("math"), "inf")
    try:
        ast.literal_eval(value)
    except ValueError:
        return ast.Constant(...)
    return value
