"""Block keys are pinned: gateway, router and engine of any version, process or machine must agree on them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations
from pathlib import Path

import key_cases
import pytest
from key_cases import MODEL, SECRET, TOKENS, USER, golden_keys, keyer

from cache_service.block_key import encode_field, fields_per_block
from cluster.api.ids import BlockKey
from cluster.api.scope import Scope, ScopeFields, ScopeSpan

# A change here empties every cache in the field: raise SCHEMA_VERSION with it.
GOLDEN = {
    "public": "6ab9923c4936b97293bbd223415bbc87c5b5170399464867b6d684d28f3cdf70",
    "template": "037bfc4891a6fcb983326a7526c410c576705499321923618f6299e466ee40b6",
    "variables": "86bd06f98c946e28cae9e090867e2e280de16e12a1c453b1f617038c5b27594b",
    "user": "8975a9fb2383aadfca26ead5563a3018a231746bfffac3df6463618da74721fe",
    "user, second block": "33d93d1554cf6403823907a719b0eef7b7d064e970e64a49146ee3205c30f4bb",
    "user, salted": "d676a043983dc9ee1aed675b77352992b591dfcb1dc3e60043a35a0f1201ff26",
    "user, empty salt": "7e743e57ddd2628a08172ef3e5917362b52ee25ff52242f70ff1b509a2895c78",
    "user, adapter": "f85af504deef03f9d7a004483fab07ab86a01b7e5404df42c03f65c032665903",
    "session": "7e247e131406543d93aa5c7cab12a6b1f5959d9957404292c5120ce8b62c6f1d",
    "parent of zeros": "04aea4b22a1735bf690419f5ecbee9c6b38ef1a3e2c5a88f43862b98271adff6",
    "large token ids": "c362703d5d37d258bca4c20099bcb6b4dd9d5fa152f26ecd17f9cf7137808847",
    "two spans": "15f6ab5374b9c856447a1441654c1ea2ebf119e16bc04e37029e7362b5273d90",
    "identity": "aef5cae65b7ba1d8f2b71a7b6a824c87094fb849e3c8a62e14817419e6f5d1df",
    "identity, unicode": "1e7ab5a910c0234337e119d201e2ba17ec375741101bc39edbf5038d1cb1a294",
    "digest": "98d1c478fb28f1df1dc36c9845eaa541c9c60df282afbbd699961ba2b9271c67",
}


def test_keys_equal_the_golden_vectors() -> None:
    assert {name: value.hex() for name, value in golden_keys().items()} == GOLDEN


def test_all_golden_keys_differ() -> None:
    assert len(set(GOLDEN.values())) == len(GOLDEN)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_a_process_with_another_hash_seed_agrees(hash_seed: str) -> None:
    root = Path(__file__).parents[2]
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root), "PATH": os.environ["PATH"]}
    printed = subprocess.run(
        [sys.executable, key_cases.__file__], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == [f'    "{name}": "{value}",' for name, value in GOLDEN.items()]


def test_the_layout_is_the_documented_one() -> None:
    """Derives one key by hand, so that the vectors pin a specification and not just an implementation."""

    def present(tag: int, value: bytes) -> bytes:
        return struct.pack("<BBI", tag, 1, len(value)) + value

    def absent(tag: int) -> bytes:
        return struct.pack("<BBI", tag, 0, 0)

    model = [b"smollm2-135m", b"\x01" * 32, b"bfloat16", b"paged-16", struct.pack("<I", 16)]
    message = b"\x01\x00" + b"".join(present(tag, value) for tag, value in enumerate(model, 1))
    message += absent(9) + present(10, b"\x03") + present(11, b"T" * 32) + present(12, b"P" * 32)
    message += present(13, b"V" * 32) + present(14, b"U" * 32) + absent(15) + absent(16)
    message += absent(20) + present(21, struct.pack("<16I", *TOKENS))
    secret = blake2b(SECRET, digest_size=64).digest()
    assert blake2b(message, digest_size=32, key=secret, person=b"ww-block").hexdigest() == GOLDEN["user"]


def test_every_typed_field_changes_the_key() -> None:
    ours = keyer()
    base = ours.child(None, USER, TOKENS)
    fields = {
        "tenant": replace(USER, tenant=b"X" * 32),
        "template": replace(USER, template=b"X" * 32),
        "no template": replace(USER, template=None),
        "variables": replace(USER, variables=b"X" * 32),
        "no variables": replace(USER, variables=None),
        "user": replace(USER, user=b"X" * 32),
        "session": replace(USER, session=b"X" * 32),
        "salt": replace(USER, salt=b"X"),
        "scope": replace(USER, scope=Scope.SESSION),
    }
    models = {
        "model": keyer(model="smollm2-360m"),
        "weights": keyer(weights_digest=b"\x02" * 32),
        "dtype": keyer(dtype="float32"),
        "layout": keyer(kv_layout="paged-32"),
        "secret": keyer(secret=b"\xff" * 32),
    }
    others = {name: ours.child(None, changed, TOKENS) for name, changed in fields.items()}
    others |= {name: changed.child(None, USER, TOKENS) for name, changed in models.items()}
    others["parent"] = ours.child(base, USER, TOKENS)
    others["adapter"] = ours.child(None, USER, TOKENS, b"adapter")
    others["empty adapter"] = ours.child(None, USER, TOKENS, b"")
    others["one token"] = ours.child(None, USER, (*TOKENS[:-1], 999))
    others["two tokens that cancel in a sum"] = ours.child(None, USER, (TOKENS[0] + 31, TOKENS[1] - 1, *TOKENS[2:]))
    others["order of tokens"] = ours.child(None, USER, TOKENS[::-1])
    others["block size"] = keyer(block_size_tokens=8).child(None, USER, TOKENS[:8])
    everything = [base, *others.values()]
    assert len(set(everything)) == len(everything), others


def test_no_two_fields_can_trade_contents() -> None:
    """("a", "bc") is not ("ab", "c"), absent is not empty, and a value means something else in another field."""
    ours = keyer()
    names = ("tenant", "template", "variables", "user", "session", "salt")
    keys = {}
    for first, second in combinations(names, 2):
        for values in ((b"a", b"bc"), (b"ab", b"c"), (b"abc", b""), (b"", b"abc"), (b"abc", None), (None, b"abc")):
            contents = dict.fromkeys(names, b"same") | {first: values[0], second: values[1]}
            keys[first, second, values] = ours.child(None, ScopeFields(Scope.SESSION, **contents), TOKENS)
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize(
    ("left", "right"),
    [(("a", "bc"), ("ab", "c")), (("abc",), ("a", "bc")), (("abc", ""), ("abc",)), (("a", "b"), ("b", "a"))],
)
def test_identities_of_nested_names_are_unambiguous(left: tuple[str, ...], right: tuple[str, ...]) -> None:
    assert keyer().identity("user", *left) != keyer().identity("user", *right)
    assert keyer().identity("user", *left) == keyer().identity("user", *left)


def test_an_adapter_is_not_a_salt() -> None:
    name = b"french-legal"
    salted = keyer().child(None, replace(USER, salt=name), TOKENS)
    adapted = keyer().child(None, USER, TOKENS, name)
    assert salted != adapted


def test_kinds_of_hash_are_apart() -> None:
    assert keyer().identity("kind", "x") != keyer().digest("kind", b"x")
    assert keyer().identity("user", "x") != keyer().identity("tenant", "x")


def test_fields_are_typed_and_length_prefixed() -> None:
    assert encode_field(7, None) == b"\x07\x00\x00\x00\x00\x00"
    assert encode_field(7, b"") == b"\x07\x01\x00\x00\x00\x00"
    assert encode_field(7, b"ab") == b"\x07\x01\x02\x00\x00\x00ab"


def test_a_prompt_is_a_chain_of_its_blocks_each_under_its_span() -> None:
    ours = keyer()
    template = ScopeFields(Scope.TEMPLATE, tenant=b"T" * 32, template=b"P" * 32)
    spans = (ScopeSpan(1, template), ScopeSpan(None, USER))
    prompt = tuple(range(16 * 3 + 5))
    first = ours.child(None, template, prompt[:16])
    second = ours.child(first, USER, prompt[16:32])
    third = ours.child(second, USER, prompt[32:48])
    assert ours.prompt_keys(prompt, spans) == (first, second, third)
    assert ours.prompt_keys(prompt[:15], spans) == ()


def test_blocks_that_share_a_prefix_share_its_keys_and_no_more() -> None:
    ours, spans = keyer(), (ScopeSpan(None, USER),)
    left = ours.prompt_keys((*range(32), *range(500, 516), *range(16)), spans)
    right = ours.prompt_keys((*range(32), *range(600, 616), *range(16)), spans)
    assert left[:2] == right[:2]
    assert not set(left[2:]) & set(right[2:])


def test_scopes_never_widen_along_a_prompt() -> None:
    template = ScopeFields(Scope.TEMPLATE, tenant=b"T" * 32)
    with pytest.raises(ValueError, match="widens from USER to TEMPLATE"):
        list(fields_per_block((ScopeSpan(1, USER), ScopeSpan(None, template))))
    with pytest.raises(ValueError, match="must be unbounded"):
        list(fields_per_block((ScopeSpan(1, USER),)))


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes, needs at least 32"):
        keyer(secret=b"s" * 31)


def test_keys_do_not_reveal_what_was_hashed() -> None:
    key = golden_keys()["identity"]
    assert b"alice" not in key
    assert len(BlockKey(key)) == 32
    assert MODEL.model.encode() in MODEL.encode()  # the guard could see it
