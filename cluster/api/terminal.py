"""How wide a command may print."""

from __future__ import annotations

import os
from typing import TextIO

WIDE = 240


def width_of(stream: TextIO) -> int | None:
    """Columns; None: as the terminal. A file or a pipe has no edge, and names cut to fit one cannot be read there."""
    return None if stream.isatty() or "COLUMNS" in os.environ else WIDE
