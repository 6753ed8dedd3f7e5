"""Python on the front page and in the pages of tools/docs: the front page's lines print what they say; the others parse, and call
what is there with arguments that it has."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import child
import flashjit
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "tools/python/README.md", *sorted((ROOT / "tools/docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def faults(code):
    """Calls of flashjit.name(...) where there is no such name, or it has no such argument."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "flashjit":
            continue
        called = getattr(flashjit, node.func.attr, None)
        if called is None:
            yield f"flashjit.{node.func.attr} is not there"
            continue
        parameters = inspect.signature(called).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            continue
        known = {parameter.name for parameter in parameters}
        yield from (
            f"{node.func.attr} has no {key.arg}" for key in node.keywords if key.arg and key.arg not in known
        )


def test_pages_call_what_is_there():
    pytest.importorskip("torch")  # without which flashjit.attention() is not there
    found = [(page.name, fault) for page in PAGES for code in blocks(page) for fault in faults(code)]
    assert found == [] and sum(len(blocks(page)) for page in PAGES) > 15


def whole(code):
    """Whether a snippet imports what it uses and runs without a GPU."""
    return "import torch" in code and not re.search("cuda|process_group", ast.dump(ast.parse(code)))


@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if any(map(whole, blocks(page)))], ids=lambda page: page.stem
)
def test_whole_snippets_run(page):
    pytest.importorskip("torch")
    for code in filter(whole, blocks(page)):
        exec(code, {})


@pytest.mark.slow
def test_two_processes_share_the_sequence_of_the_page(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "page.py").write_text(blocks(ROOT / "tools/docs/distributed.md")[0])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            tmp_path / "page.py",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=child.environment(),
    )
    shapes = "torch.Size([1, 4, 128, 64]) torch.Size([1, 4, 128, 64])"
    assert sorted(done.stdout.splitlines()) == [f"{rank} {shapes}" for rank in "01"], done.stderr


def test_wrong_calls_are_found():
    assert list(faults("flashjit.no_such(1)")) == ["flashjit.no_such is not there"]
    assert list(faults("x = flashjit.version(a=1)")) == ["version has no a"]


def test_the_front_pages_first_lines_print_what_they_say():
    pytest.importorskip("torch")
    code = blocks(ROOT / "README.md")[0]
    printed = re.findall(r"^# (.*)$", code, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=child.environment()
    )
    assert done.returncode == 0 and done.stdout.splitlines() == printed, done.stdout + done.stderr
