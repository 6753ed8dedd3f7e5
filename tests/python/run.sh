#!/usr/bin/env bash
# Makes the wheel, installs it in a clean virtual environment, and runs the Python tests against it.
# Usage: run.sh BUILD_DIR. Exit code 77: the environment cannot be made here (no python3-venv, no PyPI).
set -euo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
environment=$build/python
skip() {
  echo "skipped: $*"
  exit 77
}

if [ ! -e "$environment/ready" ]; then
  rm -rf "$environment"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || skip "Python 3.10 or newer is needed"
  python3 -m venv "$environment" || skip "python3 -m venv does not work here; install python3-venv"
  "$environment/bin/pip" install -q --disable-pip-version-check setuptools wheel pytest numpy ||
    skip "PyPI cannot be reached"
  touch "$environment/ready"
fi

native=$(mktemp -d)
trap 'rm -rf "$native"' EXIT
cp -L "$build/libflashjit.so" "$build/tools/flashjit" "$native"
FLASHJIT_NATIVE=$native "$environment/bin/pip" wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
  -w "$native" "$root/tools/python"
"$environment/bin/pip" install -q --disable-pip-version-check --no-deps --force-reinstall "$native"/flashjit-*.whl

cd "$native" # not the repository: the installed package is what is tested
unset PYTHONPATH FLASHJIT_LIBRARY
export FLASHJIT_FAKES=$build/tests
"$environment/bin/python" -c 'import flashjit; print("flashjit", flashjit.version(), "from", flashjit.__file__)'
"$environment/bin/python" -m flashjit --help >/dev/null
"$environment/bin/python" -m pytest -q -p no:cacheprovider "$root/tests/python"
