#!/usr/bin/env python3
"""Numbers of the source tree that may fall and may not rise: README.md beside this file has a table of them.

    numbers.py [--print]

Each row's number must be what is counted: a change that lowers one lowers its row, too, and one that raises one is to
find another way. Exit code 0: all are equal. --print shows what is counted.
"""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

from circles import circles, imports, includes

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests/style/README.md"
NATIVE = {".cpp", ".hpp", ".h", ".cuh", ".c"}
SOURCES = NATIVE | {".py", ".sh", ".cmake", ".rs"}
LONGEST_FUNCTION, LONGEST_FILE = 100, 600


def tracked() -> list[pathlib.Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def lines_of(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines()


def native_functions(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Functions of a formatted file, with their lines: from the last line at the indentation of a namespace or of a class
    to a closing brace at the same."""
    begins: dict[int, tuple[str, int]] = {}
    for number, line in enumerate(lines_of(path)):
        text = line.strip()
        indentation = len(line) - len(text)
        if indentation not in (0, 2) or not text or text.startswith(("//", "#")):
            continue
        if not text.startswith(("}", ")")):
            begins[indentation] = text, number
        elif text.startswith("}") and indentation in begins:
            opened, begin = begins.pop(indentation)
            if not re.match(r"(inline )?(namespace|extern|struct|class|union|enum)\b", opened):
                yield opened, number - begin + 1


def python_functions(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Functions, with the lines of their bodies, docstrings aside."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, body[-1].end_lineno - body[0].lineno + 1 if body else 0


def count() -> dict[str, int]:
    files = tracked()
    relative = {path: path.relative_to(ROOT).as_posix() for path in files}
    sources = [path for path in files if path.suffix in SOURCES and not relative[path].startswith("tests/")]
    templates = [path for path in sources if relative[path].startswith("templates/")]
    spec = (ROOT / "include/flashjit/spec.hpp").read_text()
    fields = re.search(r"struct AttentionSpec \{(.*?)^\};", spec, re.S | re.M)
    assert fields
    long_functions = [
        f"{relative[path]}: {name}"
        for path in sources
        if path.suffix in NATIVE | {".py"}
        for name, length in (python_functions if path.suffix == ".py" else native_functions)(path)
        if length > LONGEST_FUNCTION
    ]
    for name in long_functions if "--print" in sys.argv else ():
        print("long:", name)
    rings = circles(includes(ROOT)), circles(imports(ROOT / "tools/python/flashjit"))
    for ring in [*rings[0], *rings[1]] if "--print" in sys.argv else ():
        print("circle:", *(path.relative_to(ROOT) for path in ring))
    return {
        "`if constexpr` in templates/": sum(path.read_text().count("if constexpr") for path in templates),
        "fields of `AttentionSpec`": len(re.findall(r"^  [\w:<>]+ \w+(?: = [^;()]*)?;", fields[1], re.M)),
        f"functions of more than {LONGEST_FUNCTION} lines": len(long_functions),
        f"files of more than {LONGEST_FILE} lines": sum(
            len(lines_of(path)) > LONGEST_FILE for path in sources
        ),
        "circles of includes": len(rings[0]),
        "circles of Python's imports": len(rings[1]),
    }


def main() -> int:
    rows = dict(re.findall(r"^\| (.+?) \| ([0-9]+) \|", PAGE.read_text(), re.M))
    wrong = 0
    for name, counted in count().items():
        written = int(rows.get(name, -1))
        if "--print" in sys.argv:
            print(f"{counted:8} {name}")
        if counted > written:
            print(
                f"{name}: {counted}, and {PAGE.relative_to(ROOT)} allows {written}: find a way that needs no more."
            )
        elif counted < written:
            print(
                f"{name}: {counted}, below the {written} of {PAGE.relative_to(ROOT)}: lower that number, too."
            )
        wrong += counted != written
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
