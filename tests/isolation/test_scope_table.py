"""The tables in docs/templates.md, made again from hits that an engine's cache really gave."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_runner import ConstantKeyer
from prompt_rig import PromptRig
from scope_rig import ScopeEngine, fake_model_identity

from cache_service.block_key import BlockKeyer
from cluster.api.ids import TenantId
from cluster.api.principal import Principal, Role
from cluster.api.prompt import BuiltPrompt, CallerIdentity
from cluster.auth.caller import resolve_identity
from cluster.prompts.policy import Share, SharingPolicy
from cluster.prompts.sandbox import TemplateSandbox
from cluster.serving.generate_input import CallerFields

pytestmark = pytest.mark.weights

DOCS = Path(__file__).parents[2] / "docs" / "templates.md"
STATIC = "You are the polite and patient assistant of a shop that sells furniture of every kind. " * 3
SOURCE = STATIC + "The product is {{ product }}. " + STATIC + "The user is called {{ name }}. " + STATIC
LONG_MESSAGE = "Tell me something about the history of chairs in the old world, please, and take your time. " * 3

Asker = tuple[CallerIdentity, BuiltPrompt]


class Cast:
    """The first asker and those who come after, or before, them: users whom a back end names, as requests do."""

    def __init__(self, rig: PromptRig, share: Share | None = None) -> None:
        self._rig = rig
        self._share = share  # what every request asks for

    def ask(self, user: str = "alice", tenant: str = "acme", product: str = "chair", **narrow: str) -> Asker:
        caller = self._identity(user, tenant, **narrow)
        return caller, self._rig.ask(caller, LONG_MESSAGE, share=self._share, product=product, name="Alice")

    def _identity(self, user: str, tenant: str = "acme", **narrow: str) -> CallerIdentity:
        back_end = Principal(TenantId(tenant), frozenset({Role.DELEGATE}), f"key of {tenant}", ())
        return resolve_identity(back_end, CallerFields(user=user, **narrow), self._rig.keyer)

    def ask_raw(self, user: str) -> Asker:
        caller = self._identity(user)
        text = SOURCE.replace("{{ product }}", "chair").replace("{{ name }}", "Alice")
        messages = [{"role": "system", "content": text}, {"role": "user", "content": LONG_MESSAGE}]
        return caller, self._rig.builder.chat(caller, messages, share=self._share)


Ask = Callable[[Cast], Asker]


def alice(cast: Cast) -> Asker:
    return cast.ask()


def alice_in_session(cast: Cast) -> Asker:
    return cast.ask(session_id="s1")


def alice_salted(cast: Cast) -> Asker:
    return cast.ask(cache_salt="pepper")


RELATIONS: dict[str, Ask] = {
    "the same user": alice,
    "the same user, another session": lambda cast: cast.ask(session_id="s2"),
    "the same user, another `cache_salt`": lambda cast: cast.ask(cache_salt="pepper"),
    "another user, same shared values": lambda cast: cast.ask("bob"),
    "another user, other shared values": lambda cast: cast.ask("bob", product="table"),
    "another user, same text without naming the template": lambda cast: cast.ask_raw("bob"),
    "another tenant, same text": lambda cast: cast.ask("eve", "globex"),
}
# With whom: the first asker has a session, or a salt.
NARROWED: dict[str, tuple[Ask, Ask]] = {
    "in a session: the same session": (alice_in_session, alice_in_session),
    "another session": (alice_in_session, lambda cast: cast.ask(session_id="s2")),
    "another user's session of that name": (alice_in_session, lambda cast: cast.ask("bob", session_id="s1")),
    "with a `cache_salt`: the same salt": (alice_salted, alice_salted),
    "another salt": (alice_salted, lambda cast: cast.ask(cache_salt="salt")),
    "another user with that salt": (alice_salted, lambda cast: cast.ask("bob", cache_salt="pepper")),
    "both: the same two": (
        lambda cast: cast.ask(session_id="s1", cache_salt="pepper"),
        lambda cast: cast.ask(session_id="s1", cache_salt="pepper"),
    ),
    "a user of that name in another tenant, the same two": (
        lambda cast: cast.ask(session_id="s1", cache_salt="pepper"),
        lambda cast: cast.ask("alice", "globex", session_id="s1", cache_salt="pepper"),
    ),
}
POLICIES: dict[str, dict[str, object]] = {
    **{f"`{share.value}`": {"share": share.value} for share in Share},
    "`variables`, declared public": {"share": "variables", "public": True, "is_operator": True},
}


def observe(rig: PromptRig, make_writer: Ask, make_reader: Ask, share: Share | None = None) -> str:
    """The scopes of acme's blocks that the reader got, after the writer."""
    cast = Cast(rig, share)
    engine = ScopeEngine(rig, num_blocks=64, max_model_len=512)
    warm_ups = [
        prompt for prompt in rig.catalog.all_warm_ups() if prompt.spans[0].fields.tenant in (None, rig.tenant())
    ]
    engine.warm_up(warm_ups)  # another tenant's own blocks would hide whether it gets any of these
    engine.hits(*make_writer(cast))
    hits = engine.hits(*make_reader(cast))
    assert all(count >= 1 for count in hits.values())
    return ", ".join(scope.name.lower() for scope in sorted(hits)) or "nothing"


