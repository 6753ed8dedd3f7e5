#!/usr/bin/env bash
# From a clean clone to attention on real data: sets up, builds the flashjit command and runs the main job. With a
# GPU it compiles, launches and checks kernels; without one it computes on the CPU and compiles the same kernels.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

configure
say "building the flashjit command"
cmake --build "$build" --target flashjit_command

say "the main job: attention layers of a real transformer"
"$build/tools/flashjit" job --data "$root/tests/data"
if [ "$cuda" = "$build/cuda" ]; then
  say "for programs that you start yourself, as there is no CUDA toolkit: export FLASHJIT_NVRTC=$build/cuda/lib"
fi
say "done; a second run finds everything in the cache. Next: $build/tools/flashjit --help"
