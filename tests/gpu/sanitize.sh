#!/usr/bin/env bash
# Runs a sample of the GPU tests under compute-sanitizer, its four tools side by side:
#   tests/gpu/sanitize.sh [--names] [BINARY]     build/tests/flashjit_gpu_tests by default
# --names only checks that the sample's tests exist, without a GPU.
# Prints a line for each tool; the exit status is 0 only where all of them ran, passed and found nothing. What they
# said lies in build-sanitizer, or in the folder that LOGS names; a run that was cut off goes on there. LIMIT ends each
# part after so many seconds, and TOOLS names some of the four. Kernels are compiled once before, or come from FLASHJIT_PACKS.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
names_only=false
[ "${1:-}" != --names ] || { names_only=true; shift; }
binary=${1:-$root/build/tests/flashjit_gpu_tests}
logs=${LOGS:-$root/build-sanitizer}
limit=${LIMIT:-inf}

# Both passes of small problems: every family and auxiliary kernel (preprocess, convert_dq, term_bounds, tile_lists,
# list_ranks, sink_grads), gradients of captures, blocks that take several tiles and clear dQ, clusters (backward of d192 and d256,
# and those that sum up dQ).
# Names without their number at the end.
sample=(
  # dense
  'Pairs/Attention.*/bf16_d96_dropout_b3_hq2_hkv2_sq64_skv64_sm90_*'
  'Pairs/Attention.*/fp16_d24_causal_dropout_kvlen_det_b1_hq6_hkv3_sq128_skv128_sm90_*'
  'Pairs/Attention.*/bf16_d64_causal_b40_hq8_hkv4_sq130_skv300_sm90_*'
  'Pairs/Attention.*/bf16_d64_causal_b10_hq4_hkv4_sq130_skv2100_sm90_*'
  'Pairs/Attention.*/fp16_d256_causal_dropout_b2_hq4_hkv2_sq129_skv127_sm90_*'
  'Pairs/Attention.*/bf16_d256_causal_top_left_kvlen_b2_hq4_hkv4_sq64_skv64_sm90_*'
  'LargeTiles/Attention.*/fp16_d64_dropout_b5_hq8_hkv4_sq130_skv1100_sm80_*'
  'Pairs/Attention.*/fp32_d32_causal_dropout_kvlen_b2_hq8_hkv8_sq333_skv333_simt_*'
  'Pairs/Attention.*/fp16_d64_causal_top_left_kvlen_b3_hq2_hkv2_sq128_skv128_simt_*'
  # block maps
  'Pairs/BlockSparse.*/fp16_d128_causal_top_left_kvlen_map32x64_b2_hq4_hkv2_sq333_skv200_sm90_*'
  'Pairs/BlockSparse.*/fp32_d64_kvlen_map16x256_det_b2_hq4_hkv2_sq333_skv200_simt_*'
  'Configurations/BlockSparseRows.FarApart/fwd_bf16_d64_map128x128_sm90_*'
  'Configurations/BlockSparseRows.WithoutOrder/fwd_bf16_d256_map64x64_sm90_*'
  # programs
  'Variants/Programs.*/bf16_d128_*_sm90_bhsd_documents_*'
  'BiasTiles/Programs.*/bf16_d128_b2_hq4_hkv2_sq233_skv434_sm90_bhsd_even_rows_causal_*'
  'BiasTiles/Programs.*/bf16_d128_*_sm90_bhsd_bias_tile_7*'
  'BiasTileGrads/Programs.*/bf16_d128_*_sm90_bhsd_bias_tile_grad_90*'
  'DifferenceGrads/Programs.*/bf16_d64_kvlen_b2_hq4_hkv2_sq333_skv450_sm90_bhsd_table_grad_*'
  'PositionValues/Programs.*/bf16_d128_*_sm90_bhsd_key_bias_blocks_*'
  'PositionValues/Programs.*/bf16_d64_kvlen_*_sm90_bhsd_forget_gates_*'
  'Variants/Programs.*/fp32_d64_*_simt_bhsd_documents_*'
  'Variants/Programs.*/bf16_d128_*_sm90_bhsd_causal_alibi_grad_*'
  # packed sequences and sinks
  'Packed/Programs.*/bf16_d96x64_varlen_sinks_b4_hq4_hkv2_sq129_skv129_sm90_*'
  'Packed/Programs.*/bf16_d256_causal_det_varlen_sinks_b3_hq4_hkv1_sq65_skv64_sm90_*'
  # packed sequences with wrong offsets
  'Families/WrongOffsets.*/sm90_causal_dropout'
  'Families/WrongOffsets.*/sm90_pairs_det_lists'
  'Families/WrongOffsets.*/simt_plain_sinks'
  # two Q tiles at a time
  'Features/TwoTilesAtATime.*/fp16_d64_map128x128_b2_hq4_hkv2_sq333_skv300_sm90_*'
  'Features/TwoTilesAtATime.*/bf16_d32_sinks_b2_hq4_hkv2_sq333_skv300_sm90_*'
  # clusters that sum up dQ
  'Features/Clusters.*/bf16_d128_kvlen_b2_hq4_hkv2_sq333_skv200_sm90_bshd_*'
  'Features/Clusters.*/bf16_d128_varlen_sinks_b3_hq2_hkv1_sq70_skv1100_sm90_*'
  'Features/Clusters.*/fp16_d128_b3_hq2_hkv1_sq70_skv1100_sm90_*'
  # keys that blocks share
  'Features/SplitKv.*/fp16_d192x128_map64x64_b2_hq4_hkv2_sq70_skv1100_sm90_*'
  'Features/SplitKv.*/bf16_d64_varlen_sinks_b3_hq2_hkv1_sq1_skv777_sm90_*'
  'Features/SplitKv.*/bf16_d64_varlen_sinks_b2_hq4_hkv2_sq70_skv1100_sm80_*'
  # queries that blocks share
  'Features/SplitQ.*/fp16_d64_kvlen_b1_hq16_hkv1_sq515_skv300_sm90_*'
  'Features/SplitQ.*/bf16_d256_b2_hq40_hkv2_sq210_skv333_sm90_*'
  'Features/SplitQ.*/bf16_d128_varlen_b2_hq40_hkv2_sq210_skv333_sm90_*'
  'Features/SplitQ.*/fp16_d64_kvlen_b1_hq16_hkv1_sq515_skv300_sm80_*'
  # heads that a tile has together
  'Features/PackedHeads.*/bf16_d64_varlen_sinks_b3_hq6_hkv2_sq70_skv777_sm90_*'
  # wide heads
  'Wide/Attention.*/fp16_d296_varlen_sinks_b2_hq4_hkv2_sq130_skv200_sm80_*'
  'Wide/Attention.*/bf16_d368_kvlen_det_b2_hq4_hkv2_sq130_skv200_sm80_*'
  'Wide/Attention.*/bf16_d320x256_kvlen_det_b2_hq4_hkv2_sq130_skv200_sm90_*'
  'Wide/Attention.*/bf16_d320x256_varlen_sinks_b2_hq4_hkv2_sq130_skv200_sm90_*'
  'Wide/Attention.*/bf16_d320x256_dropout_map64x64_b2_hq4_hkv2_sq130_skv200_sm90_*'
  # caches, new keys and values, joined states
  'All/CacheTest.*/fwd_bf16_d64x32_causal_varlen_pages16_b3_hq8_hkv2_sq1_skv300_sm90_*'
  'All/CacheTest.*/fwd_fp16_d96_causal_pages64_b4_hq4_hkv2_sq70_skv200_sm90_*'
  'All/CacheTest.*/fwd_fp16_d64_causal_varlen_pages3_b5_hq4_hkv1_sq16_skv517_sm80_*'
  'All/CacheTest.*/fwd_bf16_d64x32_causal_pages3_b4_hq4_hkv2_sq70_skv200_simt_*'
  'All/CacheTest.*/fwd_bf16_d128_kve4m3_causal_varlen_pages256_key_scales_b4_hq4_hkv2_sq70_skv200_sm80_hnd_*'
  'All/CacheTest.*/fwd_fp16_d64_score_20_0___tanh_score___20_0___causal_pages16_b4_hq4_hkv2_sq70_skv200_sm90_*'
  'All/CacheTest.*/fwd_bf16_d64x32_causal_varlen_pages1_b3_hq8_hkv2_sq1_skv300_sm90_*'
  'All/CacheTest.*/fwd_fp16_d64_varlen_sinks_pages16_shared_prefix_b5_hq8_hkv2_sq3_skv2000_sm80_*'
  'All/AppendTest.*/fwd_fp16_d64x32_pages3_*_halves16*'
  'All/AppendTest.*/fwd_bf16_d128_causal_varlen_pages16_*_interleaved*'
  'MergeTest.IsTheSoftmaxOverAllKeys'
  # codes decoded in registers, before the kernel, beside lists, and as Q
  'All/BlockScales.*bf16_d128_kv_e2m1_g16_e4m3_apart_scaled__pages16_causal_b2_hq4_hkv1_sq1_skv150_sm90_*'
  'All/BlockScales.*bf16_d256_k_uint4_keys64_fp32_zero__v_int4_g32_fp16_apart__pages64_b2_hq4_hkv1_sq1_skv200_sm90_*'
  'All/DecodedCache.*bf16_d128_kv_nvfp4__pages16_causal_b2_hq4_hkv2_sq70_skv150_sm90_*'
  'All/NanInCache.*bf16_d64_kve4m3_causal_varlen_pages16_q_codes_b4_hq4_hkv2_sq70_skv300_sm90_*'
  # lists of keys, joined for neighbouring queries or not
  'All/IndicesTest.*/bf16_d256_indices_b2_hq16_hkv2_sq33_skv400_sm90_*'
  # fixed parts of the keys, and clusters that join theirs
  'All/NanInCache.*/fwd_bf16_d64_causal_varlen_pages16_invariant_b4_hq4_hkv2_sq1_skv2200_sm90_*'
  # tangents, and their gradients
  'All/Tangents.AreTheDerivative/0'
  'All/GradientTangents.AreTheDerivative/7'
)

