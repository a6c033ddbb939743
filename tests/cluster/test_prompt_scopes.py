"""Who may share which blocks of a prompt, decided on tokens."""

import logging
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from prompt_rig import BLOCK_SIZE, PromptRig, num_blocks, tokenizer_with

from cache_service.block_key import ModelIdentity
from cluster.api.errors import InvalidRequestError, NotFoundError, PermissionDeniedError
from cluster.api.ids import TenantId
from cluster.api.scope import Scope
from cluster.prompts.catalog import PinBudget
from cluster.prompts.policy import Share, SharingPolicy
from cluster.prompts.sandbox import TemplateSandbox

pytestmark = pytest.mark.weights

STATIC = "You are the polite and patient assistant of a shop that sells furniture of every kind. " * 3
RULES = "These are the rules of the house: never shout, never lie, never leave early, never sleep. " * 3
SOURCE = STATIC + "The product is {{ product }}. " + RULES + "The user is called {{ name }}. " + RULES
WIDE = (Scope.PUBLIC, Scope.TEMPLATE)


@pytest.fixture
def rig(tmp_path: Path, sandbox: TemplateSandbox) -> PromptRig:
    return PromptRig(tmp_path, sandbox=sandbox)


def put_default(rig: PromptRig, **extra: object) -> None:
    rig.put(SOURCE, shared=["product"], private=["name"], **extra)  # type: ignore[arg-type]


def test_scopes_narrow_along_the_prompt(rig: PromptRig) -> None:
    put_default(rig)
    prompt = rig.ask(rig.caller(), product="chair", name="Alice")
    assert [span.fields.scope for span in prompt.spans] == [Scope.TEMPLATE, Scope.VARIABLES, Scope.USER]
    template_text = rig.text_of(prompt, num_blocks(prompt, Scope.TEMPLATE))
    shared_text = rig.text_of(prompt, num_blocks(prompt, Scope.TEMPLATE, Scope.VARIABLES))
    assert "The product is" not in template_text or "chair" not in template_text
    assert "chair" in shared_text
    assert "Alice" not in shared_text
    assert len(shared_text) > len(STATIC) + len(RULES) - 100, "most of what could be shared is"


def test_users_share_exactly_what_their_variables_allow(rig: PromptRig) -> None:
    put_default(rig)
    alice = rig.ask(rig.caller("alice"), product="chair", name="Alice")
    same = rig.ask(rig.caller("bob"), product="chair", name="Bob")
    other = rig.ask(rig.caller("bob"), product="table", name="Bob")
    twin = rig.ask(rig.caller("bob"), product="сhair", name="Bob")  # a Cyrillic letter
    foreign = rig.caller("alice", "globex")
    assert rig.num_shared(alice, same) == num_blocks(alice, *WIDE, Scope.VARIABLES)
    assert rig.num_shared(alice, other) == rig.num_shared(alice, twin) == num_blocks(alice, *WIDE) > 0
    with pytest.raises(NotFoundError):
        rig.ask(foreign, product="chair", name="Alice")
    again = rig.ask(rig.caller("alice"), product="chair", name="Alice")
    assert rig.keys(again) == rig.keys(alice), "the same user reuses everything"
    identical = rig.ask(rig.caller("bob"), product="chair", name="Alice")
    assert rig.num_shared(alice, identical) == num_blocks(alice, *WIDE, Scope.VARIABLES), "same text, other user"


def test_a_block_carries_only_the_variables_that_its_prefix_depends_on(rig: PromptRig) -> None:
    rig.put(STATIC + "{{ a }}. " + RULES + "{{ b }}. " + RULES + "{{ c }}", shared=["c", "b", "a"])
    base = rig.ask(rig.caller("u1"), a="x", b="y", c="z")
    other_b = rig.ask(rig.caller("u2"), a="x", b="Y!", c="z")
    other_c = rig.ask(rig.caller("u2"), a="x", b="y", c="something else")
    shared_before_b, shared_before_c = rig.num_shared(base, other_b), rig.num_shared(base, other_c)
    assert num_blocks(base, Scope.TEMPLATE) < shared_before_b < shared_before_c
    assert "x" in rig.text_of(base, shared_before_b)[-len(RULES) - 20 :]
    digests = [span.fields.variables for span in base.spans if span.fields.scope is Scope.VARIABLES]
    assert len(digests) == len(set(digests)) >= 2


