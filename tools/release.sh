#!/usr/bin/env bash
# Makes a release from a clean clone, in build/release/out: wheels, source distribution and archive, Debian package, SBOM, checksums;
# and tries it where there are no compilers. The same commit with the same system packages gives the same bytes.
#   tools/release.sh                    everything
#   tools/release.sh PART...            the parts below, in their order
#   tools/release.sh --twice [PART...]  in two clones in different folders, and compares
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

made=(source sdist wheel-x86_64 wheel-aarch64 kernels-sm80 kernels-sm89 kernels-sm90 deb sums)
tried=(try try-aarch64 try-bookworm try-trixie)
parts=("${made[@]}" "${tried[@]}")
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
    [[ $tool = c* ]] && words="$tool -s -target $1-linux-gnu.2.$glibc" # -s always: zig builds a libc++ for with and without
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
  packaging python-headers "$work/python-headers"
  cmake -S "$root" -B "$work/$arch" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFLASHJIT_TESTS=OFF -DFLASHJIT_UNITY=ON \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR="$arch" -DCMAKE_C_COMPILER="$zig/cc" -DCMAKE_CXX_COMPILER="$zig/c++" \
    -DCMAKE_AR="$zig/ar" -DCMAKE_RANLIB="$zig/ranlib" -DCMAKE_CXX_FLAGS="-g0 -ffile-prefix-map=$root=." \
    -Dfmt_DIR="$work/headers/cmake" -Dnlohmann_json_DIR="$work/headers/cmake" -DCLI11_DIR="$work/headers/cmake" -DXXHASH_INCLUDE="$work/headers" \
    -DFLASHJIT_JAX_INCLUDE="$work/jax-headers" -DFLASHJIT_PYTHON_INCLUDE="$work/python-headers" -DFLASHJIT_CUDA_INCLUDE="$cuda/include" >"$work/$arch.log"
  cmake --build "$work/$arch" --target "$@"
}