# Backward passes of sm80 in which one warp of two gives P to the other, and forward passes of sm90 above 256 columns of
# V, in which one warpgroup does: it arrives at a named barrier and goes on. racecheck does not follow arrivals, and
# then finds races even between what __syncthreads() parts: it is shown the kernels of FLASHJIT_CHECK_WAITS=on, in which
# both wait.
# Rings of sm90 that are read again and again, by threads, of what threads wrote: one lane arrives on an mbarrier for its
# warp (release() in templates/async/ring.cuh). __syncwarp() orders the other lanes' reads before that, but racecheck takes
# the arrival as the one lane's, and calls the reads of the other 31 races with the writes that come next to the slot. In
# kernels of FLASHJIT_CHECK_WAITS=on each thread arrives: ../../templates/sm90/NOTES.md#what-racecheck-does-not-follow
pairs=(
  'Wide/Attention.*/bf16_d512_kvlen_det_b2_hq4_hkv2_sq130_skv200_sm90_*'
  'Wide/Attention.*/bf16_d512_varlen_sinks_b2_hq4_hkv2_sq130_skv200_sm90_*'
  'Pairs/Attention.*/bf16_d64_det_b1_hq1_hkv1_sq64_skv65_sm80_*'
  'Pairs/Attention.*/fp16_d128_b5_hq8_hkv4_sq130_skv1100_sm80_*'
  'Pairs/Attention.*/fp16_d64_causal_dropout_kvlen_b2_hq8_hkv8_sq65_skv65_sm80_*'
  'Pairs/BlockSparse.*/bf16_d32_causal_top_left_kvlen_map48x80_det_b2_hq4_hkv2_sq129_skv129_sm80_*'
  'Variants/Programs.*/fp16_d64_*_sm80_bhsd_documents_*'
  'Packed/Programs.*/fp16_d96x64_det_varlen_b2_hq2_hkv2_sq200_skv333_sm80_*'
  'Families/WrongOffsets.*/sm80_causal_det'
  # lanes that arrive for their warps
  'All/BlockScales.*bf16_d128_kv_int4_g32_fp16_apart_zero__pages16_causal_b2_hq4_hkv1_sq3_skv90_sm90_*'
  'All/IndicesTest.*/fp16_d64_causal_indices_b2_hq12_hkv4_sq70_skv300_sm90_*'
)