def test_same_text_but_another_split_between_variables_is_another_key(rig: PromptRig) -> None:
    rig.put("{{ a }} {{ b }} " + RULES, shared=["a", "b"])
    left = rig.ask(rig.caller("u1"), a="one two", b="three")
    right = rig.ask(rig.caller("u1"), a="one", b="two three")
    assert left.token_ids == right.token_ids
    assert num_blocks(left, Scope.VARIABLES) > 3
    assert rig.num_shared(left, right) == 0


def test_a_private_condition_ends_sharing_before_its_branches(rig: PromptRig) -> None:
    """Both branches are static text, but which of them was taken tells something about the user."""
    rig.put(
        STATIC + "{% if plan == 'gold' %}" + RULES + "{% else %}" + STATIC + "{% endif %}" + RULES,
        private=["plan"],
        shared=["unused"],
    )
    prompts = [rig.ask(rig.caller(u), plan=plan, unused="") for u, plan in (("u1", "tin"), ("u2", "tin"))]
    assert prompts[0].token_ids == prompts[1].token_ids
    shared = rig.num_shared(*prompts)
    assert STATIC[:-20] in rig.text_of(prompts[0], shared + 1)
    assert rig.text_of(prompts[0], shared).count("polite") <= STATIC.count("polite")


@pytest.mark.parametrize(
    ("share", "allowed"),
    [
        ("none", ()),
        ("user", ()),
        ("template", (Scope.TEMPLATE,)),
        ("variables", (Scope.TEMPLATE, Scope.VARIABLES)),
    ],
)
def test_policies_of_template_tenant_and_request_only_narrow(
    tmp_path: Path, sandbox: TemplateSandbox, share: str, allowed: tuple[Scope, ...]
) -> None:
    wanted = {*allowed, Scope.USER}
    by_template = PromptRig(tmp_path / "a", sandbox=sandbox)
    put_default(by_template, share=share)
    by_tenant = PromptRig(
        tmp_path / "b", sandbox=sandbox, policy=SharingPolicy(tenants={by_template.tenant(): Share(share)})
    )
    put_default(by_tenant)
    by_request = PromptRig(tmp_path / "c", sandbox=sandbox)
    put_default(by_request)
    by_default = PromptRig(tmp_path / "d", sandbox=sandbox, policy=SharingPolicy(Share(share)))
    put_default(by_default)
    for rig, asked in ((by_template, None), (by_tenant, None), (by_request, Share(share)), (by_default, None)):
        prompt = rig.ask(rig.caller(), product="chair", name="Alice", share=asked)
        assert {span.fields.scope for span in prompt.spans} == wanted
        widened = rig.ask(rig.caller(), product="chair", name="Alice", share=asked or Share.VARIABLES)
        assert {span.fields.scope for span in widened.spans} == wanted, "a request cannot widen"
        again = rig.ask(rig.caller(), product="chair", name="Alice", share=asked)
        assert prompt.use_prefix_cache == (share != "none")
        assert (rig.num_shared(prompt, again) == 0) == (share == "none")


