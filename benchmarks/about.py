"""What results begin with: when, where and with which versions they were measured."""

import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any


def about(*packages: str) -> dict[str, Any]:
    """Return date, machine and versions; called after processes have been measured, as it loads torch."""
    from flatout.engine.devices import machine

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}},
    }
