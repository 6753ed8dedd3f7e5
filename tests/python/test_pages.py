"""Python on the front page and in the pages of tools/docs: the front page's lines print what they say; the others call
what is there with arguments that it has, and run in order on the CPU, except what LEFT_OUT names."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap

import child
import flashjit
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "tools/python/README.md", *sorted((ROOT / "tools/docs").glob("*.md"))]


def blocks(page):
    """Snippets, also those of a list, which are indented."""
    found = re.findall(
        r"^ *```python\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(code) for code in found]


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


PAGED = """
import torch, flashjit
batch, heads, heads_kv, dim, page = 2, 8, 2, 64, 16
k_pages, v_pages = torch.randn(2, 16, heads_kv, page, dim)
table = torch.arange(16, dtype=torch.int32).view(batch, -1)
lengths = torch.tensor([100, 37], dtype=torch.int32)
q = torch.randn(batch, heads, 1, dim)
"""
LATENTS = """
scale, latents = 0.1, torch.randn(16, 1, 16, 576)
q, q_nope, q_rope = (torch.randn(batch, 16, 1, columns) for columns in (576, 512, 64))
indices = torch.arange(8, dtype=torch.int32).expand(batch, 1, 1, 8).contiguous()
"""
# What a page's words give to a snippet: the tensors that it reads. Snippets also have the names of those before them.
GIVEN = {
    ("README", 1): "q, k, v, gates = *torch.randn(3, 1, 4, 64, 32), torch.randn(4, 32)\n"
    "slopes, document = torch.ones(4), torch.zeros(64, dtype=torch.int32)",
    ("cache-formats", 4): PAGED + "pages, dim, scale = 16, 128, torch.ones(())\n"
    "q, new_k, new_v = torch.randn(2, 8, 1, 128), *torch.randn(2, 2, 2, 1, 128)",
    ("engines", 2): PAGED + "q2, k2_pages, v2_pages, table2, lengths2 = q, k_pages, v_pages, table, lengths\n"
    "mine = torch.empty_like(q)",
    ("programs", 2): "document, (q, k, v) = torch.zeros(64, dtype=torch.int32), torch.randn(3, 1, 2, 64, 32)",
    ("serving", 2): "q = torch.randn(batch, heads, 3, dim)\n"
    "parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32)",
    ("serving", 3): PAGED + LATENTS,
    ("serving", 7): PAGED + "offsets = torch.tensor([0, 5, 6], dtype=torch.int32)\n"
    "new_k, new_v, q = *torch.randn(2, 1, heads_kv, 6, dim), torch.randn(1, heads, 6, dim)\n"
    "prefix, own = torch.randn(2, 2, 1, heads_kv, 20, dim)",
    ("serving", 8): PAGED + "k_pages, v_pages = torch.randn(2, 80, heads_kv, page, dim)\n"
    "table = torch.arange(70, dtype=torch.int32).expand(2, -1).contiguous()\n"
    "lengths, offsets = torch.full_like(lengths, 1100), torch.arange(3, dtype=torch.int32)\n"
    "q = torch.randn(1, heads, 2, dim)",
}
# Pages whose snippets do not run here, and why.
LEFT_OUT = {
    "diffusers": "weights from the hub",
    "distributed": "two processes: the test below",
    "jax": "JAX: test_jax_examples.py",
    "skip-softmax": "64k tokens: a GPU",
    "transformers": "weights from the hub",
    "python": "4k tokens: a GPU",
}
PREPARES = ("engines", 1)  # compiles for a GPU, for minutes


def name_of(page):
    return page.parent.name if page.parent.name == "python" else page.stem


@pytest.mark.every_case
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_snippets_run_in_order(page):
    """All snippets of a page in one namespace, on the CPU."""
    pytest.importorskip("torch")
    if name_of(page) in LEFT_OUT:
        pytest.skip(LEFT_OUT[name_of(page)])
    names = {}
    for at, code in enumerate(blocks(page)):
        exec(GIVEN.get((name_of(page), at), ""), names)
        if (name_of(page), at) != PREPARES:
            exec(code.replace('"cuda"', '"cpu"'), names)


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