make_wheel() { # ARCH
  build_for "$1" flashjit flashjit_command flashjit_jax flashjit_torch
  mkdir -p "$work/native-$1"
  cp -L "$work/$1"/libflashjit{,_jax,_torch}.so "$work/$1/tools/flashjit" "$work/native-$1"
  FLASHJIT_NATIVE=$work/native-$1 FLASHJIT_GLIBC=$glibc _PYTHON_HOST_PLATFORM=linux-$1 python -m pip wheel -q --disable-pip-version-check --no-deps \
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

# A wheel of kernels of common models, by an NVRTC whose kernels drivers from 525 load. Needs no GPU.
make_kernels() { # NAME, such as sm90
  local command=$work/$(uname -m)/tools/flashjit nvrtc=$work/cuda12/lib/libnvrtc.so.12 arch=${1/sm/sm_} models=() line
  [ "$1" != sm90 ] || arch=sm_90a
  [ -x "$command" ] || build_for "$(uname -m)" flashjit_command
  [ -e "$nvrtc" ] || FLASHJIT_CUDA_VERSION= fetch_cuda "$work/cuda12" 12
  while IFS= read -r line; do
    [[ -z $line || $line = \#* ]] || models+=(--model "$line")
  done <"$root/tools/packaging/kernels/models.txt"
  rm -rf "$work/kernels-$1"
  env -u FLASHJIT_PACKS FLASHJIT_CACHE_DIR="$work/no-cache" FLASHJIT_NVRTC="$nvrtc" \
    "$command" pack "${models[@]}" --arch "$arch" --out "$work/kernels-$1" >"$work/kernels-$1.log" 2>&1 ||
    fail "kernels for $arch could not be packed: see $work/kernels-$1.log"
  packaging kernels-wheel "$1" "$version" "$work/kernels-$1" "$root/tools/packaging/kernels/models.txt" "$out"
}

# --- Trying what was made: the front page's first lines; without PyTorch, attention of NumPy arrays ------------------

host_torch() { "${FLASHJIT_TEST_PYTHON:-python3}" -c 'import torch; print(torch.__path__[0].rpartition("/")[0])' 2>/dev/null || true; }

# A new environment, whose PATH has no compiler.
try() {
  "${FLASHJIT_TEST_PYTHON:-python3}" -m venv --clear "$work/tried"
  "$work/tried/bin/pip" install -q --disable-pip-version-check --no-compile numpy "$out"/flashjit-*_"$(uname -m)".whl
  (cd "$work/tried" && env -u LD_LIBRARY_PATH PATH="$work/tried/bin" PYTHONPATH="$(host_torch)" \
    python "$root/tools/packaging/release.py" try "$root/README.md")
}

needs_root() {
  [ "$(id -u)" = 0 ] && return
  say "$1 is left out: it takes root"
  return 1
}

numpy_for() { # PYTHON ARCH FOLDER
  python -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --python-version "$1" \
    --platform "manylinux_2_28_$2" --platform "manylinux_2_17_$2" --platform "manylinux2014_$2" -d "$3" numpy
}

# A new Debian without compilers and network: the wheel with its packs, timed, and the Debian package.
try_debian() { # NAME PYTHON
  local folder=$work/$1 torch=
  needs_root "try-$1" || return 0
  command -v debootstrap >/dev/null || install_packages debootstrap
  if [ ! -e "$folder/ready" ]; then
    rm -rf "$folder"
    debootstrap --variant=minbase --include=python3-venv "$1" "$folder" >"$work/$1.log" || fail "see $work/$1.log"
    touch "$folder/ready"
  fi
  rm -rf "$folder/try"
  mkdir "$folder/try" "$folder/try/host-packages"
  cp "$out"/flashjit-*_"$(uname -m)".whl "$out"/flashjit_kernels_*.whl "$out"/*.deb "$folder/try"
  cp "$root/README.md" "$root/tools/packaging/release.py" "$root/tools/packaging/try_debian.sh" "$folder/try"
  numpy_for "$2" "$(uname -m)" "$folder/try"
  if [ "$("${FLASHJIT_TEST_PYTHON:-python3}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "$2" ]; then torch=$(host_torch); fi
  # In a mount namespace of its own, so that nothing stays mounted.
  unshare -m sh -c 'mount -t proc proc "$0/proc"; [ -z "$1" ] || mount --bind "$1" "$0/try/host-packages"; exec chroot "$0" env -i sh /try/try_debian.sh' \
    "$folder" "$torch"
}

# The other architecture's wheel, by qemu; what Debian's packages hold is enough to run its Python.
try_aarch64() {
  local folder=$work/arm64 deb wheel
  needs_root try-aarch64 || return 0
  command -v debootstrap >/dev/null || install_packages debootstrap
  command -v qemu-aarch64-static >/dev/null || install_packages qemu-user-static
  if [ ! -e "$folder/ready" ]; then
    rm -rf "$folder"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3 bookworm "$folder" >"$work/arm64.log" || fail "see $work/arm64.log"
    for deb in "$folder"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$deb" "$folder"; done
    numpy_for 3.11 aarch64 "$folder/numpy"
    touch "$folder/ready"
  fi
  rm -rf "$folder/try"
  for wheel in "$folder"/numpy/*.whl "$out"/flashjit-*_aarch64.whl; do python -m zipfile -e "$wheel" "$folder/try"; done
  env -i PATH="$folder/try" PYTHONPATH="$folder/try" "$(command -v qemu-aarch64-static)" -L "$folder" "$folder/usr/bin/python3.11" \
    "$root/tools/packaging/release.py" try "$root/README.md"
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
    kernels-*) make_kernels "${1#kernels-}" ;;
    try) try ;;
    try-aarch64) try_aarch64 ;;
    try-bookworm) try_debian bookworm 3.11 ;;
    try-trixie) try_debian trixie 3.13 ;;
    *) fail "'$1' is no part of a release; there are ${parts[*]}" ;;
  esac
}

twice() {
  local folder
  [ $# -gt 0 ] || set -- "${made[@]}"
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
