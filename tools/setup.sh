#!/usr/bin/env bash
# Prepares a fresh Debian 12 or Ubuntu 24.04 for building flashjit: installs the system packages that are missing and
# finds CUDA's headers and NVRTC, in a toolkit or, where there is none, from PyPI into build/cuda.
#
# Sourced by quickstart.sh and test.sh, which then call `configure`; run by itself it only prepares.
#   FLASHJIT_NO_TOOLKIT=1       pass over an installed CUDA toolkit
#   FLASHJIT_CUDA_MAJOR=12      fetch CUDA 12 (for drivers older than 580) instead of 13
#   FLASHJIT_CUDA_VERSION=12.4  fetch the newest of this version
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build

say() { printf '== %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# --- System packages -------------------------------------------------------------------------------------------------

has_header() { echo "#include <$1>" | g++ -E -x c++ -o /dev/null - 2>/dev/null; }

# One line a missing package. What is there counts, not how it was installed.
missing_packages() {
  command -v g++ >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  command -v pkg-config >/dev/null || echo pkg-config
  has_header fmt/format.h || echo libfmt-dev
  has_header nlohmann/json.hpp || echo nlohmann-json3-dev
  has_header CLI/CLI.hpp || echo libcli11-dev
  has_header xxhash.h || echo libxxhash-dev
  has_header gtest/gtest.h || echo libgtest-dev
  has_header benchmark/benchmark.h || echo libbenchmark-dev
  python3 -c 'import ensurepip' 2>/dev/null || echo python3-venv
  [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null)/Python.h" ] || echo python3-dev
}

install_packages() {
  [ $# -gt 0 ] || return 0
  command -v apt-get >/dev/null || fail "these packages (Debian's names) are missing: $*; install them and start again"
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || fail "these packages are missing: $*; run this as root, or install sudo"
    as_root=(sudo)
  fi
  say "installing $*"
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

# --- CUDA: headers and NVRTC -----------------------------------------------------------------------------------------

# The libnvrtc of a CUDA folder; empty when there is none that flashjit can use.
nvrtc_in() {
  local library
  for library in "$1"/lib64/libnvrtc.so.1[23] "$1"/lib/libnvrtc.so.1[23]; do
    if [ -e "$library" ]; then
      echo "$library"
      return
    fi
  done
}

# 12.1 is the oldest whose kernels compile.
is_cuda() {
  [ -e "$1/include/cuda.h" ] && [ -e "$1/include/nvrtc.h" ] && [ -n "$(nvrtc_in "$1")" ] &&
    grep -qE '^#define CUDA_VERSION (120[1-9]|12[1-9]|1[3-9])' "$1/include/cuda.h"
}

# The first usable toolkit; empty when there is none.
find_toolkit() {
  local folder
  [ -z "${FLASHJIT_NO_TOOLKIT:-}" ] || return 0
  for folder in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /usr/local/cuda-1[23]*; do
    if [ -n "$folder" ] && is_cuda "$folder"; then
      echo "$folder"
      return
    fi
  done
}

# What to fetch: 13, or 12 where the installed driver is too old for 13.
cuda_major() {
  local driver
  local asked=${FLASHJIT_CUDA_VERSION:-${FLASHJIT_CUDA_MAJOR:-}}
  if [ -n "$asked" ]; then
    echo "${asked%%.*}"
    return
  fi
  driver=$(sed -n 's/^NVRM version:.* \([0-9]\{3,\}\)\.[0-9.]* .*/\1/p' /proc/driver/nvidia/version 2>/dev/null || true)
  if [ -n "$driver" ] && [ "$driver" -lt 580 ]; then echo 12; else echo 13; fi
}

# Downloads NVIDIA's wheels of CUDA $2 and keeps what is needed as a small toolkit: $1/include and $1/lib.
fetch_cuda() {
  local target=$1 wheels python=python3
  case $2 in
    13) wheels=(nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96) ;;
    12) wheels=(nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79) ;;
    *) fail "FLASHJIT_CUDA_MAJOR is '$major'; it may be 12 or 13" ;;
  esac
  [ -z "${FLASHJIT_CUDA_VERSION:-}" ] || wheels=("${wheels[@]/==*/==$FLASHJIT_CUDA_VERSION.*}")
  "$python" -m pip --version >/dev/null 2>&1 || install_packages python3-pip
  "$python" -m pip --version >/dev/null 2>&1 || python=/usr/bin/python3

  say "no CUDA toolkit here: fetching ${wheels[*]} from PyPI (about 90 MB)"
  local scratch=$target.tmp wheel
  rm -rf "$scratch"
  mkdir -p "$scratch/include" "$scratch/lib"
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$scratch/wheels" \
    "${wheels[@]}" || fail "the download failed; allow access to pypi.org, or install a CUDA toolkit (12.1 or newer) and set CUDA_HOME"
  for wheel in "$scratch"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$scratch/unpacked"; done
  find "$scratch/unpacked" -name __init__.py -delete # which wheels of old versions all have
  mv "$scratch"/unpacked/nvidia/*/include/* "$scratch/include/"
  mv "$scratch"/unpacked/nvidia/*/lib/libnvrtc{,-builtins}.so.* "$scratch/lib/"
  rm -rf "$scratch/wheels" "$scratch/unpacked" "$target"
  mv "$scratch" "$target"
  is_cuda "$target" || fail "${wheels[*]} did not bring cuda.h, nvrtc.h and libnvrtc into $target"
}

# --- What the scripts call -------------------------------------------------------------------------------------------

setup() {
  local missing major
  mapfile -t missing < <(missing_packages)
  install_packages "${missing[@]}"

  cuda=$(find_toolkit)
  if [ -z "$cuda" ]; then
    cuda=$build/cuda
    major=$(cuda_major)
    [ -e "$cuda/lib/libnvrtc.so.$major" ] || fetch_cuda "$cuda" "$major"
  fi
  export FLASHJIT_NVRTC=${FLASHJIT_NVRTC:-$(nvrtc_in "$cuda")}
  say "CUDA headers: $cuda/include; NVRTC: $FLASHJIT_NVRTC"
}

configure() {
  local options=()
  [ -e "$build/CMakeCache.txt" ] || options+=(-DFLASHJIT_UNITY=ON) # a folder that was configured otherwise stays as it is
  command -v ccache >/dev/null && options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_C_COMPILER_LAUNCHER=ccache)
  say "configuring $build (Release)"
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFLASHJIT_CUDA_INCLUDE="$cuda/include" "${options[@]}"
}

setup
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  say "ready; where flashjit does not find NVRTC by itself: export FLASHJIT_NVRTC=$FLASHJIT_NVRTC"
fi
