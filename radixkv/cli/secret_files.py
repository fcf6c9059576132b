"""The files of ``--fleet-secret`` and ``--previous``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from radixkv.configuration.private_files import warn_unless_private
from radixkv.signing import read_secret


def secrets_in(fleet_secret: str | None, previous: Sequence[str]) -> list[bytes]:
    """Return the secrets in these files, the current one first. Warns of files that other users can access.

    Raises ConfigError.
    """
    given = [] if fleet_secret is None else [("--fleet-secret", fleet_secret)]
    given += [("--previous", each) for each in previous]
    found = [read_secret(option, path) for option, path in given]
    for option, path in given:
        warn_unless_private(Path(path), option)
    return found
