#!/usr/bin/env bash
# How sources are written, by tools of pinned versions:
#   run.sh BUILD_DIR install    makes the environment of the tools
#   run.sh BUILD_DIR format     C++ and CUDA, by clang-format
#   run.sh BUILD_DIR python     Python, by ruff
#   run.sh BUILD_DIR tidy       changed C++, by clang-tidy; FLASHJIT_TIDY=all: all of it, in five minutes
#   run.sh BUILD_DIR types      the Python package, by mypy
#   run.sh BUILD_DIR spelling   of everything, by codespell
#   run.sh BUILD_DIR subjects   of commits: at most 72 characters, no full stop
#   run.sh BUILD_DIR numbers    see numbers.py
# Exit code 77: skipped; PyPI cannot be reached, or there is no git history.
set -euo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
environment=$build/style
tools=(clang-format==14.0.6 clang-tidy==22.1.8 ruff==0.17.6 mypy==2.4.1 codespell==2.4.3)
names=dout,kown,ot,nd,widnow # names, and a typing error that a page shows
cd "$root"
skip() {
  echo "skipped: $*"
  exit 77
}
# The last commit whose subject was written before there was this rule.
first_ruled=80a20bb

# Files that clang-tidy reads, at three seconds each: those changed since the main branch of origin, or in the last commit and
# since. Of a large change the first ones.
most_tidied=16
to_tidy() {
  local base
  local -a files=('runtime/*.cpp' 'autotune/*.cpp' 'tools/*.cpp' ':!*_windows.cpp' ':!tools/jax' ':!tools/torch' ':!tools/examples')
  if [ "${FLASHJIT_TIDY:-}" = all ]; then
    git ls-files "${files[@]}"
    return
  fi
  base=$(git merge-base HEAD origin/main 2>/dev/null) || base=$(git rev-parse HEAD)
  [ "$base" != "$(git rev-parse HEAD)" ] || base=$(git rev-parse -q --verify HEAD~1) || return 0
  git diff --name-only --diff-filter=d "$base" -- "${files[@]}" | sed "$((most_tidied + 1)),\$d"
}

case $2 in
  install)
    if [ "$(cat "$environment/ready" 2>/dev/null)" != "${tools[*]}" ]; then
      rm -rf "$environment"
      python3 -m venv "$environment" || skip "python3 -m venv does not work here; install python3-venv"
      "$environment/bin/pip" install -q --disable-pip-version-check --no-compile "${tools[@]}" || skip "PyPI cannot be reached"
      echo "${tools[*]}" >"$environment/ready"
    fi
    ;;
  format)
    [ -e "$environment/ready" ] || skip "there is no environment"
    git ls-files -z '*.cpp' '*.hpp' '*.h' '*.c' '*.cuh' | xargs -0 "$environment/bin/clang-format" --dry-run -Werror
    ;;
  python)
    [ -e "$environment/ready" ] || skip "there is no environment"
    "$environment/bin/ruff" format --check --no-cache .
    "$environment/bin/ruff" check --no-cache .
    ;;
  tidy)
    [ -e "$environment/ready" ] || skip "there is no environment"
    cuda=$(sed -n 's/^FLASHJIT_CUDA_[A-Z]*:PATH=//p' "$build/CMakeCache.txt" | grep -m 1 .) || skip "$build has no CUDA headers"
    to_tidy | xargs -r -P 2 -I '{}' "$environment/bin/clang-tidy" --quiet '{}' -- \
      -std=c++20 -Iinclude -Iruntime -I. -isystem "$cuda" '-DFLASHJIT_VERSION="0"'
    ;;
  types)
    [ -e "$environment/ready" ] || skip "there is no environment"
    "$environment/bin/mypy" --cache-dir "$environment/mypy" --ignore-missing-imports tools/python/flashjit
    ;;
  spelling)
    [ -e "$environment/ready" ] || skip "there is no environment"
    git ls-files -z | grep -zvE '\.(png|csv|npy|bin)$' | xargs -0 "$environment/bin/codespell" --ignore-words-list="$names"
    ;;
  subjects)
    git rev-parse -q --verify "$first_ruled^{commit}" >/dev/null || skip "there is no history"
    git log --no-merges --format=%s "$first_ruled..HEAD" | awk '
      length > 72 || /\.$/ { print "rewrite this subject: " $0; wrong = 1 }
      END { exit wrong }'
    ;;
  numbers) python3 tests/style/numbers.py ;;
  *) echo "run.sh: no check is called $2" >&2; exit 2 ;;
esac
