#include "expr/programs.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "support/text.hpp"

namespace flashjit::expr {
namespace {

constexpr std::string_view kCausal = "causal";
constexpr std::string_view kCausalTopLeft = "causal_top_left";

// Every hook names its namespace, so that a Problem may stand anywhere.
constexpr std::string_view kHead = R"(
  static constexpr bool kHasScore = false, kScoreGrad = false, kListed = false, kEvaluateTiles = false;
  static constexpr bool kMaskUsesBatch = false, kMaskUsesHead = false;
  static constexpr int kQReads = 0, kKvReads = 0, kCaptureGrads = 0;
  struct Head {
    int b, h, h_kv, seqlen_q, seqlen_kv;
  };
  static __device__ __forceinline__ Head head(const flashjit::Params& p, int b, int h, int seqlen_q, int seqlen_kv) {
    return {b, h, h / (p.heads_q / p.heads_kv), seqlen_q, seqlen_kv};
  }
  static __device__ __forceinline__ float score(const flashjit::Params& p, const Head&, float dot, flashjit::Position,
                                                flashjit::Position) {
    return __fmul_rn(dot, p.softmax_scale);
  }
  static __device__ __forceinline__ float score_grad(const flashjit::Params&, const Head&, float, flashjit::Position,
                                                     flashjit::Position) {
    return 1.0f;
  }
  static __device__ __forceinline__ void add_capture_grads(const flashjit::Params&, const Head&, float, float,
                                                           flashjit::Position, flashjit::Position) {}
  static __device__ __forceinline__ int q_read(const flashjit::Params&, const Head&, int, int) { return 0; }
  static __device__ __forceinline__ int kv_read(const flashjit::Params&, const Head&, int, int) { return 0; }
)";

constexpr std::string_view kNoMask = R"(
  static constexpr bool kHasMask = false;
  static __device__ __forceinline__ bool mask(const flashjit::Params&, const Head&, flashjit::Position,
                                              flashjit::Position) {
    return true;
  }
  static __device__ __forceinline__ flashjit::TileClass classify_tile(const flashjit::Params&, const Head&,
                                                                      flashjit::Range, flashjit::Range,
                                                                      const flashjit::Interval*,
                                                                      const flashjit::Interval*) {
    return flashjit::TileClass::full;
  }
  static __device__ __forceinline__ flashjit::Range kv_bounds(const flashjit::Params&, const Head& head,
                                                              flashjit::Range) {
    return {0, head.seqlen_kv};
  }
  static __device__ __forceinline__ flashjit::Range q_bounds(const flashjit::Params&, const Head& head,
                                                             flashjit::Range) {
    return {0, head.seqlen_q};
  }
)";

// The arithmetic is templates/common/causal.cuh, which the unit tests run on the host. $ is the shift.
constexpr std::string_view kCausalMask = R"(
  static constexpr bool kHasMask = true;
  static __device__ __forceinline__ bool mask(const flashjit::Params&, const Head& head, flashjit::Position q,
                                              flashjit::Position kv) {
    return flashjit::causal_attends(q.at, kv.at, $);
  }
  static __device__ __forceinline__ flashjit::TileClass classify_tile(const flashjit::Params&, const Head& head,
                                                                      flashjit::Range q, flashjit::Range kv,
                                                                      const flashjit::Interval*,
                                                                      const flashjit::Interval*) {
    if (flashjit::causal_tile_is_full(q.begin, kv.end, $)) return flashjit::TileClass::full;
    if (flashjit::causal_tile_is_empty(q.end, kv.begin, $)) return flashjit::TileClass::empty;
    return flashjit::TileClass::partial;
  }
  static __device__ __forceinline__ flashjit::Range kv_bounds(const flashjit::Params&, const Head& head,
                                                              flashjit::Range q) {
    return {0, flashjit::causal_kv_end(q.end, $, head.seqlen_q, head.seqlen_kv)};
  }
  static __device__ __forceinline__ flashjit::Range q_bounds(const flashjit::Params&, const Head& head,
                                                             flashjit::Range kv) {
    return {flashjit::causal_q_begin(kv.begin, $, head.seqlen_q, head.seqlen_kv), head.seqlen_q};
  }
)";

std::string with_shift(std::string_view text, std::string_view shift) {
  return fmt::format("{}", fmt::join(split(text, '$'), shift));
}

void require(const Support& known) {
  if (!known) throw Error(ErrorCode::invalid_argument, known.reason);
}

}  // namespace

Support check(const MaskProgram& mask) {
  if (mask.empty() || mask.text() == kCausal || mask.text() == kCausalTopLeft) return Support::yes();
  return Support::no(fmt::format("the mask program is {}; it must be '{}', '{}' or empty",
                                 quoted(mask.text()), kCausal, kCausalTopLeft));
}

Support check(const ScoreProgram& score) {
  if (score.empty()) return Support::yes();
  return Support::no(
      fmt::format("the score program is {}; it must be empty (the identity)", quoted(score.text())));
}

std::string emit_hooks(const ScoreProgram& score, const MaskProgram& mask) {
  require(check(score));
  require(check(mask));
  const std::string head(kHead.substr(1));
  if (mask.empty()) return head + std::string(kNoMask.substr(1));
  const bool bottom_right = mask.text() == kCausal;
  return head + with_shift(kCausalMask.substr(1), bottom_right ? "head.seqlen_kv - head.seqlen_q" : "0");
}

bool attends(const MaskProgram& mask, std::int64_t q, std::int64_t kv, std::int64_t seqlen_q,
             std::int64_t seqlen_kv) {
  if (mask.empty()) return true;
  if (mask.text() == kCausal) return kv <= q + seqlen_kv - seqlen_q;
  require(check(mask));
  return kv <= q;
}

}  // namespace flashjit::expr
