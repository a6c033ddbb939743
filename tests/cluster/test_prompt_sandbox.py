"""A hostile template costs its own tenant a moment, and nobody else anything."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime

import pytest

from cluster.api.errors import InvalidRequestError, OverloadedError
from cluster.prompts.sandbox import SandboxLimits, TemplateSandbox

NOW = datetime(2026, 3, 31)
LIMITS = SandboxLimits(cpu_s=0.5, wall_s=200, output_chars=100_000, wait_s=200)
HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "huge repetition": "{{ 'a' * 10**11 }}",
    "huge padding": "{{ 'x'|center(10**11) }}",
    "huge format": "{{ '%999999999d'|format(1) }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "power tower": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x ** 9 %}{% endfor %}",
    "endless output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep nesting": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "deep statements": "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "many nodes": "{{ 1 }}" * 30_000,
    "reaching for Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reaching through format": "{{ '{0.__init__.__globals__}'.format(namespace) }}{{ 1/0 }}",
    "reading files": "{% include '/etc/passwd' %}",
    "imports": "{% from 'x' import y %}",
    "chance": "{{ [1, 2]|random }}",
    "changing its values": "{{ values.append(1) }}",
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    sandbox = TemplateSandbox(LIMITS)
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_are_refused_in_time(sandbox: TemplateSandbox, source: str) -> None:
    sandbox.render(b"t", ["warm"], {}, NOW)  # so that no process is started while the clock runs
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="prompt template: "):
        sandbox.render(b"t", [source], {"values": [1]}, NOW)
    assert time.monotonic() - started < LIMITS.wall_s
    assert sandbox.render(b"t", ["still {{ x }}"], {"x": "here"}, NOW).texts == ("still here",)


def test_a_hostile_tenant_does_not_hold_up_another() -> None:
    """With two processes, a tenant that keeps four threads busy still leaves one process to the others."""
    sandbox = TemplateSandbox(SandboxLimits(cpu_s=60, wall_s=600, wait_s=200))
    processes = list(sandbox._idle.queue)
    attackers = [
        threading.Thread(target=_render_quietly, args=(sandbox, b"evil", HOSTILE["endless loop"])) for _ in range(4)
    ]
    for attacker in attackers:
        attacker.start()
    try:
        _until(lambda: b"evil" in sandbox._turns and sandbox._turns[b"evil"].num_users == 4)
        _until(lambda: sandbox._idle.qsize() == 1)
        assert sandbox.render(b"good", ["{{ x }}"], {"x": "1"}, NOW).texts == ("1",)
        assert all(attacker.is_alive() for attacker in attackers), "the victim stood in the attacker's queue"
    finally:
        while any(attacker.is_alive() for attacker in attackers):
            for process in processes:
                if (child := process._child) is not None:
                    child.kill()  # which ends the render at hand, and the next one begins
            time.sleep(0.05)
        sandbox.close()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _render_quietly(sandbox: TemplateSandbox, tenant: bytes, source: str) -> None:
    with suppress(InvalidRequestError, OverloadedError):
        sandbox.render(tenant, [source], {}, NOW)


def test_values_are_text_and_never_source(sandbox: TemplateSandbox) -> None:
    value = "{{ secret }} {% raw %} {# c #} {{ 7*7 }}\n"
    assert sandbox.render(b"t", ["<{{ x }}>\n"], {"x": value, "secret": "s"}, NOW).texts == (f"<{value}>\n",)


def test_errors_hold_no_values(sandbox: TemplateSandbox) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sandbox.render(b"t", ["{{ {}[secret] + 1 }}{{ secret.a.b }}"], {"secret": "hunter2"}, NOW)
    assert "hunter2" not in str(caught.value)


def test_the_clock_is_the_caller_s(sandbox: TemplateSandbox) -> None:
    rendered = sandbox.render(b"t", ["{{ strftime_now('%Y-%m') }}"], {}, NOW)
    assert rendered.texts == ("2026-03",)
    assert rendered.clock == (("%Y-%m", "2026-03"),)


@pytest.mark.parametrize(
    ("source", "tainted", "expected"),
    [
        ("Hello {{ x }} there", "x", "Hello "),
        ("Hello {{ x.y|default(x[0])|upper }} there", "x", "Hello "),
        ("A{% if x == 'gold' %}B{% else %}C{% endif %}D", "x", "A"),
        ("A{% if s %}B{{ x }}{% endif %}C", "x", "AB"),
        ("A{% if not s %}B{{ x }}{% endif %}C{{ x }}D", "x", "AC"),
        ("A{% if not s %}B{% elif x %}C{% else %}D{% endif %}", "x", "A"),
        ("A{% for i in [1, 2] %}{{ i }}{% endfor %}{% for i in x %}B{% endfor %}C", "x", "A12"),
        ("A{% for i in [1, 2] %}{{ i }}{{ x }}{% endfor %}", "x", "A1"),
        ("{% set y = x ~ 'z' %}A{{ y }}B", "x", "A"),
        ("{% set n = namespace(a=1) %}{% if s %}{% set n.a = x %}{% endif %}A{{ n.a }}B", "x", "A"),
        ("{% macro m(a) %}{{ a }}{{ x }}{% endmacro %}A{{ m(1) }}B", "x", "A"),
        ("{% set y %}{{ x }}{% endset %}A{{ y }}B", "x", "A"),
        ("A{% filter upper %}b{{ x }}{% endfilter %}C", "x", "A"),
        ("A{{ s }}B", "x", "AtrueB"),
    ],
)
def test_a_cut_ends_where_the_output_first_depends_on_the_variable(
    sandbox: TemplateSandbox, source: str, tainted: str, expected: str
) -> None:
    values = {"s": "true", "x": "gold"}
    (cut,) = sandbox.cut(b"t", [source], values, [[tainted]], NOW)
    assert cut.texts == (expected,)
    whole = sandbox.render(b"t", [source], values, NOW).texts[0]
    assert whole.startswith(expected), "a cut is a prefix of the real rendering"
    assert cut.is_cut == (expected != whole)


def test_describe_names_what_is_needed(sandbox: TemplateSandbox) -> None:
    source = "{{ a }}{% set b = 1 %}{{ b }}{% for c in d %}{{ c }}{% endfor %}{{ range(3)|list }}"
    assert sandbox.describe(b"t", [source], NOW) == ("a", "d")
