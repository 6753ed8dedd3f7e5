# Sourced with the build folder: `work`, a wine of its own there, and paths as Windows has them.
work=$1/windows
mkdir -p "$work"
work=$(cd "$work" && pwd)
export WINEPREFIX=$work/wine WINEDEBUG=-all WINEARCH=win64 WINEDLLOVERRIDES="mscoree,mshtml="
unset DISPLAY

need() {
  command -v "$1" >/dev/null && return
  echo "skipped: $1 is missing (Debian's packages g++-mingw-w64-x86-64-posix and wine64, wine)"
  exit 77
}
windows_path() { printf 'Z:%s' "${1//\//\\}"; }

need wine
[ -e "$WINEPREFIX/system.reg" ] || wine wineboot -i >/dev/null 2>&1 || true
