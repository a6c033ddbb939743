"""Who finds whose blocks. Every "never" stands beside a "does", counted by the engine's own counters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_builders import (
    BLOCK_SIZE,
    Transcript,
    make_engine,
    make_request,
    private_fields,
    run_all,
    template_spans,
    tenant_hash,
    user_hash,
)
from fake_runner import FakeModelRunner, reference_tokens

from cache_service.events import AllBlocksCleared, BlockRemoved, BlockStored
from cluster.api.ids import RequestId
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from workers.block import BlockContent, BlockWriter
from workers.build import EngineParts

PROMPT = range(21)
NUM_FULL = 5 * BLOCK_SIZE


def cached_tokens(engine, request) -> int:
    transcript = run_all(engine, request)
    assert transcript.of(request) == reference_tokens(request)
    return transcript.cached[request.request_id]


def test_the_same_user_hits() -> None:
    engine = make_engine()
    assert cached_tokens(engine, make_request(PROMPT)) == 0
    assert cached_tokens(engine, make_request(PROMPT)) == NUM_FULL
    assert engine.pool.cache.counters.hits == 5
    assert engine.pool.cache.counters.hits_by_scope[Scope.USER] == 5


@pytest.mark.parametrize(
    "other",
    [
        {"user": "bob"},
        {"tenant": "globex"},
        {"spans": (ScopeSpan(None, private_fields("acme", "alice", salt=b"salt")),)},
        {"use_prefix_cache": False},
        {"adapter": "lora"},
    ],
    ids=["user", "tenant", "salt", "opt-out", "adapter"],
)
def test_another_principal_salt_or_adapter_never_hits(other: dict) -> None:
    engine = make_engine(runner=FakeModelRunner(adapters=["lora"]))
    cached_tokens(engine, make_request(PROMPT))
    assert cached_tokens(engine, make_request(PROMPT, **other)) == 0
    if other.get("use_prefix_cache", True):
        assert cached_tokens(engine, make_request(PROMPT, **other)) == NUM_FULL, "not even its own"
    assert cached_tokens(engine, make_request(PROMPT)) == NUM_FULL
    assert engine.pool.cache.counters.verify_failures == 0


def test_a_session_does_not_hit_the_users_other_session() -> None:
    def of(session: bytes):
        fields = ScopeFields(Scope.SESSION, tenant_hash("acme"), user=user_hash("acme", "alice"), session=session)
        return make_request(PROMPT, spans=(ScopeSpan(None, fields),))

    engine = make_engine()
    cached_tokens(engine, of(b"one"))
    assert cached_tokens(engine, of(b"two")) == 0
    assert cached_tokens(engine, of(b"one")) == NUM_FULL


def shared_variables_spans(num_blocks: int, user: str) -> tuple[ScopeSpan, ...]:
    wide = ScopeFields(Scope.VARIABLES, tenant_hash("acme"), template=b"t", variables=b"v")
    return ScopeSpan(num_blocks, wide), ScopeSpan(None, private_fields("acme", user))


def test_shared_variables_are_shared_by_users_of_the_tenant_and_the_rest_is_not() -> None:
    engine = make_engine()
    cached_tokens(engine, make_request(PROMPT, spans=shared_variables_spans(2, "alice")))
    bob = make_request(PROMPT, user="bob", spans=shared_variables_spans(2, "bob"))
    assert cached_tokens(engine, bob) == 2 * BLOCK_SIZE
    assert engine.pool.cache.counters.hits_by_scope[Scope.VARIABLES] == 2
    assert engine.pool.cache.counters.hits_by_scope[Scope.USER] == 0


def template_request(user: str = "alice", tenant: str = "acme"):
    return make_request(PROMPT, 1, user=user, tenant=tenant, spans=template_spans(3, tenant, user))


def warm_up(engine, request) -> None:
    engine.add_request(request, is_warm_up=True)
    run_all(engine)


def test_template_blocks_are_written_by_warm_up_alone() -> None:
    """Else whether a template hits would tell what other users did."""
    engine = make_engine()
    cached_tokens(engine, template_request("alice"))
    assert cached_tokens(engine, template_request("alice")) == 0
    warm_up(engine, template_request("operator"))
    assert cached_tokens(engine, template_request("alice")) == 3 * BLOCK_SIZE
    assert cached_tokens(engine, template_request("bob")) == 3 * BLOCK_SIZE
    assert cached_tokens(engine, template_request("carol", tenant="globex")) == 0
    assert engine.num_pinned_blocks(template_request().block_keys) == engine.pool.num_pinned == 3


def test_pinned_blocks_survive_any_pressure_until_unpinned() -> None:
    engine = make_engine(num_blocks=20, max_pinned_fraction=0.25)
    request = template_request("operator")
    warm_up(engine, request)
    for i in range(4):
        run_all(engine, make_request(range(100 * i, 100 * i + 50), 3, user="bob"))
    assert cached_tokens(engine, template_request("alice")) == 3 * BLOCK_SIZE
    assert engine.keep_pins(frozenset()) == 3
    for i in range(4):
        run_all(engine, make_request(range(100 * i, 100 * i + 50), 3, user="bob"))
    assert cached_tokens(engine, template_request("alice")) == 0
    assert engine.pool.num_pinned == 0


def test_what_stays_of_a_template_stays_pinned_and_what_comes_back_is_pinned_again() -> None:
    """As when the clock moves on: the start is the old one, what lies behind the date is new."""
    engine = make_engine(num_blocks=64)
    old, new = (
        make_request([*range(8), *tail], 1, user="operator", spans=template_spans(3, "acme", "operator"))
        for tail in (range(8, 21), range(50, 63))
    )
    warm_up(engine, old)
    assert engine.keep_pins(frozenset(new.block_keys[:3])) == 1
    assert engine.num_pinned_blocks(old.block_keys) == 2
    warm_up(engine, new)
    assert engine.num_pinned_blocks(new.block_keys) == engine.pool.num_pinned == 3
    assert engine.keep_pins(frozenset()) == 3
    assert engine.pool.num_pinned == 0
    warm_up(engine, new)  # its blocks are still cached: found, not written
    assert engine.num_pinned_blocks(new.block_keys) == engine.pool.num_pinned == 3
    cached_tokens(engine, template_request("alice"))
    engine.pool.check_integrity()


def test_only_a_warm_up_pins_again() -> None:
    engine = make_engine()
    warm_up(engine, template_request("operator"))
    engine.keep_pins(frozenset())
    assert cached_tokens(engine, template_request("alice")) == 3 * BLOCK_SIZE
    assert engine.pool.num_pinned == 0


@pytest.mark.parametrize("quota", ["max_pinned_fraction", "max_pinned_fraction_per_tenant"])
def test_over_its_quota_a_template_is_not_shared(quota: str) -> None:
    engine = make_engine(num_blocks=20, **{quota: 0.1})
    warm_up(engine, template_request("operator"))
    assert engine.pool.num_pinned == 2
    assert cached_tokens(engine, template_request("bob")) == 2 * BLOCK_SIZE


def test_a_purge_ends_all_reuse_of_one_user_and_nobody_elses() -> None:
    engine = make_engine()
    cached_tokens(engine, make_request(PROMPT))
    cached_tokens(engine, make_request(PROMPT, user="bob"))
    cached_tokens(engine, make_request(PROMPT, spans=shared_variables_spans(2, "alice")))
    held = [engine.pool.cache.find(key) for key in make_request(PROMPT).block_keys]
    assert all(engine.runner.kv[block.block_id].any() for block in held)
    assert engine.purge_user(user_hash("acme", "alice")) == 6 + 6, "prompt and output blocks of both requests"
    assert not any(engine.runner.kv[block.block_id].any() for block in held), "not zeroed"
    assert cached_tokens(engine, make_request(PROMPT)) == 0
    assert cached_tokens(engine, make_request(PROMPT, user="bob")) == NUM_FULL
    spans = shared_variables_spans(2, "alice")
    assert cached_tokens(engine, make_request(PROMPT, spans=spans)) == 0


def test_a_purge_leaves_what_others_wrote_under_shared_variables() -> None:
    engine = make_engine()
    cached_tokens(engine, make_request(PROMPT, user="bob", spans=shared_variables_spans(2, "bob")))
    engine.purge_user(user_hash("acme", "alice"))
    spans = shared_variables_spans(2, "carol")
    assert cached_tokens(engine, make_request(PROMPT, user="carol", spans=spans)) == 2 * BLOCK_SIZE


def test_a_purged_user_finds_nothing_from_before_whoever_wrote_it() -> None:
    engine = make_engine()
    cached_tokens(engine, make_request(PROMPT, user="bob", spans=shared_variables_spans(2, "bob")))
    alice = shared_variables_spans(2, "alice")
    assert cached_tokens(engine, make_request(PROMPT, user="alice", spans=alice)) == 2 * BLOCK_SIZE, "it could be found"
    engine.purge_user(user_hash("acme", "alice"))
    assert cached_tokens(engine, make_request(PROMPT, user="alice", spans=alice)) == 0
    engine.purge_user(user_hash("acme", "dave"))
    assert cached_tokens(engine, make_request(PROMPT, user="alice", spans=alice)) == 0, "another's purge undid hers"
    bob = make_request(PROMPT, user="bob", spans=shared_variables_spans(2, "bob"))
    assert cached_tokens(engine, bob) >= 2 * BLOCK_SIZE, "bob lost what he wrote"


def test_a_purge_zeroes_what_its_user_left_in_unpublished_and_later_released_blocks() -> None:
    engine = make_engine()
    run_all(engine, make_request(range(3), 1))  # a partial block, freed with its bytes
    running = make_request(PROMPT, 10)
    engine.add_request(running)
    transcript = Transcript()
    transcript.add(engine.step())
    table = list(engine._live[running.request_id].sequences[0].block_table)
    engine.purge_user(user_hash("acme", "alice"))
    assert sum(row.any() for row in engine.runner.kv) == len(table), "only the running request's blocks hold anything"
    run_all(engine, transcript=transcript)
    assert transcript.of(running) == reference_tokens(running), "a purge must not disturb what runs"
    assert not engine.runner.kv.any()


def test_a_request_from_before_the_purge_publishes_nothing_after_it() -> None:
    engine = make_engine()
    engine.add_request(make_request(PROMPT, 10))
    engine.step()
    assert len(engine.cached_keys()) == 5
    engine.purge_user(user_hash("acme", "alice"))
    bob = make_request(PROMPT, 10, user="bob")
    run_all(engine, bob)
    assert engine.pool.cache.counters.late_publications > 0
    assert cached_tokens(engine, make_request(PROMPT, user="bob")) == NUM_FULL
    assert cached_tokens(engine, make_request(PROMPT)) == 0
    assert cached_tokens(engine, make_request(PROMPT)) == NUM_FULL, "a request from after the purge may publish"


def test_tombstones_do_not_pile_up() -> None:
    engine = make_engine()
    for i in range(50):
        engine.purge_user(user_hash("acme", f"user-{i}"))
    assert len(engine.pool.cache._tombstones) == 1


def test_clearing_forgets_everything_and_refuses_what_is_under_way() -> None:
    engine = make_engine()
    warm_up(engine, template_request("operator"))
    engine.add_request(make_request(PROMPT, 8))
    engine.step()
    engine.drain_events()
    engine.pool.clear()
    run_all(engine)
    assert engine.cached_keys() == ()
    assert engine.drain_events() == [AllBlocksCleared()]
    assert engine.pool.num_pinned == 0
    assert cached_tokens(engine, make_request(PROMPT)) == 0
    assert cached_tokens(engine, make_request(PROMPT)) == NUM_FULL


def test_idle_private_blocks_time_out_and_shared_ones_do_not() -> None:
    now = 1000.0
    engine = make_engine(user_idle_timeout_s=60.0, parts=EngineParts(clock=lambda: now))
    cached_tokens(engine, make_request(PROMPT, spans=shared_variables_spans(2, "alice")))
    now += 50
    cached_tokens(engine, make_request(range(50, 71), user="bob"))
    now += 11
    assert engine.expire_idle_blocks() == 4
    assert cached_tokens(engine, make_request(range(50, 71), user="bob")) == NUM_FULL
    assert cached_tokens(engine, make_request(PROMPT, spans=shared_variables_spans(2, "alice"))) == 2 * BLOCK_SIZE


def test_users_and_sessions_have_idle_times_of_their_own() -> None:
    now = 1000.0
    engine = make_engine(user_idle_timeout_s=60.0, session_idle_timeout_s=10.0, parts=EngineParts(clock=lambda: now))
    fields = ScopeFields(Scope.SESSION, tenant_hash("acme"), user=user_hash("acme", "alice"), session=b"one")
    in_session = {"spans": (ScopeSpan(None, fields),)}
    cached_tokens(engine, make_request(PROMPT))
    cached_tokens(engine, make_request(PROMPT, **in_session))
    now += 9
    assert cached_tokens(engine, make_request(PROMPT, **in_session)) == NUM_FULL
    now += 11
    assert cached_tokens(engine, make_request(PROMPT, **in_session)) == 0
    assert cached_tokens(engine, make_request(PROMPT)) == NUM_FULL
    now += 61
    assert cached_tokens(engine, make_request(PROMPT)) == 0


def test_an_idle_block_is_not_found_even_when_nobody_looked_in_between() -> None:
    now = 1000.0
    engine = make_engine(user_idle_timeout_s=60.0, parts=EngineParts(clock=lambda: now))
    cached_tokens(engine, make_request(PROMPT))
    now += 59
    assert cached_tokens(engine, make_request(PROMPT)) == NUM_FULL
    now += 61
    assert cached_tokens(engine, make_request(PROMPT)) == 0


def test_events_tell_the_same_story_as_the_cache() -> None:
    engine = make_engine(num_blocks=12, max_pinned_fraction=0.0)
    believed: set[bytes] = set()
    for i in range(12):
        run_all(engine, make_request(range(i * 5, i * 5 + 20), 6, user=f"user-{i % 3}"))
        if i == 7:
            engine.purge_user(user_hash("acme", "user-1"))
        for event in engine.drain_events():
            match event:
                case BlockStored(keys):
                    assert not believed & set(keys)
                    believed |= set(keys)
                case BlockRemoved(keys):
                    assert set(keys) <= believed
                    believed -= set(keys)
        assert believed == set(engine.cached_keys())
    assert engine.pool.cache.counters.evictions > 0


def test_a_child_of_an_older_life_of_its_parent_is_not_found() -> None:
    """The parent's key is not enough: the very block must be the one just verified."""
    engine = make_engine()
    request = make_request(PROMPT)
    cached_tokens(engine, request)
    parent = engine.pool.cache.find(request.block_keys[1])
    child = engine.pool.cache.find(request.block_keys[2])
    child.parent = type(child.parent)(parent.block_id, parent.generation - 1)
    assert cached_tokens(engine, make_request(PROMPT)) == 2 * BLOCK_SIZE
    assert engine.pool.cache.counters.verify_failures == 1


