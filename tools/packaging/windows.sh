#!/usr/bin/env bash
# flashjit for Windows on x86-64, built with MinGW-w64: flashjit.dll with its import library and its .def, flashjit.exe, the wheel.
#   windows.sh BUILD_DIR [PART...]   of build, wheel; in BUILD_DIR/windows. CUDA's headers come from BUILD_DIR
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
linux=$(cd "$1" && pwd)
work=$linux/windows
shift
[ $# -gt 0 ] || set -- build wheel

configured() { sed -n "s/^$1:[A-Z]*=//p" "$linux/CMakeCache.txt"; }

build() {
  local launcher=()
  command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_C_COMPILER_LAUNCHER=ccache)
  mkdir -p "$work"
  # The system's headers but its C library's.
  [ -e "$work/headers" ] || python3 "$root/tools/packaging/release.py" headers "$work/headers"
  cmake -S "$root" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_TOOLCHAIN_FILE="$root/tools/cmake/mingw-w64.cmake" \
    -DFLASHJIT_INSTALL=OFF -DFLASHJIT_UNITY=ON -DCMAKE_CXX_FLAGS="-g0" -Dfmt_DIR="$work/headers/cmake" \
    -Dnlohmann_json_DIR="$work/headers/cmake" -DCLI11_DIR="$work/headers/cmake" -DXXHASH_INCLUDE="$work/headers" \
    -DFLASHJIT_CUDA_INCLUDE="$(configured FLASHJIT_CUDA_INCLUDE)" "${launcher[@]}" >"$work/configure.log"
  cmake --build "$work/build"
}

# Needs setuptools and wheel in the Python that runs.
wheel() {
  local native=$work/native version
  version=$(sed -n 's/^project(flashjit VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")
  rm -rf "$native" && mkdir -p "$native"
  cp "$work/build/flashjit.dll" "$work/build/tools/flashjit.exe" "$native"
  x86_64-w64-mingw32-strip "$native"/*
  FLASHJIT_NATIVE=$native FLASHJIT_JAX_INCLUDE='' _PYTHON_HOST_PLATFORM=win-amd64 "${PYTHON:-python3}" -m pip wheel -q \
    --disable-pip-version-check --no-deps --no-build-isolation -w "$work" "$root/tools/python"
  ls "$work/flashjit-$version-py3-none-win_amd64.whl"
}

for part; do
  case $part in
    build | wheel) "$part" ;;
    *)
      echo "'$part' is no part; there are build and wheel" >&2
      exit 2
      ;;
  esac
done
