"""Templates that an operator keeps as files come and go with the files."""

from pathlib import Path

import pytest
from prompt_rig import PromptRig

from cluster.api.errors import InvalidRequestError
from cluster.api.ids import TenantId
from cluster.prompts.sandbox import TemplateSandbox

pytestmark = pytest.mark.weights

ACME = TenantId("acme")
WORDS = "You are the polite and patient assistant of a shop that sells furniture of every kind. " * 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "acme").mkdir(parents=True)
    for name in ("gone", "kept", "taken"):
        (folder / "acme" / f"{name}.md").write_text(f"{WORDS}The {name} one.")
    (folder / "everyone.md").write_text(f"{WORDS}For everyone.")
    return folder


@pytest.fixture
def start(tmp_path: Path, folder: Path, sandbox: TemplateSandbox) -> PromptRig:
    rig = PromptRig(tmp_path / "store", sandbox=sandbox)
    rig.catalog.load_folder(folder)
    return rig


def ids_of(rig: PromptRig) -> list[str]:
    return sorted(each.id for each in rig.store.latest())


def test_a_removed_file_takes_its_template_with_it(
    start: PromptRig, folder: Path, tmp_path: Path, sandbox: TemplateSandbox
) -> None:
    """And nothing else: neither what came over HTTP, nor a file's template that came over HTTP since."""
    for template_id in ("mine", "taken"):
        start.put(f"{WORDS}Put over HTTP.", template_id=template_id)
    for path in ("acme/gone.md", "acme/taken.md", "everyone.md"):
        (folder / path).unlink()
    assert len(start.catalog.all_warm_ups()) == 5
    rig = PromptRig(tmp_path / "store", sandbox=sandbox)
    assert [each.id for each in rig.catalog.load_folder(folder)] == ["kept"]
    assert ids_of(rig) == ids_of(start) == ["kept", "mine", "taken"]
    assert len(rig.catalog.all_warm_ups()) == len(start.catalog.all_warm_ups()) == 3
    rig.catalog.load_folder(None)
    assert ids_of(rig) == ["mine", "taken"]


@pytest.mark.parametrize("text", ["---\nshare: all\n---\nx", "{{ undeclared }}", "{% if %}"])
def test_a_bad_file_changes_nothing_and_is_named(start: PromptRig, folder: Path, text: str) -> None:
    (folder / "acme" / "gone.md").unlink()
    (folder / "acme" / "bad.md").write_text(text)
    with pytest.raises(InvalidRequestError, match=r"bad\.md"):
        start.catalog.load_folder(folder)
    assert ids_of(start) == ["everyone", "gone", "kept", "taken"]


def test_a_folder_that_is_not_there_is_not_an_empty_one(start: PromptRig, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="nowhere"):
        start.catalog.load_folder(tmp_path / "nowhere")
    assert ids_of(start) == ["everyone", "gone", "kept", "taken"]
