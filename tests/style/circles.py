"""Circles of includes, and of imports of the Python package: groups of files that need each other."""

from __future__ import annotations

import ast
import pathlib
import re

Graph = dict[pathlib.Path, set[pathlib.Path]]
FOLDERS = ("include", "runtime", "templates", "autotune", "tools/command", "tools/torch", "tools/jax")


def includes(root: pathlib.Path) -> Graph:
    """What each C++ and CUDA file includes by a quoted name. Kernels see templates/ as flashjit/."""
    graph: Graph = {}
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.suffix not in {".hpp", ".h", ".cuh", ".cpp"}:
                continue
            names = re.findall(r'^\s*#\s*include "([^"]+)"', path.read_text(), re.M)
            places = (root, root / "include", root / "runtime", root / folder, path.parent)
            found = [
                [place / name for place in places] + [root / "templates" / name.removeprefix("flashjit/")]
                for name in names
            ]
            graph[path] = {
                next(at for at in paths if at.is_file()).resolve()
                for paths in found
                if any(at.is_file() for at in paths)
            }
    return graph


def imports(package: pathlib.Path) -> Graph:
    """What each module of a package imports of it, functions' own imports too."""

    def file_of(name: str) -> list[pathlib.Path]:
        base = package.parent / name.replace(".", "/")
        return [at for at in (base.with_suffix(".py"), base / "__init__.py") if at.is_file()]

    graph: Graph = {}
    for path in package.rglob("*.py"):
        own = path.relative_to(package.parent).with_suffix("").parts[:-1]
        graph[path] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parts = [*own[: len(own) - node.level + 1]] if node.level else []
                base = ".".join([*parts, *([node.module] if node.module else [])])
                names = [
                    f"{base}.{alias.name}" if file_of(f"{base}.{alias.name}") else base
                    for alias in node.names
                ]
            graph[path].update(at for name in names for at in file_of(name))
    return graph


def circles(graph: Graph) -> list[list[pathlib.Path]]:
    """Files that can be reached from themselves, by the files that they reach."""
    reached: Graph = {}
    for start in graph:
        found: set[pathlib.Path] = set()
        waiting = list(graph[start])
        while waiting:
            path = waiting.pop()
            if path not in found:
                found.add(path)
                waiting += graph.get(path, ())
        reached[start] = found
    groups = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph if a in reached[a]}
    return [sorted(group) for group in groups]
