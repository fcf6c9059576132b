"""The commands are tested against small and patient services."""

from __future__ import annotations

from tests.service.surroundings import surroundings as surroundings
