"""Templates that an operator keeps as files: YAML front matter, then the Jinja2 source of one message.

    ---
    id: support            # default: the file's name without its ending
    role: system           # of the message that the body is; default system
    share: variables
    granularity: sentence
    variables:
      product: {type: string, share: shared}
    ---
    You answer questions about {{ product }} …

Instead of a body, the front matter may hold `messages: [{role, content}, …]`. Files in the folder itself are public,
files in a subfolder belong to the tenant of that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.api.errors import InvalidRequestError
from cluster.api.ids import TenantId
from cluster.prompts.template import PromptTemplate

ENDINGS = frozenset({".jinja", ".jinja2", ".j2", ".md"})


@dataclass(frozen=True, slots=True)
class TemplateFile:
    path: Path
    tenant: TenantId | None  # None: public
    id: str
    template: PromptTemplate


def read_folder(folder: Path) -> Iterator[TemplateFile]:
    """Raises InvalidRequestError that names the file at fault, or the folder if it is not there."""
    if not folder.is_dir():  # a mistyped folder must not read as an empty one, which deletes what it held
        raise InvalidRequestError(f"templates_dir {folder} is not a folder")
    for path in sorted((*folder.glob("*"), *folder.glob("*/*"))):
        if path.suffix in ENDINGS and path.is_file():
            tenant = None if path.parent == folder else TenantId(path.parent.name)
            try:
                template_id, template = parse_file(
                    path.read_text(encoding="utf-8"), path.stem, is_public=tenant is None
                )
            except (InvalidRequestError, yaml.YAMLError, UnicodeDecodeError) as error:
                raise InvalidRequestError(f"{path}: {error}") from error
            yield TemplateFile(path, tenant, template_id, template)


def parse_file(text: str, default_id: str, *, is_public: bool) -> tuple[str, PromptTemplate]:
    """The id and the template of one file."""
    head, body = _split(text)
    definition: Any = yaml.safe_load(head) if head else {}
    if not isinstance(definition, dict):
        raise InvalidRequestError("the front matter must be a mapping")
    template_id = str(definition.pop("id", default_id))
    role = definition.pop("role", "system")
    if "public" in definition:
        raise InvalidRequestError("what is public is decided by the folder, not by the file")
    if "messages" not in definition:
        definition["messages"] = [{"role": role, "content": body}]
    elif body.strip():
        raise InvalidRequestError("a file has either messages in its front matter or a body, not both")
    return template_id, PromptTemplate.from_dict({**definition, "public": is_public})


def _split(text: str) -> tuple[str, str]:
    if not text.startswith("---\n"):
        return "", text
    head, separator, body = text[4:].partition("\n---\n")
    if not separator:
        raise InvalidRequestError("the front matter has no closing ---")
    return head, body
