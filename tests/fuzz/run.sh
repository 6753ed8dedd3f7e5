#!/usr/bin/env bash
# Builds the fuzz targets with clang, address and undefined-behaviour sanitizers, and gives each a number of inputs:
#   tests/fuzz/run.sh [INPUTS [FOLDER]]     200000 inputs a parser; the build and what it found lie in build-fuzz
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
inputs=${1:-200000}
build=${2:-$root/build-fuzz}

log=$build/build.log
mkdir -p "$build"
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang -DFLASHJIT_FUZZ=ON \
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -g1" -DFLASHJIT_TOOLS=OFF ${CMAKE_ARGS:-} >"$log"
cmake --build "$build" --target flashjit_fuzzers >>"$log" || { tail -20 "$log"; exit 1; }
"$build/tests/fuzz/flashjit_fuzz_seeds" "$build/corpus"

for fuzzer in "$build"/tests/fuzz/flashjit_fuzz_*; do
  parser=${fuzzer##*flashjit_fuzz_}
  [ "$parser" != seeds ] && [ -x "$fuzzer" ] || continue
  # A seed makes the run repeat where the corpus is the same.
  "$fuzzer" -runs="$inputs" -seed=1 -max_len=4096 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$build/found-$parser-" "$build/corpus/$parser" 2>"$build/fuzz-$parser.log" ||
    { tail -30 "$build/fuzz-$parser.log"; exit 1; }
  awk -v parser="$parser" '/number_of_executed_units/ { print parser ": " $2 " inputs, nothing found" }' \
    "$build/fuzz-$parser.log"
done
