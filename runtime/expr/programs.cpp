#include "expr/programs.hpp"

#include <fmt/format.h>

#include "expr/emit.hpp"
#include "support/text.hpp"

namespace flashjit::expr {
namespace {

constexpr std::string_view kCausal = "causal";
constexpr std::string_view kCausalTopLeft = "causal_top_left";

// Until branch expr2 reads programs: the known ones by hand.
NodePtr tree(const MaskProgram& mask) {
  if (mask.empty()) return nullptr;
  return parse(mask.text() == kCausal ? "kv <= q + seqlen_kv - seqlen_q" : "kv <= q").pointer();
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
  return emit_hooks(Trees{.mask = tree(mask)});
}

bool attends(const MaskProgram& mask, std::int64_t q, std::int64_t kv, std::int64_t seqlen_q,
             std::int64_t seqlen_kv) {
  if (mask.empty()) return true;
  if (mask.text() == kCausal) return kv <= q + seqlen_kv - seqlen_q;
  require(check(mask));
  return kv <= q;
}

}  // namespace flashjit::expr
