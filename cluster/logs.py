"""Where a gateway's log lines go: Ray sets up its own loggers only, and without a handler only warnings would show."""

from __future__ import annotations

import logging
from typing import TextIO


def log_to(stream: TextIO | None = None) -> logging.Handler:
    """Access, errors and warnings of the front door go to `stream`, by default stderr, which Ray keeps in a file."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger("watchword")
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    root.propagate = False  # Ray's root handler would repeat them
    return handler
