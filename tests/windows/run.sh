#!/usr/bin/env bash
# Builds flashjit for Windows with MinGW-w64 and tries all of it under wine: the seam, the C header, the command, the store under racing
# and killed processes, kernels of every family by NVRTC's own DLL, and a pack that must equal one made on Linux. Minutes; by hand.
#   run.sh BUILD_DIR     exit code 77 where MinGW-w64 or wine is missing; BUILD_DIR/tools/flashjit is Linux's command
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
linux=$(cd "$1" && pwd)
source "$root/tests/windows/wine.sh" "$linux"
need x86_64-w64-mingw32-g++-posix

"$root/tests/windows/seam.sh" "$linux"
"$root/tools/packaging/windows.sh" "$linux" build

# NVRTC's DLL, of the version that Linux's command has.
nvrtc=$work/nvrtc
if [ ! -e "$nvrtc/nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll" ]; then
  python3 -m pip download -q --disable-pip-version-check --no-deps --platform win_amd64 --only-binary=:all: -d "$nvrtc" nvidia-cuda-nvrtc==13.0.88
  python3 -m zipfile -e "$nvrtc"/*.whl "$nvrtc"
fi
python3 "$root/tests/windows/try.py" "$work" "$linux"
