#!/usr/bin/env bash
# Builds the unit tests with sanitizers and runs them:
#   tests/sanitize.sh [address] [thread]     both by default; the builds lie in build-asan and build-tsan
# CMAKE_ARGS are more words for CMake, TESTS is a filter of tests. Some minutes each, most of them the crash tests'.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# A forked child of a process with threads is no mistake here.
export TSAN_OPTIONS=die_after_fork=0

run() {  # FOLDER SANITIZERS
  local build=$root/$1
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -g1" \
    -DFLASHJIT_SANITIZE="$2" ${CMAKE_ARGS:-} >/dev/null
  cmake --build "$build" --target flashjit_unit_tests >"$build/build.log" || { tail -20 "$build/build.log"; exit 1; }
  "$build/tests/flashjit_unit_tests" --gtest_brief=1 --gtest_filter="${TESTS:-*}" 2>&1 | tee "$build/tests.log" |
    grep -E "SUMMARY|FAILED|ran\.|PASSED" | sed "s/^/$2: /"
}

[ $# -gt 0 ] || set -- address thread
for kind in "$@"; do
  case $kind in
    address) run build-asan address,undefined ;;
    thread) run build-tsan thread ;;
    *) echo "'$kind' is neither address nor thread" >&2; exit 2 ;;
  esac
done
