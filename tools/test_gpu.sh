#!/usr/bin/env bash
# All that tests need a GPU for, where tools/test.sh has built before: the GPU tests, a soak, the examples,
# compute-sanitizer's four tools on a sample of every kernel and, where the host's Python has PyTorch, the Python tests.
# About a quarter of an hour with 16 cores. The exit code is 0 only if nothing failed, and 3 where there is no GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build
tests=$build/tests/flashjit_gpu_tests
[ -x "$tests" ] || { echo "there is no $tests: run tools/test.sh first" >&2; exit 2; }
nvidia-smi >/dev/null 2>&1 || { echo "there is no GPU here" >&2; exit 3; }

export FLASHJIT_TEST_CACHE=$build/gpu-test-cache FLASHJIT_LOG=${FLASHJIT_LOG:-quiet}
failed=()
step() {  # NAME COMMAND...
  echo "== $1"
  shift
  "$@" || failed+=("$*")
}
# Kernels compile on the CPU while others run, so several shards share the GPU.
shards() {  # COUNT
  local i running=() status=0
  for ((i = 0; i < $1; ++i)); do
    # Each test's line is written at once, so that a run that is cut off tells what has passed.
    GTEST_TOTAL_SHARDS=$1 GTEST_SHARD_INDEX=$i "$tests" --gtest_filter='-Lifetime*:CheckWaits*' \
      >"$build/gpu-shard-$i.log" 2>&1 &
    running+=($!)
  done
  for ((i = 0; i < $1; ++i)); do
    wait "${running[i]}" || { status=1; grep -E "FAILED|Failure" "$build/gpu-shard-$i.log" || echo "see gpu-shard-$i.log"; }
    grep -E "tests? ran|PASSED" "$build/gpu-shard-$i.log" || true
  done
  return $status
}
cores=$(nproc)
step "GPU tests" shards $((cores < 14 ? cores : 14))
# Alone: kernels that hang until they trap, which takes their context with them.
step "hangs" "$tests" --gtest_brief=1 --gtest_filter='CheckWaits*'
# Alone: it counts what memory is in use.
step "soak" env FLASHJIT_SOAK_CALLS="${FLASHJIT_SOAK_CALLS:-300}" "$tests" --gtest_filter='Lifetime*'
step "examples" ctest --test-dir "$build" -L example --output-on-failure
step "compute-sanitizer" bash "$root/tests/gpu/sanitize.sh" "$tests"
if python3 -c 'import torch, pytest' 2>/dev/null; then
  step "Python" env PYTHONPATH="$root/tools/python" FLASHJIT_LIBRARY="$build/libflashjit.so" \
    python3 -m pytest -q -p no:cacheprovider "$root/tests/python/test_gpu.py" "$root/tests/python/test_transformers.py"
fi
for command in ${failed[@]+"${failed[@]}"}; do echo "failed: $command"; done
[ ${#failed[@]} -eq 0 ]
