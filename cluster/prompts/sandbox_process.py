"""Renders untrusted templates in a process of its own: `python -m cluster.prompts.sandbox_process`.

One JSON object per line on standard input, one answer per line on standard output. A Jinja2 sandbox keeps a template
from reaching Python; only a process border keeps it from running for ever or eating all memory: a timer and an address
space limit of the kernel end this process whatever the template does. The timer counts processor time, because a busy
machine is no fault of the template's; a template has nothing to wait for. The process holds no secret.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.prompts.jinja_cut import CUT_FUNCTION, CutReachedError, cut_at

MAX_NODES = 20_000
MAX_NESTING = 60
_FORBIDDEN = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block)
_clock_formats: dict[str, str] = {}
_now = datetime(2000, 1, 1)


class LimitError(Exception):
    """A template or what it puts out is too large."""


def _strftime_now(fmt: str) -> str:
    _clock_formats[fmt] = _now.strftime(fmt)
    return _clock_formats[fmt]


def _reach_cut() -> None:
    raise CutReachedError


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        keep_trailing_newline=True, autoescape=False, extensions=["jinja2.ext.loopcontrols"], cache_size=0
    )
    # The same source and values must always give the same text.
    del environment.filters["random"]
    del environment.globals["lipsum"]
    environment.globals["strftime_now"] = _strftime_now
    return environment


ENVIRONMENT = _environment()
CUT_ENVIRONMENT = _environment()
CUT_ENVIRONMENT.globals[CUT_FUNCTION] = _reach_cut


def _parse(source: str, environment: ImmutableSandboxedEnvironment) -> nodes.Template:
    tree = environment.parse(source)
    count = 0
    level: list[nodes.Node] = [tree]
    for depth in range(MAX_NESTING + 1):
        count += len(level)
        if count > MAX_NODES:
            raise LimitError(f"the template has more than {MAX_NODES} syntax nodes")
        level = [child for node in level for child in node.iter_child_nodes()]
        if not level:
            break
        if depth == MAX_NESTING:
            raise LimitError(f"the template is nested deeper than {MAX_NESTING} levels")
    forbidden = next(tree.find_all(_FORBIDDEN), None)
    if forbidden is not None:
        raise LimitError(f"{{% {type(forbidden).__name__.lower()} %}} is not available in prompt templates")
    return tree


@lru_cache(maxsize=256)
def _compile(source: str, tainted: frozenset[str] | None) -> jinja2.Template:
    environment = ENVIRONMENT if tainted is None else CUT_ENVIRONMENT
    tree = _parse(source, environment)
    if tainted is not None:
        tree = cut_at(tree, tainted)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None), None)


def _run(template: jinja2.Template, values: dict[str, Any], max_chars: int) -> tuple[str, bool]:
    """The output, and whether it was cut short by a tainted variable."""
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.root_render_func(template.new_context(values)):
            num_chars += len(piece)
            if num_chars > max_chars:
                raise LimitError(f"the template puts out more than {max_chars} characters")
            pieces.append(piece)
    except CutReachedError:
        return "".join(pieces), True
    return "".join(pieces), False


def describe(sources: Sequence[str]) -> dict[str, Any]:
    """Names that the templates need from outside."""
    names: set[str] = set()
    for source in sources:
        tree = _parse(source, ENVIRONMENT)
        assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        names |= meta.find_undeclared_variables(tree) - assigned  # one set in only some branches counts as its own
        _compile(source, None)
    return {"names": sorted(names - ENVIRONMENT.globals.keys())}


def render(sources: Sequence[str], values: dict[str, Any], max_chars: int) -> dict[str, Any]:
    texts = []
    for source in sources:
        text, _ = _run(_compile(source, None), values, max_chars)
        max_chars -= len(text)
        texts.append(text)
    return {"texts": texts, "clock": dict(_clock_formats)}


def cut(
    sources: Sequence[str], values: dict[str, Any], taints: Iterable[Sequence[str]], max_chars: int
) -> dict[str, Any]:
    """For each set of tainted names: the texts up to the first dependence, and whether there was one."""
    results = []
    for tainted in taints:
        known = {name: value for name, value in values.items() if name not in tainted}
        texts: list[str] = []
        is_cut = False
        for source in sources:
            text, is_cut = _run(_compile(source, frozenset(tainted)), known, max_chars)
            texts.append(text)
            if is_cut:
                break
        results.append({"texts": texts, "is_cut": is_cut})
    return {"cuts": results, "clock": dict(_clock_formats)}


_OPERATIONS = {"describe": describe, "render": render, "cut": cut}


def answer(line: str) -> dict[str, Any]:
    """Errors say what is wrong with the template; they hold no values."""
    global _now
    request = json.loads(line)
    _clock_formats.clear()
    _now = datetime.fromisoformat(request["now"])
    try:
        return _OPERATIONS[request["operation"]](**request["arguments"])  # type: ignore[operator]
    except LimitError as error:
        return {"error": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except RecursionError:
        return {"error": "the template is nested or recurses too deeply"}
    except MemoryError:
        return {"error": "the template needs too much memory"}
    except Exception as error:  # a template can raise anything; the kind is enough, a message could hold values
        return {"error": f"the template failed with {type(error).__name__}"}


def main() -> None:
    cpu_limit_s, memory_limit_bytes = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # its default action ends the process, even inside C code
        reply = json.dumps(answer(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