def observe_both_ways(rig: PromptRig, first: Ask, then: Ask) -> str:
    forth, back = observe(rig, first, then), observe(rig, then, first)
    assert passed_on(forth) == passed_on(back), "what one may take from the other is mutual"
    return forth


def passed_on(cell: str) -> set[str]:
    """Scopes whose blocks the writer left; the pinned ones were there before anybody came."""
    return set(cell.split(", ")) - {"public", "template", "nothing"}


def test_a_hash_that_returns_a_constant_costs_reuse_and_nothing_else(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    """Every block goes by the same key, so only comparing contents keeps users apart; and it is seen to do so."""
    rigs = []
    for name, keyer_type in (("honest", BlockKeyer), ("constant", ConstantKeyer)):
        rig = PromptRig(tmp_path / name, sandbox=sandbox, identity=fake_model_identity(), keyer_type=keyer_type)
        for tenant in ("acme", "globex"):
            rig.put(SOURCE, shared=["product"], private=["name"], tenant=tenant)
        rigs.append(rig)
    honest, constant = rigs
    for first, then in (*((alice, relation) for relation in RELATIONS.values()), *NARROWED.values()):
        assert set(observe(constant, first, then).split(", ")) <= {
            "nothing",
            *observe(honest, first, then).split(", "),
        }
    engine = ScopeEngine(constant, num_blocks=64, max_model_len=512)
    engine.warm_up()
    engine.hits(*Cast(constant).ask("alice"))
    engine.hits(*Cast(constant).ask("eve", "globex"))
    assert engine.engine.pool.cache.counters.verify_failures > 0, "the collision was met, and refused"


def rig_with(root: Path, sandbox: TemplateSandbox, operator: SharingPolicy | None = None, **policy: Any) -> PromptRig:
    """The template in both tenants, under this policy."""
    rig = PromptRig(root, sandbox=sandbox, identity=fake_model_identity(), policy=operator)
    for tenant in ("acme", "globex"):
        rig.put(SOURCE, shared=["product"], private=["name"], tenant=tenant, **policy)
    return rig


def as_table(corner: str, columns: Iterable[str], rows: Mapping[str, Sequence[str]]) -> str:
    columns = list(columns)
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    return "\n".join([*lines, *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items())])


def assert_in_docs(table: str) -> None:
    assert table in DOCS.read_text(encoding="utf-8"), f"docs/templates.md must hold this table:\n{table}"


def test_the_table_in_the_docs_is_what_the_engine_does(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    rows = {}
    for number, (name, policy) in enumerate(POLICIES.items()):
        rig = rig_with(tmp_path / str(number), sandbox, **policy)
        rows[name] = [observe_both_ways(rig, alice, relation) for relation in RELATIONS.values()]
    assert_in_docs(as_table("policy", RELATIONS, rows))


def test_the_table_of_sessions_and_salts_is_what_the_engine_does(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    rows = {}
    for number, (name, policy) in enumerate(POLICIES.items()):
        rig = rig_with(tmp_path / str(number), sandbox, **policy)
        rows[name] = [observe_both_ways(rig, first, then) for first, then in NARROWED.values()]
    assert_in_docs(as_table("policy", NARROWED, rows))


@pytest.mark.parametrize("share", Share, ids=lambda share: share.value)
def test_whoever_sets_the_policy_the_table_is_the_same(tmp_path: Path, sandbox: TemplateSandbox, share: Share) -> None:
    """The template, the operator for all tenants or for one, or the request; the others allow everything."""
    of_one = {PromptRig(tmp_path / "names", sandbox=sandbox).tenant("acme"): share}
    by_template = rig_with(tmp_path / "template", sandbox, share=share.value)
    by_operator = rig_with(tmp_path / "operator", sandbox, SharingPolicy(share))
    by_tenant = rig_with(tmp_path / "tenant", sandbox, SharingPolicy(Share.VARIABLES, of_one))
    by_request = rig_with(tmp_path / "request", sandbox)
    for relation in RELATIONS.values():
        expected = observe(by_template, alice, relation)
        assert observe(by_operator, alice, relation) == expected
        assert observe(by_tenant, alice, relation) == expected
        assert observe(by_request, alice, relation, share) == expected
