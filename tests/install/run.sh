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

export FLASHJIT_CACHE_DIR=$scratch/cache
pack=ON code=0
"$scratch/prefix/bin/flashjit" pack --spec fwd:fp32:d8 --arch sm_80 --out "$scratch/pack" >/dev/null 2>&1 || code=$?
if [ $code = 3 ]; then
  echo "no NVRTC here: packs are not tested"
  pack=OFF
fi

cmake -S "$here" -B "$scratch/build" -G Ninja -DCMAKE_PREFIX_PATH="$scratch/prefix" -DWITH_PACK=$pack >/dev/null
cmake --build "$scratch/build"
"$scratch/build/use_cpp"
"$scratch/build/use_c"
"$scratch/build/use_static"
if [ $pack = ON ]; then
  "$scratch/build/programs/use_pack"
  "$scratch/build/use_embedded_pack"
fi

# The examples, as a project of their own. Without a GPU each says so and is skipped.
cuda=$(sed -n 's/^FLASHJIT_CUDA_\(INCLUDE\|HEADERS\):[A-Z]*=\(.\)/\2/p' "$build/CMakeCache.txt" | head -n 1)
cmake -S "$here/../../tools/examples" -B "$scratch/examples" -G Ninja -DCMAKE_PREFIX_PATH="$scratch/prefix" \
  -DFLASHJIT_CUDA_INCLUDE="$cuda" -DEXAMPLE_OF_A_PACK=$pack >/dev/null
cmake --build "$scratch/examples" >/dev/null
ctest --test-dir "$scratch/examples" --output-on-failure

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

"$scratch/prefix/bin/flashjit" --help >/dev/null
echo "installed, found and run from C++ and C, by CMake and by pkg-config"
