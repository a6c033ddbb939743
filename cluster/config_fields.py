"""What a setting may be, in words: for error messages and for the page of settings. Knows no setting by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_PLAIN = {bool: "true or false", str: "text", Path: "a path", int: "an integer", float: "a number"}


def allowed_values(field: FieldInfo) -> str:
    """ "an integer from 1 to 4096 or 'auto'"."""
    return _words(_type_of(field))


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence for each setting at fault: its name, the value and what is allowed."""
    told: dict[str, str] = {}
    for item in error.errors(include_url=False):
        names, kind = _find(item["loc"], model)
        name = ".".join(names)
        if item["type"] == "extra_forbidden":
            told.setdefault(name, f"{name}: no such setting")
        elif not names:
            told.setdefault(name, str(item["msg"]).removeprefix("Value error, "))
        else:
            told.setdefault(name, f"{name} is {item['input']!r}, must be {_words(kind)}")
    return "; ".join(told.values())


def _find(location: Iterable[int | str], kind: Any) -> tuple[list[str], Any]:
    """The names and entries that lead to a value, and its type. pydantic also puts members of unions into a location:
    they are left out."""
    names: list[str] = []
    for part in location:
        bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if isinstance(bare, type) and issubclass(bare, BaseModel):
            kind = _type_of(bare.model_fields[str(part)]) if part in bare.model_fields else None
        elif get_origin(bare) in (dict, tuple):
            kind = get_args(bare)[1 if get_origin(bare) is dict else 0]
        else:
            continue
        names.append(str(part))
    return names, kind


def _type_of(field: FieldInfo) -> Any:
    return Annotated[field.annotation, field]  # with its limits


def _words(kind: Any, limits: Iterable[Any] = ()) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(args[0], [limit for part in args[1:] for limit in getattr(part, "metadata", [part])])
    if origin in (Union, UnionType):
        return " or ".join(_words(arg, limits) for arg in args if arg is not NoneType)
    if origin is Literal:
        *most, last = (repr(arg) for arg in args)
        return f"{', '.join(most)} or {last}" if most else last
    if origin is tuple:
        return "a list of texts"
    if origin is dict:
        return f"a map from text to {_words(args[1])}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a map with any of {', '.join(kind.model_fields)}"
    return _PLAIN[kind] + _range(limits)


def _range(limits: Iterable[Any]) -> str:
    low = high = ""
    for limit in limits:
        match limit:
            case Ge(bound):
                low = f" from {bound}"
            case Gt(bound):
                low = f" above {bound}"
            case Le(bound):
                high = f" to {bound}"
            case Lt(bound):
                high = f" below {bound}"
    if low.startswith(" from") and not high:
        return low.replace("from", "of at least")
    joint = " and" if low.startswith(" above") and high else ""
    return low + joint + high
