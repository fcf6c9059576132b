"""What import contracts can't say: no circles between files, and the state of a cache belongs to the index."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).parents[2] / "radixkv"

HELD_BY_USERS = {"cache", "sequence", "match", "lease", "beams"}
"""The usual names of variables and attributes that hold a cache, or an object that it handed out."""


def _outside_the_index() -> list[tuple[str, ast.AST]]:
    root = PACKAGE.parent
    folders = (
        PACKAGE,
        root / "kernels",
        root / "policies",
        root / "benchmarks",
        root / "fuzz",
        root / "examples",
    )
    found = [
        path for folder in folders for path in folder.rglob("*.py") if PACKAGE / "index" not in path.parents
    ]
    return [
        (f"{path.relative_to(root)}:{node.lineno}", node)
        for path in found
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    ]


def test_no_files_import_each_other_in_a_circle() -> None:
    """This includes imports for types."""
    graph = grimp.build_graph(
        "radixkv", "radixkv_kernels", "radixkv_policies", "benchmarks", exclude_type_checking_imports=False
    )
    imported = {
        module: {each for each in graph.find_modules_directly_imported_by(module) if each in graph.modules}
        for module in graph.modules
    }
    left = dict(imported)
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    assert sorted(left) == []


def test_only_the_index_uses_private_attributes_of_its_objects() -> None:
    """Attributes with an underscore of a cache, a sequence, a match or a lease belong to the index."""
    found = []
    for place, node in _outside_the_index():
        assert isinstance(node, ast.Attribute)
        owner = node.value
        name = (
            owner.id
            if isinstance(owner, ast.Name)
            else owner.attr
            if isinstance(owner, ast.Attribute)
            else ""
        )
        is_inside = node.attr.startswith("_") and not node.attr.startswith("__")
        if is_inside and name.strip("_") in HELD_BY_USERS:
            found.append(f"{place} {name}.{node.attr}")
    assert found == []


def test_only_the_index_writes_the_state_of_a_cache() -> None:
    state = ast.parse((PACKAGE / "index" / "state.py").read_text())
    attributes = {
        node.attr
        for node in ast.walk(state)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.startswith("_")
    }
    assert {"_lock", "_tenants", "_sequences", "_pool"} <= attributes
    found = []
    for place, node in _outside_the_index():
        assert isinstance(node, ast.Attribute)
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if isinstance(node.ctx, ast.Store | ast.Del) and node.attr in attributes and not is_own:
            found.append(f"{place} {node.attr}")
    assert found == []
