"""What a tenant, user, session or salt may be called."""

from __future__ import annotations

from cluster.api.errors import InvalidRequestError

MAX_NAME_CHARS = 128

# Names that would read as something else in a key list, or that an unauthenticated caller already stands under:
# a customer must never share a tenant with callers who showed no key.
RESERVED_TENANTS = frozenset({"default", "public", "system", "watchword", "anonymous", "none"})
DEFAULT_TENANT = "default"
# Under which the sentinel sends its marker pairs: the leading underscore makes it one that no key can have.
SENTINEL_TENANT = "_sentinel"


def check_name(param: str, value: str, *, max_chars: int = MAX_NAME_CHARS) -> str:
    """Returns `value`. Raises InvalidRequestError that names the rule but never the value, which may be personal."""
    if not 1 <= len(value) <= max_chars:
        raise InvalidRequestError(f"{param} has {len(value)} characters, must have 1 to {max_chars}", param=param)
    if not value.isprintable():  # false for control characters, NUL, lone surrogates and line separators
        raise InvalidRequestError(f"{param} must not hold control or unprintable characters", param=param)
    return value


def check_tenant(tenant: str) -> str:
    """For new keys. Raises InvalidRequestError for reserved names."""
    check_name("tenant", tenant)
    if tenant.lower() in RESERVED_TENANTS or tenant.startswith("_"):
        raise InvalidRequestError(f"tenant {tenant!r} is a reserved name", param="tenant")
    return tenant
