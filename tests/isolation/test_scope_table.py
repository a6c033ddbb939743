"""The table in docs/templates.md, made again from hits that an engine's cache really gave."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_runner import ConstantKeyer
from prompt_rig import PromptRig
from scope_rig import ScopeEngine, fake_model_identity

from cache_service.block_key import BlockKeyer
from cluster.api.prompt import BuiltPrompt, CallerIdentity
from cluster.prompts.policy import Share
from cluster.prompts.sandbox import TemplateSandbox

pytestmark = pytest.mark.weights

DOCS = Path(__file__).parents[2] / "docs" / "templates.md"
STATIC = "You are the polite and patient assistant of a shop that sells furniture of every kind. " * 3
SOURCE = STATIC + "The product is {{ product }}. " + STATIC + "The user is called {{ name }}. " + STATIC
LONG_MESSAGE = "Tell me something about the history of chairs in the old world, please, and take your time. " * 3

Asker = tuple[CallerIdentity, BuiltPrompt]


class Cast:
    """The first asker and those who come after, or before, them."""

    def __init__(self, rig: PromptRig) -> None:
        self._rig = rig

    def ask(self, user: str = "alice", tenant: str = "acme", product: str = "chair", **narrow: object) -> Asker:
        caller = self._rig.caller(user, tenant, **narrow)  # type: ignore[arg-type]
        return caller, self._rig.ask(caller, LONG_MESSAGE, product=product, name="Alice")

    def ask_raw(self, user: str) -> Asker:
        caller = self._rig.caller(user)
        text = SOURCE.replace("{{ product }}", "chair").replace("{{ name }}", "Alice")
        messages = [{"role": "system", "content": text}, {"role": "user", "content": LONG_MESSAGE}]
        return caller, self._rig.builder.chat(caller, messages)


RELATIONS: dict[str, Callable[[Cast], Asker]] = {
    "the same user": lambda cast: cast.ask(),
    "the same user, another session": lambda cast: cast.ask(session="s2"),
    "the same user, another `cache_salt`": lambda cast: cast.ask(salt=b"pepper"),
    "another user, same shared values": lambda cast: cast.ask("bob"),
    "another user, other shared values": lambda cast: cast.ask("bob", product="table"),
    "another user, same text without naming the template": lambda cast: cast.ask_raw("bob"),
    "another tenant, same text": lambda cast: cast.ask("eve", "globex"),
}
POLICIES: dict[str, dict[str, object]] = {
    **{f"`{share.value}`": {"share": share.value} for share in Share},
    "`variables`, declared public": {"share": "variables", "public": True, "is_operator": True},
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    sandbox = TemplateSandbox()
    yield sandbox
    sandbox.close()


def observe(rig: PromptRig, make_writer: Callable[[Cast], Asker], make_reader: Callable[[Cast], Asker]) -> str:
    """The scopes of acme's blocks that the reader got, after the writer."""
    cast = Cast(rig)
    engine = ScopeEngine(rig, num_blocks=256)
    warm_ups = [
        prompt for prompt in rig.catalog.all_warm_ups() if prompt.spans[0].fields.tenant in (None, rig.tenant())
    ]
    engine.warm_up(warm_ups)  # another tenant's own blocks would hide whether it gets any of these
    engine.hits(*make_writer(cast))
    hits = engine.hits(*make_reader(cast))
    assert all(count >= 1 for count in hits.values())
    return ", ".join(scope.name.lower() for scope in sorted(hits)) or "nothing"


def observe_both_ways(rig: PromptRig, relation: Callable[[Cast], Asker]) -> str:
    first = RELATIONS["the same user"]
    forth, back = observe(rig, first, relation), observe(rig, relation, first)
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
    for relation in RELATIONS.values():
        first = RELATIONS["the same user"]
        assert set(observe(constant, first, relation).split(", ")) <= {
            "nothing",
            *observe(honest, first, relation).split(", "),
        }
    engine = ScopeEngine(constant, num_blocks=256)
    engine.warm_up()
    engine.hits(*Cast(constant).ask("alice"))
    engine.hits(*Cast(constant).ask("eve", "globex"))
    assert engine.engine.pool.cache.counters.verify_failures > 0, "the collision was met, and refused"


def test_the_table_in_the_docs_is_what_the_engine_does(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    lines = ["| policy | " + " | ".join(RELATIONS) + " |", "| --- |" + " --- |" * len(RELATIONS)]
    for number, (name, policy) in enumerate(POLICIES.items()):
        rig = PromptRig(tmp_path / str(number), sandbox=sandbox, identity=fake_model_identity())
        for tenant in ("acme", "globex"):
            rig.put(SOURCE, shared=["product"], private=["name"], tenant=tenant, **policy)  # type: ignore[arg-type]
        cells = [observe_both_ways(rig, relation) for relation in RELATIONS.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    table = "\n".join(lines)
    assert table in DOCS.read_text(encoding="utf-8"), f"docs/templates.md must hold this table:\n{table}"
