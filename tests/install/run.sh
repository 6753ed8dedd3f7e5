#!/usr/bin/env bash
# Installs a build into a temporary prefix, moves the prefix, and builds and runs programs against it: in C++ and C,
# found by CMake and by pkg-config. Usage: run.sh BUILD_DIR
set -euo pipefail

build=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build" --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/prefix"  # an installed tree must not remember where it was built or put

cmake -S "$here" -B "$scratch/build" -G Ninja -DCMAKE_PREFIX_PATH="$scratch/prefix" >/dev/null
cmake --build "$scratch/build"
"$scratch/build/use_cpp"
"$scratch/build/use_c"

pc=$(find "$scratch/prefix" -name flashjit.pc)
export PKG_CONFIG_PATH=${pc%/*}
read -ra flags <<<"$(pkg-config --cflags --libs flashjit)"
library_dir=$(pkg-config --variable=libdir flashjit)
g++ -std=c++20 "$here/use_cpp.cpp" "${flags[@]}" -o "$scratch/pc_cpp"
gcc -std=c11 "$here/use_c.c" "${flags[@]}" -o "$scratch/pc_c"
LD_LIBRARY_PATH=$library_dir "$scratch/pc_cpp"
LD_LIBRARY_PATH=$library_dir "$scratch/pc_c"

"$scratch/prefix/bin/flashjit" --help >/dev/null
echo "installed, found and run from C++ and C, by CMake and by pkg-config"
