"""Principal and narrowing fields -> hashed identity. A request can only narrow what its credential says.

Whose request it is, in falling order of precedence:

    key names user U            U; a user in the request nests below U
    delegate key                the user named by a trusted proxy's header, else by safety_identifier, else by user;
                                a user in the body that differs from the header's nests below the header's
    any other key               the credential itself; a user in the request nests below it
    delegate key, nobody named  the credential itself, or a refusal with require_user

`safety_identifier` and `user` name the same thing: both given and unequal is refused, never guessed.
"""

from __future__ import annotations

from cache_service.block_key import BlockKeyer
from cluster.api.errors import InvalidRequestError
from cluster.api.principal import Principal
from cluster.api.prompt import CallerIdentity
from cluster.api.scope import Scope, ScopeFields
from cluster.auth.names import check_name
from cluster.serving.generate_input import CallerFields


def resolve_identity(
    principal: Principal, caller: CallerFields, keyer: BlockKeyer, *, require_user: bool = False
) -> CallerIdentity:
    """Raises InvalidRequestError for malformed or contradictory fields, or when a user is required and not named."""
    named = _named_users(caller)
    tenant = keyer.identity("tenant", principal.tenant)
    if principal.user_path:
        account = keyer.identity("user", principal.tenant, *principal.user_path[:1])
        user = keyer.identity("user", principal.tenant, *principal.user_path, *named)
    elif principal.is_delegate and named:
        account = keyer.identity("user", principal.tenant, *named[:1])
        user = keyer.identity("user", principal.tenant, *named)
    elif require_user and not named:
        raise InvalidRequestError(
            "this service requires every request to name its user: set safety_identifier or user",
            param="safety_identifier",
            code="user_required",
        )
    else:
        # A kind of its own, so that no user can be called what a credential is called.
        account = keyer.identity("credential", principal.tenant, principal.key_id)
        user = keyer.identity("credential", principal.tenant, principal.key_id, *named)
    private = _private_fields(principal, caller, keyer, tenant, user)
    return CallerIdentity(tenant=tenant, user=user, private=private, account=account)


def affinity_key(principal: Principal, caller: CallerFields, keyer: BlockKeyer) -> str | None:
    """Steers placement only. Hashed within the tenant, so that callers' own words stay in the gateway."""
    if caller.prompt_cache_key is None:
        return None
    check_name("prompt_cache_key", caller.prompt_cache_key)
    return keyer.identity("affinity", principal.tenant, caller.prompt_cache_key).hex()


def _named_users(caller: CallerFields) -> tuple[str, ...]:
    """From the outside in: the proxy's user, then the body's if it is another one."""
    for param in ("user", "safety_identifier"):
        value = getattr(caller, param)
        if value is not None:
            check_name(param, value)
    if None not in (caller.user, caller.safety_identifier) and caller.user != caller.safety_identifier:
        raise InvalidRequestError(
            "safety_identifier and user name different users; send one of them, or the same value in both",
            param="user",
            code="conflicting_user",
        )
    body_user = caller.safety_identifier if caller.safety_identifier is not None else caller.user
    if caller.header_user is not None:
        check_name("identity header", caller.header_user)
    named = (caller.header_user, body_user if body_user != caller.header_user else None)
    return tuple(user for user in named if user is not None)


def _private_fields(
    principal: Principal, caller: CallerFields, keyer: BlockKeyer, tenant: bytes, user: bytes
) -> ScopeFields:
    salt = session = None
    if caller.cache_salt is not None:
        salt = keyer.identity("salt", principal.tenant, check_name("cache_salt", caller.cache_salt))
    if caller.session_id is not None:
        session = keyer.identity("session", principal.tenant, check_name("session_id", caller.session_id))
    scope = Scope.USER if session is None else Scope.SESSION
    return ScopeFields(scope=scope, tenant=tenant, user=user, session=session, salt=salt)
