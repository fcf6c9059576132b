"""The layout of the package: the name of a file says which names it defines."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).parents[2] / "radixkv"

LOCATIONS = {
    "match": ("index/match.py", "Match"),
    "copy-on-write": ("index/runs.py", "Runs"),
    "admission of a request": ("index/requests.py", "_admit"),
    "purge": ("index/purge.py", "purge"),
    "ghost keys": ("index/ghost_keys.py", "SegmentKeys"),
    "audit snapshot": ("index/snapshot.py", "Snapshot"),
    "scrubbing": ("index/scrubbing.py", "Scrubber"),
    "expiry of pins": ("index/pins.py", "Pins.end_due"),
    "route costs": ("coordination/routing/costs.py", "COSTS"),
    "pins of the fleet": ("service/fleet/pins.py", "FleetPins"),
    "warm jobs": ("service/fleet/warm_jobs.py", "WarmJobs"),
    "key rotation": ("service/key_store.py", "KeyStore.rotate"),
    "keys of engines": ("signing.py", "KeySet.derive"),
    "settings": ("configuration/definitions.py", "Setting"),
    "configuration file": ("configuration/config_file.py", "load"),
    "reload": ("service/reloading.py", "Reloader"),
    "KV events": ("events/event_stream.py", "EventStream"),
    "order of waiting requests": ("scheduling/request_queue.py", "RequestQueue"),
    "what a record on disk is": ("tiers/record_identity.py", "RecordIdentity"),
    "keys of a disk tier": ("tiers/folder.py", "TenantKeys"),
    "usage records": ("billing/usage_record.py", "UsageRecord"),
    "check of a usage log": ("billing/usage_check.py", "verify"),
    "fairness between tenants": ("scheduling/virtual_time.py", "VirtualTime"),
}
"""The topic, its file, and a name that the file defines: a class, a function, a method or a constant."""

FILES = {
    "__init__.py",
    "__main__.py",
    "_compiled.py",
    "clock.py",
    "config.py",
    "errors.py",
    "py.typed",
    "signing.py",
}
PACKAGES = {
    "audit",
    "bench",
    "billing",
    "cli",
    "configuration",
    "coordination",
    "engines",
    "events",
    "index",
    "scheduling",
    "service",
    "storage",
    "tiers",
    "tokenizer",
}

MAY_REPEAT = {"__init__.py", "pins.py", "validation.py"}
"""File names that mean the same in several packages."""

PARTS = {"endpoints", "schemas", "fleet", "store"}
"""Folders whose files are named after parts of other packages: an endpoint, its schema."""


def defined_in(path: Path) -> set[str]:
    """Return the names at the top of a module, and the methods of its classes as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@pytest.mark.parametrize("topic", LOCATIONS)
def test_each_topic_is_in_its_file(topic: str) -> None:
    file, name = LOCATIONS[topic]
    assert name in defined_in(PACKAGE / file)


def test_the_package_has_only_the_expected_files_and_folders() -> None:
    found = {path for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "_native")}
    assert {path.name for path in found if path.is_file()} == FILES
    assert {path.name for path in found if path.is_dir()} == PACKAGES


def test_file_names_are_unique() -> None:
    named: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.name not in MAY_REPEAT and path.parent.name not in PARTS:
            named[path.name].append(path.relative_to(PACKAGE).as_posix())
    assert [files for files in named.values() if len(files) > 1] == []


HELD_BY_USERS = {"cache", "sequence", "match", "lease", "beams"}
"""The usual names of variables and attributes that hold a cache, or an object that it handed out."""


def _outside_the_index() -> list[tuple[str, ast.AST]]:
    root = PACKAGE.parent
    folders = (PACKAGE, root / "kernels", root / "policies", root / "fuzz", root / "examples")
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
        "radixkv", "radixkv_kernels", "radixkv_policies", exclude_type_checking_imports=False
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


def test_the_public_api_of_the_cache_stays_short() -> None:
    """``PrefixCache`` checks, locks and delegates. What works belongs in the modules that it calls."""
    assert len((PACKAGE / "index" / "cache.py").read_text().splitlines()) <= 650
