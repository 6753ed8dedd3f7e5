#!/usr/bin/env bash
# Makes the wheel, installs it in a clean virtual environment, and runs the Python tests against it. Those that need PyTorch
# see the packages of the Python that FLASHJIT_TEST_PYTHON names (default: python3) where it has PyTorch, which is not
# fetched here; else they skip.
# Usage: run.sh BUILD_DIR. Exit code 77: the environment cannot be made here (no python3-venv, no PyPI).
set -euo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
environment=$build/python
python=$(command -v "${FLASHJIT_TEST_PYTHON:-python3}") || { echo "there is no ${FLASHJIT_TEST_PYTHON:-python3}" && exit 77; }
unset PYTHONPATH FLASHJIT_LIBRARY
skip() {
  echo "skipped: $*"
  exit 77
}

if [ "$(cat "$environment/ready" 2>/dev/null)" != "$python" ]; then
  rm -rf "$environment"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || skip "Python 3.10 or newer is needed"
  "$python" -m venv "$environment" || skip "$python -m venv does not work here; install python3-venv"
  "$environment/bin/pip" install -q --disable-pip-version-check setuptools wheel pytest numpy ||
    skip "PyPI cannot be reached"
  echo "$python" >"$environment/ready"
fi
packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
borrowed=$packages/borrowed.pth # more folders to look into, after the environment's own
rm -f "$borrowed"

native=$(mktemp -d)
trap 'rm -rf "$native"' EXIT
cp -L "$build/libflashjit.so" "$build/tools/flashjit" "$native"
FLASHJIT_NATIVE=$native "$environment/bin/pip" wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
  -w "$native" "$root/tools/python"
"$environment/bin/pip" install -q --disable-pip-version-check --no-deps --force-reinstall "$native"/flashjit-*.whl

cd "$native" # not the repository: the installed package is what is tested
export FLASHJIT_FAKES=$build/tests
"$environment/bin/python" -c 'import flashjit; print("flashjit", flashjit.version(), "from", flashjit.__file__)'
"$environment/bin/python" -m flashjit --help >/dev/null

mapfile -t with_torch < <(grep -l '^[a-z= ]*pytest.importorskip("torch"' "$root"/tests/python/test_*.py)
mapfile -t without < <(printf '%s\n' "$root"/tests/python/test_*.py "${with_torch[@]}" | sort | uniq -u)
run() { "$environment/bin/python" -m pytest -q -p no:cacheprovider -rs "$@"; }
names() { basename -a "$@" | paste -sd ' '; }

# Both parts run whatever the first one finds.
status=0
echo "== without PyTorch: $(names "${without[@]}")"
run "${without[@]}" || status=$?
if found=$("$python" -c 'import torch; print(torch.__path__[0].rpartition("/")[0])' 2>/dev/null); then
  echo "$found" >"$borrowed"
  "$environment/bin/python" -c 'import torch; print("== with PyTorch", torch.__version__, "of", torch.__file__)'
else
  echo "== $python has no PyTorch (FLASHJIT_TEST_PYTHON names another): these skip"
fi
echo "== $(names "${with_torch[@]}")"
run "${with_torch[@]}" || [ $? = 5 ] || status=1 # 5: all skipped
exit "$status"