[ -x "$binary" ] || { echo "'$binary' is no program; build flashjit_gpu_tests or name it" >&2; exit 2; }
tests=$("$binary" --gtest_list_tests --gtest_filter='*.*' | awk '/^[^ ]/ { suite = $1 } /^  / { print suite $1 }')
for name in "${sample[@]}" "${pairs[@]}"; do
  grep -q "^${name//\*/.*}$" <<<"$tests" ||
    { echo "there is no test '$name' any more; choose another" >&2; exit 2; }
done
! $names_only || exit 0
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is missing: it comes with CUDA" >&2; exit 3; }

mkdir -p "$logs"
if [ -z "${FLASHJIT_TEST_CACHE:-}" ]; then
  FLASHJIT_TEST_CACHE=$(mktemp -d)
  trap 'rm -rf "$FLASHJIT_TEST_CACHE"' EXIT
fi
export FLASHJIT_TEST_CACHE

joined() { local IFS=:; echo "$*"; }
cores=$(nproc)
run() {  # WAITS TOOL TESTS [WORKERS]
  local under=()
  [ "$2" = none ] || under=(--sanitizer "$2")
  FLASHJIT_CHECK_WAITS=$1 python3 "$root/tests/gpu/run_tests.py" "$binary" --filter="$3" --chunk 2 --folder "$logs/$2-$1" \
    --workers "${4:-$((cores < 8 ? 1 : cores / 8))}" --seconds "$limit" "${under[@]}"
}

# First without a tool, which compiles.
run off none "$(joined "${sample[@]}" "${pairs[@]}")" "$cores"
run on none "$(joined "${pairs[@]}")" "$cores"

checks=()
start() { run "$@" >"$logs/$2-$1.log" 2>&1 & checks+=("$2-$1 $!"); }
for tool in ${TOOLS:-memcheck initcheck synccheck racecheck}; do
  if [ "$tool" = racecheck ]; then
    start off racecheck "$(joined "${sample[@]}")"
    start on racecheck "$(joined "${pairs[@]}")"
  else
    start off "$tool" "$(joined "${sample[@]}" "${pairs[@]}")"
  fi
done
failed=0
for check in "${checks[@]}"; do
  read -r name process <<<"$check"
  wait "$process" || { failed=1; echo "  see $logs/$name.log"; }
  echo "$name: $(tail -n 1 "$logs/$name.log")"
done
exit "$failed"
