"""What the benchmarks that run others' engines and tests stand for and leave out."""

import pathlib
import subprocess
import sys

import pytest
from child import environment

BENCH = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"


def test_an_absent_package_stands_for_imports_and_computes_nothing(monkeypatch, tmp_path):
    """A function of a package that is not there would else return in silence what it should have changed."""
    torch = pytest.importorskip("torch")
    engine = tmp_path / "engine_of_this_test" / "engine_of_this_test"
    engine.mkdir(parents=True)
    (engine / "__init__.py").write_text(
        "from absent_of_this_test.kernels import compute, register\n"
        "@register('name')\ndef own():\n    return 3\n"
    )
    (engine.parent / "beside_it.py").write_text("import absent_beside_it\n")
    monkeypatch.syspath_prepend(str(engine.parent))
    monkeypatch.syspath_prepend(str(BENCH))
    import absent_packages

    before = list(sys.meta_path)
    try:
        found = absent_packages.install("engine_of_this_test")
        import engine_of_this_test as made

        assert "absent_of_this_test" in found and made.own() == 3
        with pytest.raises(RuntimeError, match="compute is of a package that is absent"):
            made.compute(torch.zeros(2), 1)
        with pytest.raises(ImportError):
            import beside_it  # noqa: F401
    finally:
        sys.meta_path[:] = before


def test_only_the_cases_that_are_run_are_made(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(BENCH)!r})\nfrom flashinfer_shim import *\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('x', range(3))\n@pytest.mark.parametrize('y', ['a', 'b'])\n"
        "def test_one(x, y):\n    pass\n\ndef test_other():\n    pass\n"
    )
    cases = tmp_path / "cases.txt"
    cases.write_text("test_it.py::test_one[a-2]\ntest_it.py::test_other")
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        env=environment(FLASHINFER_SUITE_CASES=cases),
        capture_output=True,
        text=True,
    )
    assert [line for line in listed.stdout.splitlines() if "::" in line] == cases.read_text().splitlines(), (
        listed.stdout
    )
