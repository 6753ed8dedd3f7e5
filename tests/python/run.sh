#!/usr/bin/env bash
# The Python package's tests, against the wheel in a clean virtual environment:
#   run.sh BUILD_DIR install   makes the environment and the wheel, and installs it
#   run.sh BUILD_DIR NAME...   runs test_NAME.py there, of all names in one process
# Tests that need PyTorch see the packages of the Python that FLASHJIT_TEST_PYTHON names (default: python3) where it has
# PyTorch. Where it has none, PyTorch is fetched in continuous integration alone (CI=true), as it is gigabytes. Those that need
# JAX see that Python's, too, else JAX for the CPU from PyPI. Exit code 77: skipped; no environment can be made here (no python3-venv, no PyPI),
# or every test of the files skipped itself.
set -euo pipefail

build=$(cd "$1" && pwd)
names=("${@:2}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
environment=$build/python
native= # what the wheel is made of
unset PYTHONPATH FLASHJIT_LIBRARY
skip() {
  echo "skipped: $*"
  exit 77
}

install() {
  local python packages found
  python=$(command -v "${FLASHJIT_TEST_PYTHON:-python3}") || skip "there is no ${FLASHJIT_TEST_PYTHON:-python3}"
  if [ "$(cat "$environment/ready" 2>/dev/null)" != "$python" ]; then
    rm -rf "$environment"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || skip "Python 3.10 or newer is needed"
    "$python" -m venv "$environment" || skip "$python -m venv does not work here; install python3-venv"
    "$environment/bin/pip" install -q --disable-pip-version-check --no-compile setuptools wheel pytest numpy auditwheel ||
      skip "PyPI cannot be reached"
    echo "$python" >"$environment/ready"
  fi

  packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  rm -f "$packages/borrowed.pth" # more folders to look into, after the environment's own
  if found=$("$python" -c 'import jax; print(jax.__path__[0].rpartition("/")[0])' 2>/dev/null); then
    echo "$found" >>"$packages/borrowed.pth"
  elif ! "$environment/bin/pip" install -q --disable-pip-version-check "jax>=0.10"; then
    echo "PyPI has no JAX for $python: its tests skip"
  fi
  if found=$("$python" -c 'import torch; print(torch.__path__[0].rpartition("/")[0])' 2>/dev/null); then
    echo "$found" >>"$packages/borrowed.pth"
    "$environment/bin/python" -c 'import torch; print("with PyTorch", torch.__version__, "of", torch.__file__)'
  elif [ "${CI:-}" = true ] && "$environment/bin/pip" install -q --disable-pip-version-check --no-compile torch; then
    "$environment/bin/python" -c 'import torch; print("with PyTorch", torch.__version__, "from PyPI")'
  else
    echo "$python has no PyTorch (FLASHJIT_TEST_PYTHON names another): its tests skip"
  fi

  native=$(mktemp -d)
  trap 'rm -rf "$native"' EXIT
  cp -L "$build/libflashjit.so" "$build/tools/flashjit" "$native"
  if found=$("$environment/bin/python" -c 'import jax; print(jax.ffi.include_dir())' 2>/dev/null); then
    cmake -S "$root/tools/jax" -B "$environment/jax" -DFLASHJIT_JAX_INCLUDE="$found" >/dev/null
    cmake --build "$environment/jax"
    cp "$environment/jax/libflashjit_jax.so" "$native"
  fi
  [ ! -e "$build/libflashjit_torch.so" ] || cp "$build/libflashjit_torch.so" "$native"
  FLASHJIT_NATIVE=$native "$environment/bin/pip" wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
    -w "$native" "$root/tools/python"
  "$environment/bin/pip" install -q --disable-pip-version-check --no-compile --no-deps --force-reinstall "$native"/flashjit-*.whl
  cd "$native" # not the repository: the installed package is what is tested
  "$environment/bin/python" -c 'import flashjit; print("flashjit", flashjit.version(), "from", flashjit.__file__)'
  "$environment/bin/python" -m flashjit --help >/dev/null
}

run() {
  local status=0
  [ -e "$environment/ready" ] || skip "there is no environment"
  cd "$environment"
  export FLASHJIT_FAKES=$build/tests FLASHJIT_SMALL_LLAMA=$build/tools/examples/small_llama
  # Threads beside the tests on the other cores: they spin while they wait for each other.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  # Compiled code of PyTorch's own is not vectorised, and not compiled by a pool: to find out which vectors there are takes 25 seconds
  # of a CPU, and some of each process.
  export TORCHINDUCTOR_VEC_ISA_OK=${TORCHINDUCTOR_VEC_ISA_OK:-0} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
  local files=("${names[@]/%/.py}")
  "$environment/bin/python" -m pytest -q -p no:cacheprovider -rs "${files[@]/#/$root/tests/python/test_}" || status=$?
  [ $status != 5 ] || skip "every test" # pytest's code where it collected none
  exit $status
}

if [ "${names[*]}" = install ]; then install; else run; fi
