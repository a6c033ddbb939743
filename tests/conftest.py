"""Before any test module imports torch or triton: kernels run in Triton's interpreter, where there is no device."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