@pytest.mark.parametrize("part", ["token_ids", "fields", "adapter_digest"])
def test_a_key_that_leads_to_other_content_is_a_miss(part: str) -> None:
    engine = make_engine()
    request = make_request(PROMPT)
    cached_tokens(engine, request)
    block = engine.pool.cache.find(request.block_keys[2])
    other = {"token_ids": (1, 2, 3, 4), "fields": private_fields("acme", "bob"), "adapter_digest": b"x"}
    block.content = replace(block.content, **{part: other[part]})
    assert cached_tokens(engine, make_request(PROMPT)) == 2 * BLOCK_SIZE
    assert engine.pool.cache.counters.verify_failures == 1


def test_a_flipped_bit_in_a_shared_block_is_noticed_before_it_is_read() -> None:
    engine = make_engine(checksum_blocks=True)
    request = make_request(PROMPT)
    cached_tokens(engine, request)
    assert cached_tokens(engine, make_request(PROMPT)) == NUM_FULL
    engine.runner.kv[engine.pool.cache.find(request.block_keys[3]).block_id, 1] ^= 1 << 20
    assert cached_tokens(engine, make_request(PROMPT)) == 0
    assert engine.pool.cache.counters.checksum_failures == 1
    assert not engine.is_healthy
    assert engine.cached_keys() == (), "a request from before the damage publishes nothing"
    cached_tokens(engine, make_request(PROMPT))
    assert cached_tokens(engine, make_request(PROMPT)) == 0, "nothing is shared any more"


