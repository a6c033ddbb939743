"""Real prompts through rendering, tokenizing, scoping and an engine's cache.

Runs on the sample in tests/isolation/data; `make data-suite` runs the same on the whole data folder.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from jinja2 import Environment, TemplateError
from jinja2.ext import loopcontrols
from prompt_data import SAMPLE, PromptData, Record, assignments, types_of, whole_folder
from prompt_rig import BLOCK_SIZE, PromptRig, num_blocks, tokenizer_with
from scope_rig import ScopeEngine, fake_model_identity

from cluster.api.errors import InvalidRequestError
from cluster.api.prompt import BuiltPrompt, PromptRef
from cluster.api.scope import Scope
from cluster.prompts.canonical import num_equal
from cluster.prompts.chat_template import ChatTemplate, chat_environment
from cluster.prompts.policy import Share
from cluster.prompts.sandbox import TemplateSandbox

pytestmark = pytest.mark.weights

BuiltPairs = list[tuple[Record, BuiltPrompt, BuiltPrompt]]
WIDE = (Scope.TEMPLATE, Scope.VARIABLES)
MERGE_TOKENS = 3  # how many tokens before a variable may come out differently because of its first character
PLAIN_JINJA = Environment(keep_trailing_newline=True, extensions=[loopcontrols])
FILLER = "This sentence stands before the value so that a whole block is static text, whatever comes. "


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sample"),
        pytest.param("whole", marks=[pytest.mark.shared, pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def data(request: pytest.FixtureRequest) -> PromptData:
    folder = SAMPLE if request.param == "sample" else whole_folder()
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}")
    return PromptData(folder)


@pytest.fixture(scope="module")
def rig(data: PromptData, sandbox: TemplateSandbox, tmp_path_factory: pytest.TempPathFactory) -> PromptRig:
    """All templates, each as a system message with all variables shared."""
    rig = PromptRig(tmp_path_factory.mktemp("templates"), sandbox=sandbox, identity=fake_model_identity())
    for record in data.templates.values():
        rig.put(record["template"], shared=record["variables"], types=types_of(record), template_id=record["id"])
    return rig


def build_pair(
    rig: PromptRig, data: PromptData, pair: Record, share: Share | None = None
) -> tuple[BuiltPrompt, BuiltPrompt]:
    """Two users' prompts, also where the pair's users are one: then it is about variables only."""
    left, right = (
        rig.ask_with(rig.caller(user), PromptRef(pair["template_id"], None, data.values(pair, side)), share=share)
        for user, side in (("left", "a"), ("right", "b"))
    )
    return left, right


@pytest.fixture(scope="module")
def built_pairs(data: PromptData, rig: PromptRig) -> BuiltPairs:
    """Under the widest policy; made once, because a new combination of values costs many renderings."""
    return [(pair, *build_pair(rig, data, pair)) for pair in data.read("pairs")]


def test_every_template_renders_as_plain_jinja_does(data: PromptData, rig: PromptRig) -> None:
    num_prompts = 0
    for record in data.templates.values():
        for values in assignments(record):
            prompt = rig.ask_with(rig.caller(), PromptRef(record["id"], None, values), share=Share.USER)
            text = PLAIN_JINJA.from_string(record["template"]).render(values)
            system = [{"role": "system", "content": text}, {"role": "user", "content": "Hello"}]
            assert prompt.token_ids == rig.builder.chat(rig.caller(), system).token_ids, record["id"]
            rendered = rig.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            assert rendered.startswith(f"<|im_start|>system\n{text}<|im_end|>\n"), record["id"]
            num_prompts += 1
    assert num_prompts >= 2 * len(data.templates)


def test_pairs_share_what_is_verified_and_nothing_else(built_pairs: BuiltPairs, rig: PromptRig) -> None:
    """Under `variables`: up to the first differing variable; fewer blocks only where a token there can merge."""
    counts: Counter[str] = Counter()
    short: list[str] = []
    for pair, left, right in built_pairs:
        shared, verified = rig.num_shared(left, right), pair["verified_blocks"]
        assert shared <= verified, pair["id"]
        counts["equal" if shared == verified else "short"] += 1
        if shared < verified:
            short.append(f"{pair['id']} {shared}<{verified}")
            assert shared == verified - 1, pair["id"]
            assert pair["verified_tokens"] - verified * BLOCK_SIZE < MERGE_TOKENS, pair["id"]
        counts["shared blocks"] += shared
        if pair["same_text"] and not pair["same_key"] and pair["differing"]:
            assert left.token_ids == right.token_ids
            assert rig.keys(left)[shared:][:1] != rig.keys(right)[shared:][:1] or shared == len(rig.keys(left))
            counts["same text, other key"] += 1
    assert counts["shared blocks"] > 0
    assert counts["same text, other key"] > 0
    assert counts["short"] <= counts["equal"] / 10
    print(f"\npairs under variables: {dict(counts)}; a boundary token can merge in: {', '.join(short)}")


def test_pairs_under_the_narrower_policies(data: PromptData, rig: PromptRig) -> None:
    """Under `template` exactly the canonical blocks, under `user` and `none` nothing across users."""
    canonical_blocks = {
        record.id: len(run.token_ids) // BLOCK_SIZE if (run := rig.catalog.pinned_run(record)) else 0
        for record in rig.store.list_latest(rig.tenant())
    }
    num_shared = 0
    for pair in data.read("pairs"):
        left, right = build_pair(rig, data, pair, Share.TEMPLATE)
        assert rig.num_shared(left, right) == canonical_blocks[pair["template_id"]], pair["id"]
        assert canonical_blocks[pair["template_id"]] <= pair["static_blocks"], pair["id"]
        num_shared += rig.num_shared(left, right)
        for share in (Share.USER, Share.NONE):
            assert rig.num_shared(*build_pair(rig, data, pair, share)) == 0, pair["id"]
        own, again = (build_pair(rig, data, pair, Share.USER)[0] for _ in range(2))
        assert rig.num_shared(own, again) == len(rig.keys(own)) > 0
    assert num_shared > 0


def test_the_engine_s_cache_gives_what_the_keys_promise(built_pairs: BuiltPairs, rig: PromptRig) -> None:
    """Hits counted by an engine: for the pair's second user as many as keys agree, for the first one all again."""
    engine = ScopeEngine(rig)
    hits_by_scope: Counter[Scope] = Counter()
    for pair, left, right in built_pairs:
        engine.engine.pool.clear()
        registered = rig.store.get(rig.tenant(), pair["template_id"])
        engine.warm_up(rig.catalog.warm_up_requests(registered))
        engine.hits(rig.caller("left"), left)
        hits = engine.hits(rig.caller("right"), right)
        assert hits.total() == rig.num_shared(left, right), pair["id"]
        assert hits[Scope.USER] == 0, pair["id"]
        again = engine.hits(rig.caller("left"), left)
        assert again.total() >= (len(left.token_ids) - 1) // BLOCK_SIZE, pair["id"]
        hits_by_scope += hits
    assert hits_by_scope[Scope.TEMPLATE] > 0
    assert hits_by_scope[Scope.VARIABLES] > 0
    counters = engine.engine.pool.cache.counters
    assert (counters.verify_failures, counters.publish_conflicts) == (0, 0)
    print(f"\nhits across users: { ({scope.name: count for scope, count in hits_by_scope.items()}) }")


