"""Compiles the kernels for the processor at hand, once; the result is kept under a name made from what went into it.

The compiler is the clang inside PyPI's `ziglang`: a fresh machine has none of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from workers.model_source import cache_folder

SOURCES = Path(__file__).parent
COMPILE_TIMEOUT_S = 300
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-std=gnu11")


_compiling = threading.Lock()


class NativeUnavailableError(RuntimeError):
    """The kernels cannot be had here; the message says why. The torch path computes the same model."""


@dataclass(frozen=True)
class Isa:
    """An instruction set that the kernels know, with the processor flags that it takes."""

    name: str
    target: str  # as the compiler calls it
    needs: frozenset[str]
    multiplies_bf16: bool


_X86 = (
    Isa("amx_bf16", "sapphirerapids", frozenset({"amx_bf16", "amx_tile", "avx512_bf16", "avx512_fp16"}), True),
    Isa("avx512_bf16", "znver4", frozenset({"avx512_bf16", "avx512_vbmi2", "avx512_vpopcntdq"}), True),
    Isa("avx512", "x86_64_v4", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}), False),
    Isa("avx2", "x86_64_v3", frozenset({"avx2", "fma", "bmi2"}), False),
    Isa("x86_64", "x86_64", frozenset(), False),
)
_OTHER = Isa("generic", "native", frozenset(), False)


def known_isas() -> tuple[Isa, ...]:
    """Those of this machine's family, best first."""
    return _X86 if platform.machine() in ("x86_64", "AMD64") else (_OTHER,)


def supported_isas() -> tuple[Isa, ...]:
    """Those that this processor has, best first."""
    flags = _cpu_flags()
    return tuple(isa for isa in known_isas() if isa.needs <= flags)


def build_library(isa: Isa) -> Path:
    """Path of the shared library, compiled now unless it was before. Raises NativeUnavailableError."""
    if platform.system() != "Linux":
        raise NativeUnavailableError(f"kernels are built on Linux only, this is {platform.system()}")
    folder = cache_folder() / "kernels"
    target = folder / f"step-{isa.name}-{_digest(isa)}.so"
    with _compiling:
        if not target.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(isa, target)
    return target


def build_ahead() -> None:
    """Starts compiling for this processor while the caller does something else; who needs the result waits for it."""

    def build() -> None:
        # Without a compiler the later call says so.
        with contextlib.suppress(NativeUnavailableError):
            build_library(supported_isas()[0])

    threading.Thread(target=build, name="compile-kernels", daemon=True).start()


def load_library(isa: Isa) -> ctypes.CDLL:
    """Opens the library with its functions typed. Calls release the interpreter lock."""
    library = ctypes.CDLL(str(build_library(isa)))
    library.ww_open.restype = ctypes.c_void_p
    library.ww_open.argtypes = [ctypes.c_int]
    library.ww_close.argtypes = [ctypes.c_void_p]
    library.ww_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.ww_product.argtypes = [pointer, pointer, ctypes.c_long, integer, pointer, ctypes.c_long]
    library.ww_read.argtypes = [pointer, ctypes.c_long]
    library.ww_pack.argtypes = [pointer, integer, pointer, integer, integer, pointer]
    return library


def _compile(isa: Isa, target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    # The compiler keeps objects of its own and has been seen to overlook a changed header: it must not know this build.
    command = [sys.executable, "-m", "ziglang", "cc", *_FLAGS, f"-mcpu={isa.target}", f"-DBUILD_{_digest(isa)}"]
    try:
        done = subprocess.run(
            [*command, "-o", name, str(SOURCES / "step.c"), "-lpthread"],
            capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise NativeUnavailableError(f"compiling the kernels failed: {done.stderr.strip()[-500:]}")
        os.chmod(name, 0o755)
        os.replace(name, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"compiling the kernels failed: {error}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def _digest(isa: Isa) -> str:
    """Names sources, flags and compiler, so that a stale library is never opened."""
    try:
        compiler = importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise NativeUnavailableError("no compiler: pip install ziglang") from error
    digest = hashlib.sha256(repr((compiler, isa.target, _FLAGS)).encode())
    for file in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.c"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()
