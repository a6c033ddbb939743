"""Registered templates on disk, by tenant. Several processes may share the folder.

<root>/changes                            touched at every change; its time tells other processes to look again
<root>/public/<id>.json                   declared by the operator, for all tenants
<root>/tenants/<quoted tenant>/<id>.json  {"id", "tenant", "latest", "versions": {version: {"created_at", "template"}},
                                          "is_from_folder": who put the latest}
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cluster.api.errors import InvalidRequestError, NotFoundError
from cluster.api.ids import TenantId
from cluster.prompts.template import PromptTemplate

MAX_TEMPLATES_PER_TENANT = 1000
MAX_VERSIONS = 32
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

TenantHash = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class RegisteredTemplate:
    """One version of a template. `tenant` is the owner's hash, None for a public one."""

    id: str
    version: str
    tenant: bytes | None
    template: PromptTemplate
    created_at: int  # Unix seconds; of the version
    is_latest: bool


class TemplateStore:
    """Put, get, list and delete. A foreign id answers as an absent one. Thread-safe."""

    def __init__(self, root: Path, tenant_hash: TenantHash, *, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._tenant_hash = tenant_hash
        self._clock = clock
        self._lock = threading.RLock()
        self._seen_change = -1
        self._entries: dict[tuple[bytes | None, str], dict[str, RegisteredTemplate]] = {}
        for folder in (root / "tenants", root / "public"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (root / "changes").touch(exist_ok=True)
        self.poll()

    def put(
        self, tenant: TenantId | None, template_id: str, template: PromptTemplate, *, is_from_folder: bool = False
    ) -> RegisteredTemplate:
        """Adds a version and makes it the latest; putting an old version again makes that one the latest."""
        if not _ID.fullmatch(template_id):
            raise InvalidRequestError(
                "a prompt id has 1 to 128 letters, digits, dots, dashes and underscores, the first a letter or digit",
                param="id",
            )
        with self._changing():
            path = self._path(tenant, template_id)
            record = _read(path) or {"id": template_id, "tenant": tenant, "latest": None, "versions": {}}
            if not record["versions"] and self._num_templates(tenant) >= MAX_TEMPLATES_PER_TENANT:
                raise InvalidRequestError(
                    f"at most {MAX_TEMPLATES_PER_TENANT} prompt templates are allowed", param="id"
                )
            created = {"created_at": int(self._clock()), "template": template.to_dict()}
            record["versions"].setdefault(template.version, created)
            record["latest"] = template.version
            record["is_from_folder"] = is_from_folder
            _drop_oldest(record)
            _write(path, record)
            owner = self._hash_of(tenant)
            self._entries = {**self._entries, (owner, template_id): _versions(record, owner)}
        return self.get(self._hash_of(tenant), template_id)

    def delete(self, tenant: TenantId | None, template_id: str) -> None:
        """Removes all versions. Raises NotFoundError."""
        with self._changing():
            if not _ID.fullmatch(template_id) or not self._path(tenant, template_id).is_file():
                raise _absent(template_id)
            self._path(tenant, template_id).unlink()
            gone = (self._hash_of(tenant), template_id)
            self._entries = {key: versions for key, versions in self._entries.items() if key != gone}

    def delete_from_folder(self, kept: Set[tuple[TenantId | None, str]]) -> None:
        """Removes what a folder of files brought in and no longer holds; what was put otherwise since then stays."""
        gone = [
            (record["tenant"], record["id"])
            for record in self._records()
            if record.get("is_from_folder") and (record["tenant"], record["id"]) not in kept
        ]
        for tenant, template_id in gone:
            self.delete(tenant, template_id)

    def get(self, tenant: bytes | None, template_id: str, version: str | None = None) -> RegisteredTemplate:
        """The tenant's own template, else a public one of that id. `version` None means the latest."""
        self.poll()
        with self._lock:
            versions = self._entries.get((tenant, template_id)) or self._entries.get((None, template_id))
        if versions is None:
            raise _absent(template_id)
        for registered in versions.values():
            if registered.version == version or (version is None and registered.is_latest):
                return registered
        raise NotFoundError(f"no such version of prompt template {template_id[:128]!r}", param="prompt.version")

    def list_latest(self, tenant: bytes | None) -> list[RegisteredTemplate]:
        """The latest version of each of the tenant's own templates (None: of the public ones), by id."""
        return [registered for registered in self.latest() if registered.tenant == tenant]

    def latest(self) -> list[RegisteredTemplate]:
        """The latest version of every template, oldest first: the order in which a budget is given out."""
        self.poll()
        with self._lock:
            found = [each for versions in self._entries.values() for each in versions.values() if each.is_latest]
        return sorted(found, key=lambda each: (each.created_at, each.id, each.tenant or b""))

    def poll(self) -> int:
        """Reads the folder again if any process has changed it. Returns the number of the last change that is known:
        whoever keeps something made from templates compares it, since anybody may poll first."""
        changed = (self._root / "changes").stat().st_mtime_ns
        with self._lock:
            if changed == self._seen_change:
                return changed
            entries = {}
            for record in self._records():
                tenant = self._hash_of(record["tenant"])
                entries[tenant, record["id"]] = _versions(record, tenant)
            self._entries = entries
            self._seen_change = changed
        return changed

    def _records(self) -> Iterator[dict[str, Any]]:
        for path in (*(self._root / "public").glob("*.json"), *(self._root / "tenants").glob("*/*.json")):
            record = _read(path)
            if record is not None:  # deleted meanwhile
                yield record

    def _hash_of(self, tenant: str | None) -> bytes | None:
        return None if tenant is None else self._tenant_hash(tenant)

    def _path(self, tenant: str | None, template_id: str) -> Path:
        folder = self._root / "public" if tenant is None else self._root / "tenants" / quote(f"t-{tenant}", safe="")
        return folder / f"{template_id}.json"

    def _num_templates(self, tenant: str | None) -> int:
        return sum(1 for _ in self._path(tenant, "x").parent.glob("*.json"))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One writer at a time, over all processes that share the folder."""
        with self._lock, open(self._root / "changes", "a") as changes:
            fcntl.flock(changes, fcntl.LOCK_EX)
            try:
                self.poll()  # so that what is known is what lies on disk, but for our own change
                yield
                # Strictly later than the last change, even where the clock is coarse.
                later = max(time.time_ns(), (self._root / "changes").stat().st_mtime_ns + 1000)
                os.utime(self._root / "changes", ns=(later, later))
                self._seen_change = (self._root / "changes").stat().st_mtime_ns
            finally:
                fcntl.flock(changes, fcntl.LOCK_UN)


def _absent(template_id: str) -> NotFoundError:
    return NotFoundError(f"no prompt template {template_id[:128]!r}", param="prompt.id")


def _versions(record: Mapping[str, Any], tenant: bytes | None) -> dict[str, RegisteredTemplate]:
    return {
        version: RegisteredTemplate(
            id=record["id"],
            version=version,
            tenant=tenant,
            template=PromptTemplate.from_dict(entry["template"]),
            created_at=entry["created_at"],
            is_latest=version == record["latest"],
        )
        for version, entry in record["versions"].items()
    }


def _drop_oldest(record: dict[str, Any]) -> None:
    versions = record["versions"]
    for version in list(versions):
        if len(versions) <= MAX_VERSIONS:
            return
        if version != record["latest"]:
            del versions[version]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return record


def _write(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False, suffix=".new") as file:
        json.dump(record, file)
    os.replace(file.name, path)
