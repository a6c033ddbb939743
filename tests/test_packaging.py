"""What an installed copy consists of, as the image uses it: every package, and every file that a package reads."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INCLUDE = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
PACKAGE_DATA = PROJECT["tool"]["setuptools"]["package-data"]["*"]
TOP_PACKAGES = ("cluster", "workers", "router", "cache_service")
# Made where they are used, never part of an installation.
GENERATED = ("__pycache__", "*.pyc", "*.so")


def files() -> list[Path]:
    found = (path for package in TOP_PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return [path for path in found if not any(fnmatch(part, mark) for part in path.parts for mark in GENERATED)]


def test_every_folder_with_code_is_a_package() -> None:
    packages = set(find_packages(str(ROOT), include=INCLUDE))
    folders = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in files() if path.suffix == ".py"}
    assert folders <= packages


def test_every_other_file_is_installed_too() -> None:
    # buf.yaml is for developers, but matches a pattern anyway.
    left_out = [
        path.relative_to(ROOT).as_posix()
        for path in files()
        if path.suffix != ".py" and not any(fnmatch(path.name, pattern) for pattern in PACKAGE_DATA)
    ]
    assert left_out == []


def dockerfile() -> list[str]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_gets_what_it_copies() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for line in dockerfile() if line.startswith("COPY ") for source in line.split()[1:-1]}
    assert copied <= let_in
    assert set(TOP_PACKAGES) <= copied
    assert PROJECT["project"]["readme"] in copied


def test_the_image_runs_as_an_ordinary_user_on_the_documented_ports() -> None:
    lines = dockerfile()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 1000"]
    assert "EXPOSE 8000 9000" in lines
    assert any(line.startswith("HEALTHCHECK ") and "/health" in line for line in lines)


def test_the_image_and_make_install_the_same_torch() -> None:
    (argument,) = (line for line in dockerfile() if line.startswith("ARG TORCH="))
    version = argument.removeprefix("ARG TORCH=")
    assert version.startswith("torch==")
    assert f"TORCH ?= {version}\n" in (ROOT / "Makefile").read_text()
