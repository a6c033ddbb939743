"""Machines on a network of their own: network namespaces, joined by a bridge in one more namespace.

Nothing of the host's network is touched: the cables are made inside these namespaces and vanish with them. Needs root
and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

CLONE_NEWNET = 0x40000000
SUBNET = "10.203.0"


def why_not() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    try:
        with Lan(["probe"]) as lan:
            lan.ip("-n", lan.namespace("probe"), "link", "show", "eth0")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', '') or error}"
    return ""


class Lan:
    """A context manager: what runs on the machines is ended with it, then the machines are removed."""

    def __init__(self, machines: Sequence[str]) -> None:
        self._prefix = f"watchword-{os.getpid()}-"
        self._switch = self.namespace("switch")
        self.addresses = {name: f"{SUBNET}.{number}" for number, name in enumerate(machines, start=1)}

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def namespace(self, machine: str) -> str:
        return self._prefix + machine

    def on(self, machine: str, *command: str) -> list[str]:
        """`command` as it is run on that machine."""
        return ["ip", "netns", "exec", self.namespace(machine), *command]

    def enter(self, machine: str) -> None:
        """This process moves to that machine. Before it has threads: they would stay behind."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self.namespace(machine)}").open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def unplug(self, machine: str) -> None:
        """Takes the machine's cable out of the switch. Nothing tells either end's connections."""
        self.ip("-n", self._switch, "link", "set", machine, "down")

    def isolate(self, machine: str) -> None:
        """The switch drops what comes from and goes to the machine, which cannot tell: its cable seems in order."""
        self.ip("-n", self._switch, "link", "set", machine, "nomaster")

    def plug(self, machine: str) -> None:
        self.ip("-n", self._switch, "link", "set", machine, "master", "bridge", "up")

    def pids(self, machine: str) -> list[int]:
        """Of all processes on that machine but this one."""
        command = ["ip", "netns", "pids", self.namespace(machine)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
            found, _ = asking.communicate(timeout=20)
        return [pid for pid in map(int, found.split()) if pid not in (os.getpid(), asking.pid)]

    def kill(self, machine: str) -> None:
        """As if its power were gone. This process, if it is there, stays."""
        for _ in range(50):
            if not (pids := self.pids(machine)):
                return
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def close(self) -> None:
        existing = set(os.listdir("/run/netns")) if Path("/run/netns").is_dir() else set()
        for machine in (*self.addresses, "switch"):
            if self.namespace(machine) in existing:
                self.kill(machine)
                self.ip("netns", "del", self.namespace(machine))

    def ip(self, *args: str) -> str:
        result = subprocess.run(["ip", *args], capture_output=True, text=True, check=True, timeout=20)
        return result.stdout

    def _build(self) -> None:
        self.ip("netns", "add", self._switch)
        self.ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self.ip("-n", self._switch, "address", "add", f"{SUBNET}.254/24", "dev", "bridge")
        self.ip("-n", self._switch, "link", "set", "bridge", "up")
        for machine, address in self.addresses.items():
            namespace = self.namespace(machine)
            self.ip("netns", "add", namespace)
            cable = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
            self.ip("-n", self._switch, "link", "add", machine, *cable)
            self.ip("-n", self._switch, "link", "set", machine, "master", "bridge", "up")
            self.ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                self.ip("-n", namespace, "link", "set", interface, "up")
            # A way out by which programs find their own address, although it leads nowhere.
            self.ip("-n", namespace, "route", "add", "default", "via", f"{SUBNET}.254")
