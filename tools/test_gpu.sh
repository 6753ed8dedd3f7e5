#!/usr/bin/env bash
# All that tests need a GPU for, where tools/test.sh has built before: the GPU tests, the kernels of the emulated
# tests, tests that hang, a soak, the examples, compute-sanitizer's four tools on a sample of every kernel and, where
# the host's Python has PyTorch or JAX, their tests. About a quarter of an hour with 16 cores. Names of steps leave the
# others out, where a machine is lent for minutes at a time:
#   tools/test_gpu.sh [tests] [emulated] [hangs] [soak] [examples] [sanitizer] [python] [jax]
# The exit code is 0 only if nothing failed, 2 for a wrong call, and 3 where there is no GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build
tests=$build/tests/flashjit_gpu_tests
steps=(tests emulated hangs soak examples sanitizer python jax)
for name in "$@"; do
  [[ " ${steps[*]} " == *" $name "* ]] || { echo "there is no step '$name': ${steps[*]}" >&2; exit 2; }
done
[ $# -eq 0 ] || steps=("$@")
[ -x "$tests" ] || { echo "there is no $tests: run tools/test.sh first" >&2; exit 2; }
nvidia-smi >/dev/null 2>&1 || { echo "there is no GPU here" >&2; exit 3; }

export FLASHJIT_TEST_CACHE=${FLASHJIT_TEST_CACHE:-$build/gpu-test-cache} FLASHJIT_LOG=${FLASHJIT_LOG:-quiet} FLASHJIT_EVERY_KERNEL=1
failed=()
step() {  # NAME COMMAND...
  [[ " ${steps[*]} " == *" $1 "* ]] || return 0
  echo "== $1"
  shift
  "$@" || failed+=("$*")
}
# Kernels compile on the CPU while others run, so a process a core shares the GPUs. Not by ctest, which a machine with a
# GPU may lack and whose files have the paths of the machine that built. A run that was cut off goes on.
side_by_side() { python3 "$root/tests/gpu/run_tests.py" "$@"; }
step tests side_by_side "$tests" --filter='-Lifetime*:CheckWaits*'
# Without ranks, which fork after the process has used the GPU.
FLASHJIT_LIBCUDA=libcuda.so.1 step emulated side_by_side "$build/tests/flashjit_emulated_tests" --filter='-*EmulatedRanks*'
# Alone: kernels that hang until they trap, which takes their context with them.
step hangs "$tests" --gtest_brief=1 --gtest_filter='CheckWaits*'
# Alone: it counts what memory is in use.
step soak env FLASHJIT_SOAK_CALLS="${FLASHJIT_SOAK_CALLS:-300}" "$tests" --gtest_filter='Lifetime*'
step examples ctest --test-dir "$build" -L example --output-on-failure
step sanitizer bash "$root/tests/gpu/sanitize.sh" "$tests"
if python3 -c 'import torch, pytest' 2>/dev/null; then
  step python env PYTHONPATH="$root/tools/python" FLASHJIT_LIBRARY="$build/libflashjit.so" \
    python3 -m pytest -q -p no:cacheprovider "$root/tests/python/test_gpu.py" "$root/tests/python/test_accuracy.py" \
    "$root/tests/python/test_transformers.py"
fi
if [ -e "$build/libflashjit_jax.so" ] && python3 -c 'import jax, pytest' 2>/dev/null; then
  step jax env PYTHONPATH="$root/tools/python" FLASHJIT_LIBRARY="$build/libflashjit.so" \
    XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pytest -q -p no:cacheprovider "$root"/tests/python/test_jax*.py
fi
for command in ${failed[@]+"${failed[@]}"}; do echo "failed: $command"; done
[ ${#failed[@]} -eq 0 ]
