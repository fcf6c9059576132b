"""Reads files of secrets, and warns of those that other users of the machine can read or change."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from radixkv.signing import read_secret

log = logging.getLogger("radixkv.configuration")


def warn_unless_private(path: Path, what: str) -> None:
    """Log a warning if the file's group or others have any access to it. Says nothing of its content."""
    if os.name != "posix":
        return
    with suppress(OSError):  # reading the file reports its own error
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            log.warning("%s %s: other users can access it (mode %04o); run chmod 600 on it", what, path, mode)


def read_secrets(files: Iterable[tuple[str, str]]) -> list[bytes]:
    """Return the secrets in files, which come with the option that named them. Warns of files that others can access.

    Raises ConfigError.
    """
    found = []
    for option, path in files:
        found.append(read_secret(option, path))
        warn_unless_private(Path(path), option)
    return found
