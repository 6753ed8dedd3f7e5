#!/usr/bin/env bash
# Sets up, builds everything and runs every test. GPU tests skip themselves where there is no GPU. What failed comes again
# at the end, with its last lines; then "N passed, N failed, N skipped". The exit code is 0 only if nothing failed.
#   tools/test.sh -L unit        only the tests with this label
#   FLASHJIT_EVERY_KERNEL=1 tools/test.sh    all kernels and cases, of which else a part is drawn: an hour more
#   tools/test.sh --sanitizers   first the unit tests under sanitizers and the parsers under libFuzzer (clang): an hour more
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# For one test; without it the others run.
command -v doxygen >/dev/null || (install_packages doxygen) || say "Doxygen is missing: its test is left out"

chosen=()
if [ "${1:-}" = --sanitizers ]; then
  export CMAKE_ARGS="-DFLASHJIT_CUDA_INCLUDE=$cuda/include"
  say "the unit tests under sanitizers"
  "$root/tests/sanitize.sh"
  say "the parsers under libFuzzer"
  "$root/tests/fuzz/run.sh"
elif [ "${1:-}" = -L ] && [ $# = 2 ]; then
  chosen=("$@")
elif [ $# -gt 0 ]; then
  fail "'$*' is no option of tools/test.sh; it has -L LABEL and --sanitizers"
fi

configure
say "building everything"
cmake --build "$build"

# The tests keep their kernels to themselves: a user's cache neither helps them nor is touched.
export FLASHJIT_CACHE_DIR=$build/test-cache
rm -rf "$FLASHJIT_CACHE_DIR" "$build/tests.xml"

say "testing; what each test printed is in $build/Testing/Temporary/LastTest.log"
status=0
ctest --test-dir "$build" --parallel "$(nproc)" --output-on-failure --output-junit "$build/tests.xml" "${chosen[@]}" || status=$?

failures() { # of the whole run, with their last lines: at the end, where a log that was cut still has them
  [ -e "$build/tests.xml" ] || return 0
  python3 - "$build/tests.xml" <<'END' || say "$build/tests.xml cannot be read"
import sys
import xml.etree.ElementTree as tree

for case in tree.parse(sys.argv[1]).iter("testcase"):
    for failure in case.findall("failure"):
        print(f"== {case.get('name')}, after {case.get('time')} s")
        print("\n".join((case.findtext("system-out") or "it printed nothing").splitlines()[-20:]))
END
}
failures

count() { # ATTRIBUTE: of the whole run; 0 where ctest wrote nothing
  local value
  value=$(sed -n "s/^[[:space:]]*$1=\"\([0-9]*\)\".*/\1/p" "$build/tests.xml" | head -n 1)
  echo "${value:-0}"
}
failed=$(count failures) skipped=$(count skipped)
passed=$(($(count tests) - failed - skipped))
[ "$status" = 0 ] || [ "$failed" != 0 ] || failed=1 # a test that could not be started is "not run" to ctest
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
