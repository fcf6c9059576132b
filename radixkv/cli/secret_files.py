"""The files of ``--fleet-secret`` and ``--previous``."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.configuration.private_files import read_secrets


def secrets_in(fleet_secret: str | None, previous: Sequence[str]) -> list[bytes]:
    """Return the secrets in these files, the current one first. Warns of files that other users can access.

    Raises ConfigError.
    """
    given = [] if fleet_secret is None else [("--fleet-secret", fleet_secret)]
    given += [("--previous", each) for each in previous]
    return read_secrets(given)
