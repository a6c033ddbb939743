"""What `/v1/prompts` answers: plain dicts for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster.prompts.store import RegisteredTemplate


def template_object(registered: RegisteredTemplate, suspicious: Iterable[str] = ()) -> dict[str, Any]:
    """`suspicious`: shared variables that look private, from `CardinalityWatch.suspicious`."""
    warnings = [f"shared variable {name!r} takes nearly as many values as there are users" for name in suspicious]
    return {
        "object": "prompt",
        "id": registered.id,
        "version": registered.version,
        "created_at": registered.created_at,
        **registered.template.to_dict(),
        "warnings": warnings,
    }


def template_list(registered: Iterable[RegisteredTemplate]) -> dict[str, Any]:
    return {"object": "list", "data": [template_object(each) for each in registered]}


def deleted_object(template_id: str) -> dict[str, Any]:
    return {"object": "prompt.deleted", "id": template_id, "deleted": True}
