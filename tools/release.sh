#!/usr/bin/env bash
# Makes a release from a clean clone, in build/release/out: wheels, source distribution and archive, Debian package, SBOM, checksums.
# The same commit with the same system packages gives the same bytes.
#   tools/release.sh                    everything
#   tools/release.sh PART...            of source, sdist, wheel-x86_64, wheel-aarch64, deb, sums, try, in this order
#   tools/release.sh --twice [PART...]  in two clones in different folders, and compares
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

parts=(source sdist wheel-x86_64 wheel-aarch64 deb sums try)
glibc=28 # 2.28: manylinux_2_28
from_pypi=(ziglang==0.17.1 setuptools==80.9.0 wheel==0.45.1)
jaxlib=jaxlib==0.10.0 # the oldest that flashjit.jax runs with: XLA keeps its FFI compatible
work=$build/release
out=$work/out
version=$(sed -n 's/^project(flashjit VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct)
export SOURCE_DATE_EPOCH TZ=UTC LC_ALL=C
umask 022

python() { "$work/python/bin/python" "$@"; }
packaging() { python "$root/tools/packaging/release.py" "$@"; }

# What compiles and packs, from PyPI.
prepare() {
  mkdir -p "$out"
  [ "$(cat "$work/python/ready" 2>/dev/null)" != "${from_pypi[*]} $jaxlib" ] || return 0
  say "fetching ${from_pypi[*]}, and headers of $jaxlib"
  python3 -m venv --clear "$work/python"
  python -m pip install -q --disable-pip-version-check --no-compile "${from_pypi[@]}"
  python -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --platform manylinux_2_27_x86_64 \
    --python-version 3.12 -d "$work/jaxlib" "$jaxlib"
  packaging jax-headers "$work/jaxlib" "$work/jax-headers"
  echo "${from_pypi[*]} $jaxlib" >"$work/python/ready"
}

# zig's clang for an old glibc, with libc++ within the library, as four commands that CMake takes.
compilers() { # ARCH
  local folder=$work/zig-$1 tool
  mkdir -p "$folder"
  for tool in cc c++ ar ranlib; do
    local words="$tool"
    [[ $tool = c* ]] && words="$tool -target $1-linux-gnu.2.$glibc"
    printf '#!/bin/sh\nexec "%s" -m ziglang %s "$@"\n' "$work/python/bin/python" "$words" >"$folder/$tool"
    chmod +x "$folder/$tool"
  done
  export ZIG_GLOBAL_CACHE_DIR=${ZIG_GLOBAL_CACHE_DIR:-$work/zig-cache} ZIG_LOCAL_CACHE_DIR=$work/zig-cache
}

build_for() { # ARCH TARGET...: in $work/ARCH
  local arch=$1 zig=$work/zig-$1
  shift
  compilers "$arch"
  packaging headers "$work/headers"
  cmake -S "$root" -B "$work/$arch" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFLASHJIT_TESTS=OFF -DFLASHJIT_UNITY=ON \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR="$arch" -DCMAKE_C_COMPILER="$zig/cc" -DCMAKE_CXX_COMPILER="$zig/c++" \
    -DCMAKE_AR="$zig/ar" -DCMAKE_RANLIB="$zig/ranlib" -DCMAKE_CXX_FLAGS="-g0 -ffile-prefix-map=$root=." \
    -DCMAKE_SHARED_LINKER_FLAGS=-s -DCMAKE_MODULE_LINKER_FLAGS=-s -DCMAKE_EXE_LINKER_FLAGS=-s \
    -Dfmt_DIR="$work/headers/cmake" -Dnlohmann_json_DIR="$work/headers/cmake" -DCLI11_DIR="$work/headers/cmake" -DXXHASH_INCLUDE="$work/headers" \
    -DFLASHJIT_JAX_INCLUDE="$work/jax-headers" -DFLASHJIT_CUDA_INCLUDE="$cuda/include" >"$work/$arch.log"
  cmake --build "$work/$arch" --target "$@"
}

make_wheel() { # ARCH
  build_for "$1" flashjit flashjit_command flashjit_jax
  mkdir -p "$work/native-$1"
  cp -L "$work/$1/libflashjit.so" "$work/$1/tools/flashjit" "$work/$1/libflashjit_jax.so" "$work/native-$1"
  FLASHJIT_NATIVE=$work/native-$1 _PYTHON_HOST_PLATFORM=linux-$1 python -m pip wheel -q --disable-pip-version-check --no-deps \
    --no-build-isolation -w "$work/wheel-$1" "$root/tools/python"
  packaging check-wheel "$work/wheel-$1"/flashjit-"$version"-*_"$1".whl "$glibc" "$1"
  cp "$work/wheel-$1"/flashjit-"$version"-*_"$1".whl "$out"
}

make_deb() {
  cmake -S "$root" -B "$work/deb" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFLASHJIT_TESTS=OFF -DFLASHJIT_UNITY=ON \
    -DCMAKE_INSTALL_PREFIX=/usr -DCMAKE_CXX_FLAGS="-ffile-prefix-map=$root=." -DFLASHJIT_CUDA_INCLUDE="$cuda/include" >"$work/deb.log"
  cmake --build "$work/deb"
  (cd "$work/deb" && cpack -G DEB -B "$out" >>"$work/deb.log")
  rm -rf "$out/_CPack_Packages"
}

# A new environment, whose PATH has no compiler, runs the front page's first lines; without PyTorch, attention of NumPy arrays.
try() {
  local torch
  torch=$("${FLASHJIT_TEST_PYTHON:-python3}" -c 'import torch; print(torch.__path__[0].rpartition("/")[0])' 2>/dev/null || true)
  "${FLASHJIT_TEST_PYTHON:-python3}" -m venv --clear "$work/tried"
  "$work/tried/bin/pip" install -q --disable-pip-version-check --no-compile numpy "$out"/flashjit-*_"$(uname -m)".whl
  (cd "$work/tried" && env -u LD_LIBRARY_PATH PATH="$work/tried/bin" PYTHONPATH="$torch" python "$root/tools/packaging/release.py" try "$root/README.md")
}

make() { # PART
  say "$1"
  case $1 in
    source) git -C "$root" archive --prefix="flashjit-$version/" HEAD | gzip -9n >"$out/flashjit-$version-source.tar.gz" ;;
    sdist)
      (cd "$root/tools/python" && python -c "from setuptools import build_meta; build_meta.build_sdist('$work')" >"$work/sdist.log")
      packaging repack "$work/flashjit-$version.tar.gz" "$out/flashjit-$version.tar.gz"
      ;;
    wheel-x86_64 | wheel-aarch64) make_wheel "${1#wheel-}" ;;
    deb) make_deb ;;
    sums)
      packaging sbom "$version" "$(git -C "$root" rev-parse HEAD)" "$cuda/include" "$out" "${from_pypi[0]}" "$jaxlib"
      (cd "$out" && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS)
      ;;
    try) try ;;
    *) fail "'$1' is no part of a release; there are ${parts[*]}" ;;
  esac
}

twice() {
  local folder
  for folder in first the-second; do
    rm -rf "$work/$folder"
    git clone -q "$root" "$work/$folder"
    "$work/$folder/tools/release.sh" "$@"
  done
  diff -r "$work/first/build/release/out" "$work/the-second/build/release/out" || fail "two releases of one commit differ"
  say "both are the same"
}

[ -z "$(git -C "$root" status --porcelain)" ] || fail "the clone has changes: commit them, or clone again"
if [ "${1:-}" = --twice ]; then
  twice "${@:2}"
  exit
fi
prepare
[ $# -gt 0 ] || set -- "${parts[@]}"
for part; do make "$part"; done
say "in $out:"
ls -l "$out"
