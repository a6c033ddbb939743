"""Templates live in their tenant, survive restarts, and are the same for every process that shares the folder."""

from pathlib import Path
from threading import Thread

import pytest

from cluster.api.errors import InvalidRequestError, NotFoundError
from cluster.api.ids import TenantId
from cluster.prompts.folder import read_folder
from cluster.prompts.store import MAX_VERSIONS, TemplateStore
from cluster.prompts.template import PromptTemplate

ACME, OTHER = TenantId("acme"), TenantId("../other")


def hashed(tenant: str) -> bytes:
    return b"#" + tenant.encode()


@pytest.fixture
def store(tmp_path: Path) -> TemplateStore:
    return TemplateStore(tmp_path, hashed)


def template(source: str, **extra: object) -> PromptTemplate:
    return PromptTemplate.from_dict({"messages": [{"role": "system", "content": source}], **extra})


def test_the_version_is_the_digest_of_the_definition(store: TemplateStore) -> None:
    first = store.put(ACME, "greet", template("one"))
    second = store.put(ACME, "greet", template("two"))
    assert first.version != second.version
    assert store.get(hashed("acme"), "greet").version == second.version
    assert store.get(hashed("acme"), "greet", first.version).template == template("one")
    assert store.put(ACME, "greet", template("one")).version == first.version
    assert store.get(hashed("acme"), "greet").version == first.version, "put again, it is the latest again"
    assert template("one", share="user").version != template("one").version


def test_a_foreign_id_answers_as_an_absent_one(store: TemplateStore) -> None:
    store.put(OTHER, "secret", template("x"))
    answers = []
    for template_id in ("secret", "absent"):
        with pytest.raises(NotFoundError) as caught:
            store.get(hashed("acme"), template_id)
        answers.append(str(caught.value).replace(template_id, "ID"))
        with pytest.raises(NotFoundError):
            store.delete(ACME, template_id)
    assert answers[0] == answers[1]
    assert store.list_latest(hashed("acme")) == []
    assert store.get(hashed("../other"), "secret").template == template("x"), "it is there for its owner"


def test_a_public_template_serves_every_tenant_after_its_own(store: TemplateStore) -> None:
    store.put(None, "greet", template("public"))
    assert store.get(hashed("acme"), "greet").tenant is None
    store.put(ACME, "greet", template("own"))
    assert store.get(hashed("acme"), "greet").template == template("own")
    assert store.get(hashed("../other"), "greet").template == template("public")


def test_another_process_sees_changes_and_restarts_lose_nothing(store: TemplateStore, tmp_path: Path) -> None:
    other = TemplateStore(tmp_path, hashed)
    store.put(ACME, "greet", template("one"))
    assert other.get(hashed("acme"), "greet").template == template("one")
    other.delete(ACME, "greet")
    with pytest.raises(NotFoundError):
        store.get(hashed("acme"), "greet")


