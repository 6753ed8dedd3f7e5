#!/usr/bin/env bash
# Public headers for compilers that nobody here has, MSVC above all: each alone, and in one file for every compiler that is there,
# in C++ and where it is C in C, with extensions as errors and without alternative tokens; and for Windows behind a windows.h that has
# its macros min, max and what else it defines.
#   headers.sh BUILD_DIR     exit code 77 where there is no compiler but the build's own
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(cd "$1" && pwd)/windows_headers
mkdir -p "$work"
cd "$root/include"

strict=(-fsyntax-only -I. -Wall -Wextra -Werror -pedantic-errors)
cxx() { # compiler, more options and a file
  "$1" -std=c++20 "${strict[@]}" -fno-operator-names "${@:2}"
}

# Microsoft's windows.h has these macros, MinGW's has not, and libstdc++ takes them away.
before="#include <windows.h>
$(grep -hE '^#include <' flashjit/*.hpp flashjit/*.h | sort -u)
#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))"

failed=0
tried=0
check() { "$@" || { failed=1; echo "failed: $*"; }; }
all=$work/all.cpp
: >"$all"
for header in flashjit/*.h flashjit/*.hpp; do
  [ "$header" != flashjit/windows_export.h ] || continue # types.h includes it on Windows
  name=${header//[\/.]/_}
  printf '#include "%s"\n' "$header" | tee "$work/$name.cpp" >>"$all"
  check cxx g++ "$work/$name.cpp"
done
if command -v clang++ >/dev/null; then
  tried=1
  check cxx clang++ -Wgnu -Wmicrosoft -Wreorder-init-list -Wnon-virtual-dtor "$all"
fi
if command -v x86_64-w64-mingw32-g++-posix >/dev/null; then
  tried=1
  { echo "$before"; cat "$all"; } >"$work/windows.cpp"
  check cxx x86_64-w64-mingw32-g++-posix "$work/windows.cpp"
fi
for header in flashjit/*.h; do
  [ "$header" != flashjit/windows_export.h ] || continue
  name=${header//[\/.]/_}
  printf '#include "%s"\n' "$header" >"$work/$name.c"
  for compiler in gcc clang; do
    ! command -v "$compiler" >/dev/null || check "$compiler" -std=c11 "${strict[@]}" "$work/$name.c"
  done
done
[ "$failed" = 0 ] || exit 1
[ "$tried" = 1 ] || { echo "skipped: neither clang nor MinGW-w64 is here (Debian's packages clang and g++-mingw-w64-x86-64-posix)"; exit 77; }
