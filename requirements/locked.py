"""Prints what ``requirements/lock.txt`` pins for some extras of radixkv, for ``pip install --no-deps --requirement``.

    python requirements/locked.py all,build            everything but torch, with hashes
    python requirements/locked.py all,build --torch    torch alone, without: there is a build for each accelerator

torch brings the libraries of its accelerator itself, in exact versions. `make upgrade` writes the lock file.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
OF_AN_ACCELERATOR = ("cuda-", "nvidia-")
"""What the names of torch's own libraries start with."""


def required(extras: Iterable[str]) -> set[str]:
    """Return the names that radixkv requires directly with these extras."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {_name(each) for each in project["dependencies"]}
    left, seen = list(extras), set()
    while left:
        extra = left.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            own = re.fullmatch(r"radixkv\[([^]]*)\]", requirement)
            if own:
                left += [each.strip() for each in own[1].split(",")]
            else:
                found.add(_name(requirement))
    return found


def pinned() -> Iterator[tuple[str, str, set[str]]]:
    """Yield each pin of the lock file: its name, its lines, and the names that require it."""
    text = (HERE / "lock.txt").read_text(encoding="utf-8")
    for lines in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]:
        reasons = lines.partition("# via")[2]
        yield _name(lines), lines, set(re.findall(r"[a-z0-9][\w.-]*(?= *(?:\(|$))", reasons, re.MULTILINE))


def locked(extras: Iterable[str]) -> dict[str, str]:
    """Return the lines of all that these extras need, by name, without the libraries of an accelerator."""
    pins = [each for each in pinned() if not each[0].startswith(OF_AN_ACCELERATOR)]
    needed = required(extras)
    while more := {name for name, _, reasons in pins if name not in needed and reasons & needed}:
        needed |= more
    return {name: "".join(each for same, each, _ in pins if same == name) for name in sorted(needed)}


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def main() -> None:
    """Print the lines for the extras of the first argument."""
    lines = locked(sys.argv[1].split(","))
    torch = lines.pop("torch", "")
    if "--torch" in sys.argv:
        print(torch.split()[0] if torch else "")
    else:
        print("".join(lines.values()))


if __name__ == "__main__":
    main()