def test_concurrent_writers_lose_no_version(tmp_path: Path) -> None:
    stores = [TemplateStore(tmp_path, hashed) for _ in range(4)]
    threads = [
        Thread(target=lambda i=i, s=s: [s.put(ACME, "t", template(f"{i} {n}")) for n in range(5)])  # type: ignore[misc]
        for i, s in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        for n in range(5):
            assert stores[0].get(hashed("acme"), "t", template(f"{i} {n}").version)


def test_old_versions_are_dropped_beyond_a_limit(store: TemplateStore) -> None:
    versions = [store.put(ACME, "t", template(str(i))).version for i in range(MAX_VERSIONS + 1)]
    assert store.get(hashed("acme"), "t", versions[1])
    with pytest.raises(NotFoundError, match="version"):
        store.get(hashed("acme"), "t", versions[0])


@pytest.mark.parametrize("template_id", ["", "../x", "a/b", "x" * 129, ".hidden", "a\nb", "ä"])
def test_ids_are_plain(store: TemplateStore, template_id: str) -> None:
    with pytest.raises(InvalidRequestError):
        store.put(ACME, template_id, template("x"))
    with pytest.raises(NotFoundError):
        store.get(hashed("acme"), template_id)


def test_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "hello.jinja").write_text("Just text\n")
    (tmp_path / "acme" / "support.md").write_text(
        "---\nshare: template\nrole: user\nvariables:\n  product: {share: shared}\n---\nAbout {{ product }}\n"
    )
    (tmp_path / "acme" / "two.j2").write_text(
        "---\nid: pair\nmessages:\n- {role: system, content: a}\n- {role: user, content: b}\n---\n"
    )
    (tmp_path / "acme" / "notes.txt").write_text("not a template")
    files = {(file.tenant, file.id): file.template for file in read_folder(tmp_path)}
    assert files.keys() == {(None, "hello"), ("acme", "support"), ("acme", "pair")}
    assert files[None, "hello"].is_public
    assert files[None, "hello"].messages == (("system", "Just text\n"),)
    assert files[ACME, "support"].messages == (("user", "About {{ product }}\n"),)
    assert files[ACME, "support"].shared_names == ("product",)
    assert not files[ACME, "support"].is_public
    assert files[ACME, "pair"].messages == (("system", "a"), ("user", "b"))


@pytest.mark.parametrize(
    "text", ["---\nshare: all\n---\nx", "---\nshare: [\n---\n", "---\npublic: true\n---\nx", "---\nx"]
)
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.jinja").write_text(text)
    with pytest.raises(InvalidRequestError, match=r"bad\.jinja"):
        list(read_folder(tmp_path))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system"}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}], "share": "all"}, "share"),
        ({"messages": [{"role": "user", "content": "x"}], "granularity": 3}, "granularity"),
        ({"messages": [{"role": "user", "content": "x"}], "variables": {"1x": {}}}, "variables.1x"),
        ({"messages": [{"role": "user", "content": "x"}], "variables": {"x": {"type": "date"}}}, "variables.x.type"),
        ({"messages": [{"role": "user", "content": "x"}], "variables": {"x": {"share": True}}}, "variables.x.share"),
        ({"messages": [{"role": "user", "content": "x"}], "variables": {"x": {"default": 1}}}, "variables.x"),
        ({"messages": [{"role": "user", "content": "x"}], "name": "x"}, "name"),
        ({"messages": [{"role": "user", "content": "x"}], "public": 1}, "public"),
    ],
)
def test_bad_definitions_name_the_field(body: dict, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        PromptTemplate.from_dict(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "s"),
        ({"s": "x", "i": 1, "b": True, "n": 1.5, "l": [], "o": {}, "z": 1}, "z"),
        ({"s": 1, "i": 1, "b": True, "n": 1.5, "l": [], "o": {}}, "s"),
        ({"s": "x", "i": True, "b": True, "n": 1.5, "l": [], "o": {}}, "i"),
        ({"s": "x", "i": 1.0, "b": True, "n": 1.5, "l": [], "o": {}}, "i"),
        ({"s": "x", "i": 1, "b": 1, "n": 1.5, "l": [], "o": {}}, "b"),
        ({"s": "x", "i": 1, "b": True, "n": float("nan"), "l": [], "o": {}}, "n"),
        ({"s": "x", "i": 1, "b": True, "n": 1.5, "l": {}, "o": {}}, "l"),
        ({"s": "x", "i": 1, "b": True, "n": 1.5, "l": [], "o": None}, "o"),
        ({"s": "\udfff", "i": 1, "b": True, "n": 1.5, "l": [], "o": {}}, "s"),
    ],
)
def test_bad_values_name_the_variable_and_never_show_it(values: dict, name: str) -> None:
    types = {"s": "string", "i": "integer", "b": "boolean", "n": "number", "l": "array", "o": "object"}
    typed = template("x", variables={name: {"type": kind} for name, kind in types.items()})
    with pytest.raises(InvalidRequestError, match=rf"'{name}'|\.{name} ") as caught:
        typed.check_values(values)
    assert caught.value.param == f"prompt.variables.{name}"
