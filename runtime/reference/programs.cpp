#include "reference/programs.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "expr/declarations.hpp"
#include "expr/programs.hpp"
#include "flashjit/error.hpp"

namespace flashjit::reference {
namespace {

[[noreturn]] void refuse(std::string message) {
  throw Error(ErrorCode::invalid_argument, std::move(message));
}

void check(const Captured& captured, const expr::Declaration& declared) {
  std::int64_t elements = 1;
  for (const std::int64_t size : captured.size) elements *= size;
  if (static_cast<int>(captured.size.size()) != declared.rank)
    refuse(fmt::format("{} has {} dimensions, but the program declares '{}'", captured.name,
                       captured.size.size(), expr::to_string(declared)));
  if (elements < 1 || elements != static_cast<std::int64_t>(captured.values.size()))
    refuse(fmt::format("{} has {} values for sizes that make {}; give one for each, and at least one",
                       captured.name, captured.values.size(), elements));
}

}  // namespace

Programs::Programs(const AttentionSpec& spec, const std::vector<Captured>& captures)
    : score_(spec.score), mask_(spec.mask), captures_(captures), wants_grad_(captures.size()) {
  for (const Support& support : {expr::check(score_), expr::check(mask_)}) {
    if (!support) refuse(support.reason);
  }
  const std::vector<expr::Declaration> declared = expr::declarations(score_, mask_);
  for (const expr::Declaration& d : declared) {
    const auto found = std::ranges::find(captures, d.name, &Captured::name);
    if (found == captures.end()) refuse(fmt::format("no value is given for '{}'", expr::to_string(d)));
    check(*found, d);
    wants_grad_[found - captures.begin()] = d.wants_grad;
  }
  for (const Captured& captured : captures) {
    if (std::ranges::find(declared, captured.name, &expr::Declaration::name) == declared.end())
      refuse(fmt::format("a value is given for '{}', which the programs do not declare", captured.name));
  }
}

bool Programs::has_grads() const { return std::ranges::count(wants_grad_, true) > 0; }

bool Programs::attends(const Point& point) const {
  return expr::attends(mask_, point.q, point.kv, point.seqlen_q, point.seqlen_kv);
}

// Until programs can be evaluated, a score program is the identity: branch expr fills these in.
double Programs::score(const Point&, double s) const { return s; }
double Programs::score_grad(const Point&, double) const { return 1; }
void Programs::add_grads(const Point&, double, double, const AddGrad&) const {}

CaptureGrads Programs::zero_grads() const {
  CaptureGrads grads(captures_.size());
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (wants_grad_[i]) grads[i].assign(captures_[i].values.size(), 0.0);
  }
  return grads;
}

}  // namespace flashjit::reference
