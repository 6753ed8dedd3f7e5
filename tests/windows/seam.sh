#!/usr/bin/env bash
# The seam to Windows: compiles runtime/support/*_windows.cpp with MinGW-w64, and runs what looks at it under wine.
#   seam.sh BUILD_DIR     exit code 77 where MinGW-w64 or wine is missing
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/tests/windows/wine.sh" "$1"
need x86_64-w64-mingw32-g++-posix

# All in one, which compiles several times as fast: every file but the JSON of it has names of its own.
mkdir -p "$work/include"
rm -rf "$work/include/fmt" && cp -r /usr/include/fmt "$work/include/" # without the rest, which is Linux's
for file in fmt error text environment file "$root"/runtime/support/*_windows.cpp; do
  file=${file##*/}
  echo "#include \"support/${file%.cpp}.cpp\""
done | { printf '#include <windows.h>\n'; cat; } >"$work/seam_support.cpp"
x86_64-w64-mingw32-g++-posix -std=c++20 -O0 -static -DWIN32_LEAN_AND_MEAN -DNOMINMAX -D_WIN32_WINNT=0x0A00 -DFLASHJIT_STATIC \
  -DFMT_HEADER_ONLY '-DFLASHJIT_VERSION="0"' -I "$work/include" -I "$root/include" -I "$root/runtime" -Wall -Wextra -o "$work/seam.exe" "$work/seam_support.cpp" \
  "$root/tests/windows/seam.cpp" -lbcrypt

rm -rf "$work/seam" && mkdir -p "$work/seam"
wine "$work/seam.exe" "$(windows_path "$work/seam")"

# A lock goes with a process that is killed.
wine "$work/seam.exe" hold "$(windows_path "$work/seam/x.lock")" >"$work/held" &
holder=$!
for _ in $(seq 200); do grep -q held "$work/held" && break || sleep 0.1; done
says() { wine "$work/seam.exe" try "$(windows_path "$work/seam/x.lock")" | tr -d '\r'; }
[ "$(says)" = taken ] || { echo "a lock that another process holds is not taken"; exit 1; }
kill -9 "$holder"
wait "$holder" 2>/dev/null || true
for _ in $(seq 50); do [ "$(says)" = held ] && exit 0 || sleep 0.1; done
echo "the lock of a process that was killed stays"
exit 1
