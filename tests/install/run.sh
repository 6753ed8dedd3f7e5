#!/usr/bin/env bash
# Installs a build into a temporary prefix, moves the prefix, and builds and runs programs against it: in C++, C and Rust,
# found by CMake and by pkg-config; and builds some from flashjit's sources, by FetchContent. Usage: run.sh BUILD_DIR
set -euo pipefail

build=$(cd "$1" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build" --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/prefix"  # an installed tree must not remember where it was built or put

links_lead_somewhere() { # of the installed pages
  local page target failed=0
  while IFS= read -r page; do
    while IFS= read -r target; do
      case $target in [a-z]*:*) continue ;; esac
      [ -e "${page%/*}/$target" ] || { echo "$page links to $target, which is not installed" >&2 && failed=1; }
    done < <(awk '/^ *```/ { code = !code } !code' "$page" | grep -oE '\]\([^)# ]+' | cut -c3-)
  done < <(find "$scratch/prefix/share/doc" -name '*.md')
  return $failed
}
links_lead_somewhere

export FLASHJIT_CACHE_DIR=$scratch/cache
pack=ON code=0
"$scratch/prefix/bin/flashjit" pack --spec fwd:fp32:d8 --arch sm_80 --out "$scratch/pack" >/dev/null 2>&1 || code=$?
if [ $code = 3 ]; then
  echo "no NVRTC here: packs are not tested"
  pack=OFF
fi

printf '%s\n' '# spec [shape]' 'fwd:fp32:d8' 'fwd:fp32:d16 b1:hq1:hkv1:sq64:skv64' >"$scratch/suite.txt"
cmake -S "$here" -B "$scratch/build" -G Ninja -DCMAKE_PREFIX_PATH="$scratch/prefix" -DWITH_PACK=$pack \
  -DSUITE="$scratch/suite.txt" >/dev/null
cmake --build "$scratch/build"
"$scratch/build/use_cpp"
"$scratch/build/use_c"
"$scratch/build/use_static"
if [ $pack = ON ]; then
  "$scratch/build/programs/use_pack"
  "$scratch/build/use_embedded_pack"

  "$scratch/build/use_suite"
  suite_holds() { # SPEC...: the pack of the suite, for each of both architectures
    local found wanted
    found=$("$scratch/prefix/bin/flashjit" cache list --dir "$scratch/build/use_suite-pack" --json |
      sed -n 's/.*"spec": "\(.*\)".*/\1/p' | sort)
    wanted=$(printf '%s\n' "$@" "$@" | sort)
    [ "$found" = "$wanted" ] || { echo "the pack of the suite holds: $found" >&2 && exit 1; }
  }
  suite_holds fwd:fp16:d8 fwd:fp32:d8 fwd:fp32:d16
  echo 'fwd:fp32:d24' >>"$scratch/suite.txt" # after which the pack is made anew
  cmake --build "$scratch/build" >/dev/null
  suite_holds fwd:fp16:d8 fwd:fp32:d8 fwd:fp32:d16 fwd:fp32:d24
fi

refuses() { # WORDS ARGUMENTS...: with these words, flashjit_add_pack() ends the configuration
  local words=$1 arguments said
  shift
  arguments=$(IFS=';' && echo "$*")
  said=$(cmake -S "$here" -B "$scratch/wrong" -G Ninja -DCMAKE_PREFIX_PATH="$scratch/prefix" -DWITH_PACK=OFF \
    "-DWRONG=$arguments" 2>&1) && echo "flashjit_add_pack($arguments) is not refused" >&2 && exit 1
  tr -s '\n ' ' ' <<<"$said" | grep -qF "$words" || { echo "$said" >&2 && exit 1; }
}
refuses "there is no target 'nothing'" nothing SPECS fwd:fp32:d8 ARCHS sm_80
refuses "needs ARCHS" use_cpp SPECS fwd:fp32:d8
refuses "or a SUITE" use_cpp ARCHS sm_80
refuses "unknown: SUITES" use_cpp SUITES suite.txt SPECS fwd:fp32:d8 ARCHS sm_80

# The examples, as a project of their own. Without a GPU each says so and is skipped.
cuda=$(sed -n 's/^FLASHJIT_CUDA_\(INCLUDE\|HEADERS\):[A-Z]*=\(.\)/\2/p' "$build/CMakeCache.txt" | head -n 1)
cmake -S "$here/../../tools/examples" -B "$scratch/examples" -G Ninja -DCMAKE_PREFIX_PATH="$scratch/prefix" \
  -DFLASHJIT_CUDA_INCLUDE="$cuda" -DEXAMPLE_OF_A_PACK=$pack >/dev/null
cmake --build "$scratch/examples" >/dev/null
ctest --test-dir "$scratch/examples" --output-on-failure

# flashjit's sources within another project, by FetchContent.
unity=$(sed -n 's/^FLASHJIT_UNITY:BOOL=//p' "$build/CMakeCache.txt")
REUSE=$build cmake -S "$here/fetch" -B "$scratch/fetch" -G Ninja -DFLASHJIT_SOURCE="$here/../.." -DFLASHJIT_CUDA_INCLUDE="$cuda" \
  -DFLASHJIT_UNITY="$unity" -DCMAKE_CXX_COMPILER_LAUNCHER="$here/reuse.sh" >/dev/null
REUSE=$build cmake --build "$scratch/fetch" >/dev/null
"$scratch/fetch/fetch_cpp" >/dev/null
"$scratch/fetch/fetch_c" >/dev/null

pc=$(find "$scratch/prefix" -name flashjit.pc)
export PKG_CONFIG_PATH=${pc%/*}
read -ra flags <<<"$(pkg-config --cflags --libs flashjit)"
library_dir=$(pkg-config --variable=libdir flashjit)
g++ -std=c++20 "$here/use_cpp.cpp" "${flags[@]}" -o "$scratch/pc_cpp"
gcc -std=c11 "$here/use_c.c" "${flags[@]}" -o "$scratch/pc_c"
LD_LIBRARY_PATH=$library_dir "$scratch/pc_cpp"
LD_LIBRARY_PATH=$library_dir "$scratch/pc_c"
read -ra flags <<<"$(pkg-config --static --cflags --libs flashjit)"
g++ -std=c++20 "$here/use_cpp.cpp" "${flags[@]/-lflashjit/-l:libflashjit.a}" -o "$scratch/pc_static"
"$scratch/pc_static"

# The packages of other package managers: their versions, and the Rust crate, which finds the library by pkg-config.
version=$(LD_LIBRARY_PATH=$library_dir "$scratch/pc_c" | sed -n 's/^flashjit //p')
packaging=$here/../../tools/packaging
grep -qF "\"version\": \"$version\"" "$packaging/vcpkg/flashjit/vcpkg.json" || { echo "vcpkg.json is not of version $version" >&2 && exit 1; }
grep -qFx "version = \"$version\"" "$packaging/rust/Cargo.toml" || { echo "Cargo.toml is not of version $version" >&2 && exit 1; }
if cargo --version >/dev/null 2>&1; then
  cp -r "$packaging/rust" "$scratch/rust"
  run_example() { cargo run --offline --quiet --manifest-path "$scratch/rust/Cargo.toml" --target-dir "$scratch/rust/target" --example "$1"; }
  run_example attention | grep -F "causal attention: the same"
  run_example serving | grep -F "a paged cache: the same"
else
  echo "no cargo here: the Rust crate is not tested"
fi

"$scratch/prefix/bin/flashjit" --help >/dev/null
echo "installed, found and run from C++ and C, by CMake and by pkg-config"
