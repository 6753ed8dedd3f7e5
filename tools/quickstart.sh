#!/usr/bin/env bash
# From a clean clone to attention on real data: sets up, builds the flashjit command, and computes attention of a real
# transformer, dense and block-sparse. With a GPU it compiles, launches and checks kernels; without one it computes on
# the CPU and compiles the same kernels into a pack.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

configure
say "building the flashjit command: three minutes of CPU time, on all cores"
cmake --build "$build" --target flashjit_command

flashjit=$build/tools/flashjit
specs=(bf16:d32 bf16:d32:map32x32)
verify() {
  for spec in "${specs[@]}"; do
    "$flashjit" verify --spec "$spec" --data "$root/tests/data" "$@" || return
  done
}
say "attention layers of a real transformer against the fp64 reference"
status=0
verify || status=$?
if [ $status = 3 ]; then # no GPU, or no NVRTC, without which packing fails, too
  say "on the CPU: errors of a computation in bf16, and the limits of the GPU's kernels"
  verify --cpu
  say "the same kernels, compiled for shipping: FLASHJIT_PACKS=$build/quickstart-pack uses them on a GPU"
  "$flashjit" pack --arch sm_80,sm_90a --out "$build/quickstart-pack" $(printf -- '--spec %s ' "${specs[@]}") \
    --shape b1:hq12:hkv12:sq180:skv180
elif [ $status != 0 ]; then
  exit $status
fi
if [ "$cuda" = "$build/cuda" ]; then
  say "for programs that you start yourself, as there is no CUDA toolkit: export FLASHJIT_NVRTC=$build/cuda/lib"
fi
say "done; a second run finds everything in the cache. Next: $flashjit --help"