def test_a_share_of_the_checksums_covers_that_share_of_the_blocks() -> None:
    engine = make_engine(checksum_blocks=0.25)
    cached_tokens(engine, make_request(range(17)))
    cached_tokens(engine, make_request(range(100, 117)))
    assert [block.checksum is not None for block in engine.pool.blocks[:8]].count(True) == 2
    assert cached_tokens(engine, make_request(range(17))) == 16
    assert engine.pool.cache.counters.checksum_failures == 0


def test_nothing_is_published_behind_a_block_that_cannot_be_found_any_more() -> None:
    engine = make_engine()
    pool, writer = engine.pool, BlockWriter(RequestId("writer"), user_hash("acme", "alice"), engine.pool.cache.serial)
    request = make_request(range(8))
    contents = [
        BlockContent(key, tuple(range(4 * i, 4 * i + 4)), request.spans[0].fields, None)
        for i, key in enumerate(request.block_keys)
    ]
    parent, child = pool.allocate(writer), pool.allocate(writer)
    for block in (parent, child):
        pool.note_written(block.block_id, BLOCK_SIZE, writer)
    assert pool.publish(parent, contents[0], None, writer) is parent
    pool.cache.remove(parent)
    assert pool.publish(child, contents[1], parent.identity, writer) is None
    assert pool.publish(parent, contents[0], None, writer) is parent
    assert pool.publish(child, contents[1], parent.identity, writer) is child


def test_a_purge_covers_users_nested_below() -> None:
    """alice's key with `user: me` in the body is another user for sharing, and still alice for forgetting."""
    engine = make_engine()
    nested = private_fields("acme", "alice/me")
    account = user_hash("acme", "alice")

    def request():
        made = make_request(PROMPT, user="alice/me", spans=(ScopeSpan(None, nested),))
        return replace(made, account_hash=account)

    cached_tokens(engine, request())
    assert cached_tokens(engine, request()) == NUM_FULL
    assert cached_tokens(engine, make_request(PROMPT)) == 0, "nested is not the same as alice"
    assert engine.purge_user(account) > 0
    assert cached_tokens(engine, request()) == 0
