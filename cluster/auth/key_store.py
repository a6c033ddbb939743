"""The file of API keys: read by gateways, changed by `watchword keys`. Mode 0600, replaced as a whole.

Changes are made under a lock file, so that two commands at once do not lose one another's key.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.api.errors import InvalidRequestError, NotFoundError
from cluster.api.principal import Role
from cluster.auth.key_record import KeyRecord, hash_secret, new_id, new_secret
from cluster.auth.names import check_name, check_tenant

logger = logging.getLogger("watchword.auth")

Keys = dict[str, KeyRecord]


class KeyStore:
    """A gateway's view of the file: rereads it when it changed, and keeps the last good state if it is unreadable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._keys: Keys = {}
        self.load_error: str | None = None
        self._ever_existed = False
        self.reload()

    @property
    def keys(self) -> Keys:
        self.reload()
        return self._keys

    @property
    def is_configured(self) -> bool:
        """True once the file has existed: deleting it later revokes every key, it does not open the door."""
        self.reload()
        return self._ever_existed

    def list_keys(self) -> list[KeyRecord]:
        """Oldest first."""
        return _sorted(self.keys.values())

    def reload(self) -> None:
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None:
            self._keys = {}
            return
        self._ever_existed = True
        try:
            self._keys = read_keys(self._path)
            self.load_error = None
        except InvalidRequestError as error:
            self.load_error = error.message
            logger.warning("%s; the keys read before stay in force", error.message)


def read_keys(path: Path) -> Keys:
    """Keys by id; none when the file is absent. Raises InvalidRequestError when it is unreadable or open to others."""
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o007:
            raise InvalidRequestError(f"key file {path} has mode {mode:04o}: it must not be accessible to others")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidRequestError(f"key file {path}: {error.strerror}") from None
    except ValueError:
        raise InvalidRequestError(f"key file {path} is not valid JSON") from None
    if not isinstance(data, dict) or not isinstance(data.get("keys"), list):
        raise InvalidRequestError(f'key file {path} must hold {{"keys": [...]}}')
    records = [KeyRecord.from_dict(item) for item in data["keys"]]
    return {record.id: record for record in records}


def create_key(path: Path, tenant: str, *, roles: frozenset[Role], user: str | None = None) -> tuple[KeyRecord, str]:
    """Adds a key. Returns its record and the whole `id.secret`, which is shown once and stored nowhere.

    Raises InvalidRequestError for reserved tenants and for a user's key with further roles.
    """
    check_tenant(tenant)
    if user is not None:
        check_name("user", user)
        if roles - {Role.USER}:
            raise InvalidRequestError("a key that is one user's cannot be a delegate's or an operator's too")
    secret = new_secret()
    record = KeyRecord(new_id(), hash_secret(secret), tenant, roles | _implied(user), user, int(time.time()))
    with _changing(path) as keys:
        keys[record.id] = record
    return record, f"{record.id}.{secret}"


def list_keys(path: Path, tenant: str | None = None) -> list[KeyRecord]:
    """Oldest first."""
    return _sorted(record for record in read_keys(path).values() if tenant in (None, record.tenant))


def revoke_key(path: Path, key_id: str) -> KeyRecord:
    """Removes a key; gateways refuse it from their next request on. Raises NotFoundError."""
    with _changing(path) as keys:
        return _take(keys, key_id)


def rotate_key(path: Path, key_id: str) -> tuple[KeyRecord, str]:
    """A new secret under the same id, so that the caller stays who it was; the old secret is void at once."""
    secret = new_secret()
    with _changing(path) as keys:
        old = _take(keys, key_id)
        record = KeyRecord(old.id, hash_secret(secret), old.tenant, old.roles, old.user, old.created_unix_s)
        keys[key_id] = record
    return record, f"{key_id}.{secret}"


def _sorted(records: Iterable[KeyRecord]) -> list[KeyRecord]:
    return sorted(records, key=lambda record: (record.created_unix_s, record.id))


def _implied(user: str | None) -> frozenset[Role]:
    return frozenset() if user is None else frozenset({Role.USER})


def _take(keys: Keys, key_id: str) -> KeyRecord:
    if key_id not in keys:
        raise NotFoundError(f"there is no key {key_id!r}")
    return keys.pop(key_id)


@contextmanager
def _changing(path: Path) -> Iterator[Keys]:
    """The keys to change; written back when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = read_keys(path)
        yield keys
        _write(path, keys)
    finally:
        os.close(lock)


def _write(path: Path, keys: Keys) -> None:
    text = json.dumps({"keys": [record.to_dict() for record in keys.values()]}, indent=1)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