def test_twins_never_share(
    data: PromptData, sandbox: TemplateSandbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two texts that look alike, as a shared variable's value and as two users' messages."""
    rig = PromptRig(tmp_path_factory.mktemp("twins"), sandbox=sandbox, identity=fake_model_identity())
    rig.put(FILLER * 2 + "{{ x }}" + FILLER, shared=["x"])
    for twin in data.read("twins"):
        a, b = twin["a"], twin["b"]
        left, right, same = (rig.ask(rig.caller(u), x=x) for u, x in (("u1", a), ("u2", b), ("u3", a)))
        pinned = num_blocks(left, Scope.TEMPLATE)
        assert rig.num_shared(left, right) == pinned, twin["id"]
        assert rig.num_shared(left, same) > pinned > 0, "the same text is shared"
        prompts = [rig.builder.chat(rig.caller(u), [{"role": "user", "content": x}]) for u, x in (("u1", a), ("u1", b))]
        num_same = num_equal(prompts[0].token_ids, prompts[1].token_ids)
        assert num_same < max(len(prompt.token_ids) for prompt in prompts), twin["id"]
        assert rig.num_shared(*prompts) == num_same // BLOCK_SIZE, twin["id"]


def as_tokenized(rig: PromptRig, text: str) -> str:
    """`text` without the few bytes for which the model has no token."""
    return rig.tokenizer.decode(rig.tokenizer.encode_plain(text).token_ids, skip_special_tokens=False)


def test_tricky_texts_stay_text_or_are_refused(
    data: PromptData, sandbox: TemplateSandbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rig = PromptRig(tmp_path_factory.mktemp("tricky"), sandbox=sandbox, identity=fake_model_identity())
    rig.put(FILLER + "<{{ x }}>", private=["x"])
    controls = rig.tokenizer.control_token_ids
    honest = [i for i in rig.ask(rig.caller(), x="x").token_ids if i in controls]
    refused, dangerous = [], 0
    for record in data.read("tricky"):
        text = record["text"]
        try:
            as_value = rig.ask(rig.caller(), x=text)
            as_message = rig.ask(rig.caller(), text, x="x")
        except InvalidRequestError as error:
            refused.append((record["id"], error.param is not None))
            continue
        for prompt in (as_value, as_message):
            assert [i for i in prompt.token_ids if i in controls] == honest, record["id"]
            assert as_tokenized(rig, text) in rig.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        dangerous += any(i in controls for i in rig.tokenizer.encode(text).token_ids)
    surrogates = [(record["id"], True) for record in data.read("tricky") if not _is_unicode(record["text"])]
    assert refused == surrogates, "only what cannot be UTF-8 is refused, and by the field's name"
    assert dangerous > 0, "some of the texts would have become control tokens if trusted"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def test_real_chat_templates(
    data: PromptData, sandbox: TemplateSandbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Users of one template under 101 chat templates: what they share holds nothing that only one of them said."""
    root = tmp_path_factory.mktemp("chats")
    outcomes: Counter[str] = Counter()
    for number, record in enumerate(data.read("chat_templates")):
        rig = PromptRig(
            root / str(number),
            sandbox=sandbox,
            tokenizer=tokenizer_with(record["template"]),
            identity=fake_model_identity(),
        )
        rig.put(FILLER * 4 + "Product {{ p }}. " + FILLER * 2, shared=["p"])
        prompts, reasons = [], []
        for user, text in (("u1", "xylophone /no_think"), ("u2", "quagmire"), ("u3", "")):
            try:
                prompts.append(rig.ask(rig.caller(user), text, p="chair"))
            except InvalidRequestError as error:
                reasons.append(str(error))
        if reasons:
            assert all("chat template" in reason for reason in reasons), record["id"]
            outcomes["refuses these messages"] += 1
            continue
        shared = min(rig.num_shared(prompts[0], other) for other in prompts[1:])
        common = rig.text_of(prompts[0], shared)
        assert "xylophone" not in common, record["id"]
        outcomes["shares" if shared else "shares nothing"] += 1
        other = rig.ask(rig.caller("u2"), "quagmire", p="table")
        assert rig.num_shared(prompts[0], other) <= shared, record["id"]
        assert "chair" not in rig.text_of(prompts[0], rig.num_shared(prompts[0], other)), record["id"]
        salted = rig.ask(rig.caller("u1", salt=b"s"), "xylophone /no_think", p="chair")
        assert rig.num_shared(prompts[0], salted) == num_blocks(salted, Scope.TEMPLATE), record["id"]
    assert outcomes["shares"] > outcomes["shares nothing"]
    print(f"\nchat templates: {dict(outcomes)}")


def test_vectors_render_as_expected(data: PromptData) -> None:
    outcomes: Counter[str] = Counter()
    for vector in data.read("template_vectors"):
        try:
            rendered = _render_vector(vector)
        except (InvalidRequestError, TemplateError):
            rendered = None
        if vector["python_jinja2_matches"]:
            assert rendered == vector["expected"], vector["id"]
        outcomes["as expected" if rendered == vector["expected"] else "differs, as noted in the data"] += 1
    assert outcomes["as expected"] > outcomes["differs, as noted in the data"]
    print(f"\nvectors: {dict(outcomes)}")


def _render_vector(vector: Record) -> str:
    context: dict[str, Any] = dict(vector["context"])
    now = datetime(2025, 7, 10, 12)
    if vector["kind"] == "jinja_unit" or "add_generation_prompt" not in context:  # some templates ask if it is defined
        environment = chat_environment()
        environment.globals["strftime_now"] = now.strftime
        return environment.from_string(vector["template"]).render(context)
    template = ChatTemplate(vector["template"], {}, clock=lambda: now)
    messages = context.pop("messages")
    return template.render(messages, add_generation_prompt=context.pop("add_generation_prompt"), **context)


def test_conversations_are_reused_by_their_user_only(data: PromptData, rig: PromptRig) -> None:
    """Turn by turn: a user's next turn takes up the last one, another user with the same words takes nothing."""
    num_reused = 0
    for record in data.read("conversations"):
        turns = [turn for turn in record["messages"] if turn["role"] in ("system", "user", "assistant")]
        first, whole = turns[: (len(turns) + 1) // 2], turns
        mine, next_turn = (rig.builder.chat(rig.caller("u1"), part) for part in (first, whole))
        theirs = rig.builder.chat(rig.caller("u2"), whole)
        own_scopes = (Scope.USER, Scope.SESSION)
        assert rig.num_shared(next_turn, theirs) == num_blocks(theirs, *WIDE), record["id"]
        assert all(span.fields.scope in (*own_scopes, Scope.TEMPLATE) for span in theirs.spans)
        num_reused += rig.num_shared(mine, next_turn) - num_blocks(mine, Scope.TEMPLATE)
    assert num_reused > 0