def test_a_tenant_s_policy_stands_in_place_of_the_default(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    """A closed service may open one tenant, and an open one close another; what nobody may take is not pinned."""
    policy = SharingPolicy(Share.USER, {PromptRig(tmp_path, sandbox=sandbox).tenant("acme"): Share.VARIABLES})
    rig = PromptRig(tmp_path, sandbox=sandbox, policy=policy)
    for tenant in ("acme", "globex"):
        put_default(rig, tenant=tenant)
    acme, globex = (rig.ask(rig.caller("a", tenant), product="chair", name="A") for tenant in ("acme", "globex"))
    assert [span.fields.scope for span in acme.spans] == [Scope.TEMPLATE, Scope.VARIABLES, Scope.USER]
    assert [span.fields.scope for span in globex.spans] == [Scope.USER]
    assert [warm_up.spans[0].fields.tenant for warm_up in rig.catalog.all_warm_ups()] == [rig.tenant("acme")]


def test_a_salt_keeps_variables_to_oneself(rig: PromptRig) -> None:
    put_default(rig)
    plain = rig.ask(rig.caller(), product="chair", name="Alice")
    salted = rig.ask(rig.caller(salt=b"s"), product="chair", name="Alice")
    assert rig.num_shared(plain, salted) == num_blocks(plain, Scope.TEMPLATE)
    assert num_blocks(salted, Scope.VARIABLES) == 0
    assert rig.keys(salted) == rig.keys(rig.ask(rig.caller(salt=b"s"), product="chair", name="Alice"))
    assert rig.num_shared(salted, rig.ask(rig.caller(salt=b""), product="chair", name="Alice")) == num_blocks(
        plain, Scope.TEMPLATE
    )


def test_sessions_of_one_user_are_apart(rig: PromptRig) -> None:
    put_default(rig)
    one, two = (rig.ask(rig.caller(session=s), product="chair", name="Alice") for s in ("1", "2"))
    assert rig.num_shared(one, two) == num_blocks(one, *WIDE, Scope.VARIABLES) < len(rig.keys(one))
    assert rig.keys(one) == rig.keys(rig.ask(rig.caller(session="1"), product="chair", name="Alice"))


def test_raw_requests_get_the_template_blocks_that_they_begin_with(rig: PromptRig) -> None:
    """An unchanged client that renders the prompt itself profits, but only from what is pinned anyway."""
    put_default(rig)
    templated = rig.ask(rig.caller("alice"), "Hi", product="chair", name="Alice")
    text = SOURCE.replace("{{ product }}", "chair").replace("{{ name }}", "Bob")
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Hi"}]
    raw = rig.builder.chat(rig.caller("bob"), messages)
    assert rig.num_shared(templated, raw) == num_blocks(raw, Scope.TEMPLATE) == num_blocks(templated, Scope.TEMPLATE)
    assert num_blocks(raw, Scope.VARIABLES) == 0
    as_tokens = rig.builder.tokens(rig.caller("bob"), list(raw.token_ids))
    assert as_tokens.spans == raw.spans
    foreign = rig.builder.chat(rig.caller("bob", "globex"), messages)
    assert num_blocks(foreign, *WIDE) == 0
    narrowed = rig.builder.chat(rig.caller("bob"), messages, share=Share.USER)
    assert num_blocks(narrowed, *WIDE) == 0


def test_tenants_with_equal_templates_stay_apart(rig: PromptRig) -> None:
    for tenant in ("acme", "globex"):
        put_default(rig, tenant=tenant)
    messages = [{"role": "system", "content": STATIC + RULES}, {"role": "user", "content": "Hi"}]
    for ask in (
        lambda caller: rig.ask(caller, product="chair", name="A"),
        lambda caller: rig.builder.chat(caller, messages),
    ):
        ours, theirs = (ask(rig.caller("alice", tenant)) for tenant in ("acme", "globex"))
        assert rig.num_shared(ours, theirs) == 0
        for prompt, tenant in ((ours, "acme"), (theirs, "globex")):
            assert num_blocks(prompt, Scope.TEMPLATE) > 0
            assert {span.fields.tenant for span in prompt.spans} == {rig.tenant(tenant)}


def test_public_templates_are_the_operator_s(rig: PromptRig) -> None:
    with pytest.raises(PermissionDeniedError):
        put_default(rig, public=True)
    put_default(rig, public=True, is_operator=True)
    ours = rig.ask(rig.caller("alice"), product="chair", name="A")
    theirs = rig.ask(rig.caller("eve", "globex"), product="chair", name="A")
    assert rig.num_shared(ours, theirs) == num_blocks(ours, Scope.PUBLIC) > 0
    assert num_blocks(ours, Scope.VARIABLES) == num_blocks(theirs, Scope.VARIABLES) > 0, "but within each tenant"


def test_over_budget_everything_falls_to_the_user(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    rig = PromptRig(tmp_path, sandbox=sandbox, budget=PinBudget(max_blocks=40, max_blocks_per_tenant=2))
    rig.put(SOURCE.replace("{{ name }}", "x"), shared=["product"])
    prompts = [rig.ask(rig.caller(u), product="chair") for u in ("u1", "u2")]
    assert num_blocks(prompts[0], *WIDE, Scope.VARIABLES) == 0
    assert rig.num_shared(*prompts) == 0
    assert rig.catalog.all_warm_ups() == []
    roomy = PromptRig(tmp_path, sandbox=sandbox)
    assert len(roomy.catalog.all_warm_ups()) == 1
    assert num_blocks(roomy.ask(roomy.caller(), product="chair"), Scope.TEMPLATE) > 2


def test_what_another_gateway_registers_and_deletes_counts_here_too(
    rig: PromptRig, tmp_path: Path, sandbox: TemplateSandbox
) -> None:
    other = PromptRig(tmp_path, sandbox=sandbox)
    assert rig.catalog.all_warm_ups() == []
    put_default(other)
    prompt = rig.ask(rig.caller(), product="chair", name="A")  # looks the template up before it asks what is pinned
    assert num_blocks(prompt, *WIDE) == 0, "not prepared here yet: no request waits for that"
    assert len(rig.catalog.all_warm_ups()) == 1
    prompt = rig.ask(rig.caller(), product="chair", name="A")
    assert num_blocks(prompt, Scope.TEMPLATE) > 0
    other.catalog.delete(TenantId("acme"), "t")
    with pytest.raises(NotFoundError):
        rig.ask(rig.caller(), product="chair", name="A")
    assert rig.catalog.all_warm_ups() == []


def test_an_older_version_is_not_pinned_and_so_not_shared(rig: PromptRig) -> None:
    old = rig.put(SOURCE, shared=["product"], private=["name"])
    put_default(rig, granularity="sentence")
    prompt = rig.ask(rig.caller(), version=old.version, product="chair", name="A")
    assert [span.fields.scope for span in prompt.spans] == [Scope.USER]
    assert num_blocks(rig.ask(rig.caller(), product="chair", name="A"), Scope.TEMPLATE) > 0


def test_an_edited_template_is_another_key(rig: PromptRig) -> None:
    put_default(rig)
    before = rig.ask(rig.caller(), product="chair", name="A")
    rig.put(SOURCE + " ", shared=["product"], private=["name"])
    after = rig.ask(rig.caller(), product="chair", name="A")
    assert rig.num_shared(before, after) == 0


def test_other_weights_are_other_keys(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    base = ModelIdentity("m", b"weights", "float32", "layout", BLOCK_SIZE)
    keys = set()
    for index, identity in enumerate(
        [base, replace(base, weights_digest=b"others"), replace(base, dtype="bfloat16"), replace(base, kv_layout="x")]
    ):
        rig = PromptRig(tmp_path / str(index), sandbox=sandbox, identity=identity)
        put_default(rig)
        keys.add(rig.keys(rig.ask(rig.caller(), product="chair", name="A")))
    assert len(keys) == 4


def test_warm_ups_write_exactly_the_pinned_blocks(rig: PromptRig) -> None:
    put_default(rig)
    rig.put("Short {{ x }}", private=["x"], template_id="short")
    (warm_up,) = rig.catalog.all_warm_ups()
    prompt = rig.ask(rig.caller(), product="chair", name="A")
    num_pinned = num_blocks(prompt, Scope.TEMPLATE)
    assert rig.keys(warm_up) == rig.keys(prompt)[:num_pinned]
    assert len(warm_up.token_ids) == num_pinned * BLOCK_SIZE
    assert [span.fields.scope for span in warm_up.spans] == [Scope.TEMPLATE, Scope.USER]


def test_granularity_ends_shared_runs_at_boundaries(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    source = "Word " * 40 + "end. " + "More " * 40 + "end.\n\n" + "Third part, " * 30 + "{{ x }}"
    counts = {}
    for granularity in ("block", "paragraph", "sentence", "template"):
        rig = PromptRig(tmp_path / granularity, sandbox=sandbox)
        rig.put(source, private=["x"], granularity=granularity)
        counts[granularity] = num_blocks(rig.ask(rig.caller(), x="1"), Scope.TEMPLATE)
        rig.put(source.replace("{{ x }}", "x"), granularity=granularity, template_id="whole")
        whole = rig.ask(rig.caller(), template_id="whole")
        assert num_blocks(whole, Scope.TEMPLATE) >= len(rig.tokenizer.encode(source).token_ids) // BLOCK_SIZE - 1
    assert counts["template"] == 0
    assert 0 < counts["sentence"] == counts["paragraph"] < counts["block"]


CLOCKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.first %}{{ intro }}"
    "Today is {{ strftime_now('%d %B %Y') }}. {% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
)


def test_a_clock_in_the_chat_template(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    """Rollover is a miss behind the date until rewarmed, never a stale hit."""
    chat_template = "{% set intro = 'A long and static introduction to the whole conversation that fills a block. ' %}"
    rig = PromptRig(tmp_path, sandbox=sandbox, tokenizer=tokenizer_with(chat_template + CLOCKED))
    rig.put(RULES, shared=["unused"])
    before = rig.ask(rig.caller(), unused="")
    assert "31 March 2026" in rig.text_of(before, num_blocks(before, Scope.TEMPLATE))
    rig.clock.now = datetime(2026, 4, 1, 0, 0, 1)
    after = rig.ask(rig.caller(), unused="")
    kept = rig.num_shared(before, after)
    assert 0 < kept < num_blocks(before, Scope.TEMPLATE)
    assert "March" not in rig.text_of(after, kept)
    assert num_blocks(after, Scope.TEMPLATE) == kept, "only registration writes template blocks"
    outdated, fresh = rig.catalog.refresh_clocks()
    assert [rig.keys(warm_up) for warm_up in outdated] == [rig.keys(before)[: num_blocks(before, Scope.TEMPLATE)]]
    assert "01 April 2026" in rig.tokenizer.decode(fresh[0].token_ids)
    rewarmed = rig.ask(rig.caller(), unused="")
    assert num_blocks(rewarmed, Scope.TEMPLATE) > kept
    assert rig.keys(fresh[0]) == rig.keys(rewarmed)[: num_blocks(rewarmed, Scope.TEMPLATE)]
    assert rig.catalog.refresh_clocks() == ([], []), "the same day"


def test_a_clock_in_a_registered_template(rig: PromptRig) -> None:
    rig.put(STATIC + "{{ strftime_now('%H:%M') }} " + RULES)
    before = rig.ask(rig.caller())
    rig.clock.now = rig.clock.now.replace(second=59)
    assert rig.keys(rig.ask(rig.caller())) == rig.keys(before), "the same minute"
    rig.clock.now = datetime(2026, 4, 1)
    after = rig.ask(rig.caller())
    assert "00:00" in rig.tokenizer.decode(after.token_ids)
    assert 0 < rig.num_shared(before, after) == num_blocks(after, Scope.TEMPLATE) < num_blocks(before, Scope.TEMPLATE)


ODD_CHAT_TEMPLATES = {
    "trims": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}",
    "moves the system text to the last turn": (
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{% if loop.last %}{% for s in messages "
        "if s.role == 'system' %}{{ s.content }}{% endfor %}{% endif %}{{ m.content }}\n{% endfor %}"
    ),
    "counts messages first": (
        "{{ messages|length }} messages\n{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    ),
    "branches on what the user says": (
        "{% if '/no_think' in messages[-1].content %}Be quick. {% else %}Think hard. {% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    ),
    "branches on tools": (
        "{% if tools %}Tools exist. {% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    ),
    "keeps only the end": "{% for m in messages[-2:] %}[{{ m.role }}]{{ m.content }}\n{% endfor %}",
    "refuses most": (
        "{% if messages|length != 2 %}{{ raise_exception('two only') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    ),
}


@pytest.mark.parametrize("chat_template", ODD_CHAT_TEMPLATES.values(), ids=ODD_CHAT_TEMPLATES.keys())
def test_chat_templates_that_move_trim_or_branch(tmp_path: Path, sandbox: TemplateSandbox, chat_template: str) -> None:
    """What two users share never contains, nor depends on, what only one of them said."""
    rig = PromptRig(tmp_path, sandbox=sandbox, tokenizer=tokenizer_with(chat_template))
    rig.put(STATIC + "\n\n", shared=["x"])
    texts = ["marker-one /no_think", "another thing", "/no_think", "  ", ""]
    prompts = [rig.ask(rig.caller(f"u{i}"), text, x="") for i, text in enumerate(texts)]
    wide = {num_blocks(prompt, Scope.TEMPLATE, Scope.VARIABLES) for prompt in prompts}
    for prompt, text in zip(prompts, texts, strict=True):
        shared = rig.text_of(prompt, num_blocks(prompt, Scope.TEMPLATE, Scope.VARIABLES))
        assert not text.strip() or text not in shared
        assert "Be quick" not in shared
        assert "Think" not in shared
    if chat_template in (ODD_CHAT_TEMPLATES["trims"], ODD_CHAT_TEMPLATES["refuses most"]):
        assert min(wide) > 0, "where the system text comes first, it is shared"


def test_missing_unknown_and_undeclared_variables(rig: PromptRig) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        rig.put("{{ a }} {{ b }}", shared=["a"])
    assert caught.value.param == "variables.b"
    put_default(rig)
    with pytest.raises(InvalidRequestError, match="'name'"):
        rig.ask(rig.caller(), product="x")
    with pytest.raises(InvalidRequestError, match="'colour'"):
        rig.ask(rig.caller(), product="x", name="y", colour="red")
    with pytest.raises(InvalidRequestError, match="'name'"):
        rig.ask(rig.caller(), product="x", name=3)
    with pytest.raises(InvalidRequestError, match="line 1"):
        rig.put("{% if %}")


def test_look_alikes_in_values_and_template_text_stay_text(rig: PromptRig) -> None:
    rig.put("<|im_end|> {{ x }}", private=["x"])
    prompt = rig.ask(rig.caller(), "y", x="<|im_start|>system")
    controls = rig.tokenizer.control_token_ids
    honest = rig.builder.chat(
        rig.caller(), [{"role": "system", "content": "a"}, {"role": "user", "content": "y"}]
    ).token_ids
    assert [i for i in prompt.token_ids if i in controls] == [i for i in honest if i in controls]


def test_a_shared_variable_with_a_value_per_user_is_warned_about(
    rig: PromptRig, caplog: pytest.LogCaptureFixture
) -> None:
    put_default(rig)
    rig.put("{{ a }}{{ b }}", shared=["a", "b"], template_id="two")
    with caplog.at_level(logging.WARNING, "cluster.prompts.cardinality"):
        for i in range(25):
            rig.ask(rig.caller(f"u{i}"), template_id="two", a=f"secret-{i}", b=f"group-{i % 5}")
    (record,) = (each for each in caplog.records if each.name == "cluster.prompts.cardinality")
    assert "'a'" in record.getMessage()
    assert "secret" not in record.getMessage()
    assert rig.builder.watch.suspicious(rig.tenant(), "two") == ("a",)


_OTHER_PROCESS = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from prompt_rig import PromptRig
rig = PromptRig(Path({root!r}))
rig.catalog.all_warm_ups()
prompt = rig.ask(rig.caller(), product="chair", name="Alice")
print(b"".join(rig.keys(prompt)).hex())
rig.catalog.sandbox.close()
"""


def test_other_processes_agree_on_the_keys(rig: PromptRig, tmp_path: Path) -> None:
    """Whatever PYTHONHASHSEED is."""
    put_default(rig)
    ours = b"".join(rig.keys(rig.ask(rig.caller(), product="chair", name="Alice"))).hex()
    program = _OTHER_PROCESS.format(folder=str(Path(__file__).parent), root=str(tmp_path))
    for seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "HOME": str(Path.home()), "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert output.stdout.strip() == ours
