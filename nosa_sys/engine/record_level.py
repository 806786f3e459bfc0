"""How much a recorder wants of a step."""

from __future__ import annotations

RECORD_NOTHING, RECORD_SELECTIONS, RECORD_SCORES = range(3)
