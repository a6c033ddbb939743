"""A few sandbox processes that render untrusted templates under limits of time, memory and output."""

from __future__ import annotations

import json
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.api.errors import InvalidRequestError, OverloadedError

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    cpu_s: float = 1.0  # processor time per render
    wall_s: float = 20.0  # per render, whatever else the machine is doing
    memory_bytes: int = 512 * 1024 * 1024  # address space of the process
    output_chars: int = 1_000_000
    num_processes: int = 2
    wait_s: float = 10.0  # for a free process

    def __post_init__(self) -> None:
        if not 0.01 <= self.cpu_s <= 60:
            raise ValueError(f"cpu_s is {self.cpu_s}, allowed are 0.01 to 60")
        if not self.cpu_s <= self.wall_s <= 600:
            raise ValueError(f"wall_s is {self.wall_s}, allowed are cpu_s ({self.cpu_s}) to 600")
        if not 1 <= self.num_processes <= 64:
            raise ValueError(f"num_processes is {self.num_processes}, allowed are 1 to 64")


@dataclass(frozen=True, slots=True)
class CutText:
    """The leading messages' texts that do not depend on the tainted variables; the last one is partial if `is_cut`."""

    texts: tuple[str, ...]
    is_cut: bool
    clock: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RenderedTexts:
    texts: tuple[str, ...]
    clock: tuple[tuple[str, str], ...]  # strftime formats that the template asked for, with what they gave


class TemplateSandbox:
    """Thread-safe. One tenant occupies one process at a time, so a hostile template cannot starve the others."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for _ in range(self.limits.num_processes):
            self._idle.put(_Process(self.limits))
        self._turns: dict[bytes, _Turn] = {}
        self._turns_lock = threading.Lock()

    def describe(self, tenant: bytes, sources: Sequence[str], now: datetime) -> tuple[str, ...]:
        """The names that the sources need. Raises InvalidRequestError for what cannot be a template."""
        return tuple(self._call(tenant, "describe", now, sources=list(sources))["names"])

    def render(self, tenant: bytes, sources: Sequence[str], values: Mapping[str, Any], now: datetime) -> RenderedTexts:
        """Raises InvalidRequestError when the template fails or breaks a limit."""
        reply = self._call(
            tenant, "render", now, sources=list(sources), values=dict(values), max_chars=self.limits.output_chars
        )
        return RenderedTexts(tuple(reply["texts"]), tuple(sorted(reply["clock"].items())))

    def cut(
        self,
        tenant: bytes,
        sources: Sequence[str],
        values: Mapping[str, Any],
        taints: Sequence[Sequence[str]],
        now: datetime,
    ) -> tuple[CutText, ...]:
        """For each set of tainted variables, what the template puts out before it depends on one of them."""
        reply = self._call(
            tenant,
            "cut",
            now,
            sources=list(sources),
            values=dict(values),
            taints=[list(taint) for taint in taints],
            max_chars=self.limits.output_chars,
        )
        clock = tuple(sorted(reply["clock"].items()))
        return tuple(CutText(tuple(cut["texts"]), cut["is_cut"], clock) for cut in reply["cuts"])

    def close(self) -> None:
        """Ends the processes that are idle; one that is busy ends when its render does."""
        while True:
            try:
                self._idle.get_nowait().stop()
            except queue.Empty:
                return

    def _call(self, tenant: bytes, operation: str, now: datetime, **arguments: Any) -> dict[str, Any]:
        line = json.dumps({"operation": operation, "now": now.isoformat(), "arguments": arguments})
        with self._turn(tenant), self._process() as process:
            reply = process.ask(line)
        if "error" in reply:
            raise InvalidRequestError(f"prompt template: {reply['error']}", param="prompt")
        return reply

    @contextmanager
    def _turn(self, tenant: bytes) -> Iterator[None]:
        with self._turns_lock:
            turn = self._turns.setdefault(tenant, _Turn())
            turn.num_users += 1
        try:
            if not turn.lock.acquire(timeout=self.limits.wait_s):
                raise OverloadedError("too many prompt templates are being rendered", retry_after_s=1.0)
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            with self._turns_lock:
                turn.num_users -= 1
                if turn.num_users == 0:
                    del self._turns[tenant]

    @contextmanager
    def _process(self) -> Iterator[_Process]:
        try:
            process = self._idle.get(timeout=self.limits.wait_s)
        except queue.Empty:
            raise OverloadedError("too many prompt templates are being rendered", retry_after_s=1.0) from None
        try:
            yield process
        finally:
            self._idle.put(process)


class _Turn:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_users = 0


class _Process:
    """One child, started when first asked and again after it was killed."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, line: str) -> dict[str, Any]:
        child = self._child or self._start()
        assert child.stdin is not None
        try:
            child.stdin.write(line.encode() + b"\n")
            child.stdin.flush()
            reply = self._read_line(child)
        except OSError:
            reply = b""
        if not reply.endswith(b"\n"):
            self.stop()
            raise InvalidRequestError(
                f"prompt template: takes longer than {self._limits.cpu_s:g} s or too much memory", param="prompt"
            )
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _start(self) -> subprocess.Popen[bytes]:
        limits = self._limits
        self._child = subprocess.Popen(
            [sys.executable, "-m", __package__ + ".sandbox_process", str(limits.cpu_s), str(limits.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": _PACKAGE_ROOT, "PYTHONHASHSEED": "0"},  # nothing of ours is for templates to see
            cwd="/",
        )
        assert self._child.stdout is not None
        self._child.stdout.readline()  # "ready": the time for imports is not the template's
        return self._child

    def _read_line(self, child: subprocess.Popen[bytes]) -> bytes:
        """Up to a newline; shorter when the child died or took too long."""
        assert child.stdout is not None
        deadline = time.monotonic() + self._limits.wall_s
        pieces = bytearray()
        while not pieces.endswith(b"\n"):
            ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = child.stdout.read1() if ready else b""  # type: ignore[attr-defined]
            if not piece:
                break
            pieces += piece
        return bytes(pieces)
