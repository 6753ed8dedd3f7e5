#include "reference/programs.hpp"

#include <algorithm>

#include "expr/declarations.hpp"
#include "expr/derive.hpp"
#include "expr/nodes.hpp"
#include "flashjit/error.hpp"
#include "support/refuse.hpp"

namespace flashjit::reference {
namespace {

void check(const Captured& captured, const expr::Declaration& declared) {
  std::int64_t elements = 1;
  for (const std::int64_t size : captured.size) elements *= size;
  if (static_cast<int>(captured.size.size()) != declared.rank)
    refuse("{} has {} dimensions, but the program declares '{}'", captured.name, captured.size.size(),
           expr::to_string(declared));
  if (elements < 1 || elements != static_cast<std::int64_t>(captured.values.size()))
    refuse("{} has {} values for sizes that make {}; give one for each, and at least one", captured.name,
           captured.values.size(), elements);
}

}  // namespace

std::vector<expr::Bound> bound(const std::vector<Captured>& captures) {
  std::vector<expr::Bound> bound;
  for (const Captured& captured : captures)
    bound.push_back({captured.name, captured.size, captured.values, captured.exact});
  return bound;
}

expr::Point as_program_sees(const Point& point, double s, std::int64_t column, double out) {
  const auto number = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  return {.b = number(point.b),
          .h = number(point.h),
          .h_kv = number(point.h_kv),
          .q = number(point.q),
          .kv = number(point.kv),
          .seqlen_q = number(point.seqlen_q),
          .seqlen_kv = number(point.seqlen_kv),
          .column = number(column),
          .score = s,
          .out = out};
}

Programs::Programs(const AttentionSpec& spec, const std::vector<Captured>& captures)
    : captures_(captures),
      wants_grad_(captures.size()),
      mask_(bound(captures), expr::Floats::rounded),
      score_(bound(captures), expr::Floats::exact),
      out_(bound(captures), expr::Floats::exact) {
  const std::vector<expr::Declaration> declared =
      expr::declarations(spec.score, spec.mask, spec.epilogue.out_mod, spec.prologue);
  for (const expr::Declaration& d : declared) {
    const auto found = std::ranges::find(captures, d.name, &Captured::name);
    if (found == captures.end()) refuse("no value is given for '{}'", expr::to_string(d));
    check(*found, d);
    wants_grad_[found - captures.begin()] = d.wants_grad;
  }
  for (const Captured& captured : captures) {
    if (std::ranges::find(declared, captured.name, &expr::Declaration::name) == declared.end())
      refuse("a value is given for '{}', which the programs do not declare", captured.name);
  }
  if (!spec.mask.empty()) mask_root_ = mask_.add(spec.mask.tree());
  if (!spec.score.empty()) {
    score_root_ = score_.add(spec.score.tree());
    score_grad_ = score_.add(derivative(spec.score.tree(), make_name(expr::Name::score)));
    reads_ = reads_of(score_, spec.score.tree());
  }
  if (!spec.epilogue.out_mod.empty()) {
    out_root_ = out_.add(spec.epilogue.out_mod.tree());
    out_grad_ = out_.add(derivative(spec.epilogue.out_mod.tree(), make_name(expr::Name::out)));
    out_reads_ = reads_of(out_, spec.epilogue.out_mod.tree());
  }
}

std::vector<Programs::Read> Programs::reads_of(expr::Evaluation& evaluation, const expr::NodePtr& program) {
  std::vector<Read> reads;
  for (const expr::NodePtr& read : reads_with_grad(program))
    reads.push_back({evaluation.add(read), evaluation.add(derivative(program, read))});
  return reads;
}

bool Programs::has_grads() const { return std::ranges::count(wants_grad_, true) > 0; }

bool Programs::attends(const Point& point) const {
  return mask_root_ < 0 || mask_.run(as_program_sees(point, 0))[mask_root_].integer;
}

double Programs::score(const Point& point, double s) const {
  return has_score() ? score_.run(as_program_sees(point, s))[score_root_].real : s;
}

double Programs::score_grad(const Point& point, double s) const {
  return has_score() ? score_.run(as_program_sees(point, s))[score_grad_].real : 1;
}

double Programs::out_mod(const Point& point, std::int64_t column, double out) const {
  return has_out_mod() ? out_.run(as_program_sees(point, 0, column, out))[out_root_].real : out;
}

double Programs::out_mod_grad(const Point& point, std::int64_t column, double out) const {
  return has_out_mod() ? out_.run(as_program_sees(point, 0, column, out))[out_grad_].real : 1;
}

void Programs::add_grads(const Point& point, double s, const AddGrad& add) const {
  add_reads(score_, reads_, score_.run(as_program_sees(point, s)), add);
}

void Programs::add_out_mod_grads(const Point& point, std::int64_t column, double out,
                                 const AddGrad& add) const {
  add_reads(out_, out_reads_, out_.run(as_program_sees(point, 0, column, out)), add);
}

void Programs::add_reads(const expr::Evaluation& evaluation, const std::vector<Read>& reads,
                         const std::vector<expr::Value>& values, const AddGrad& add) {
  for (const auto& [read, derivative] : reads) {
    const expr::Evaluation::Element element = evaluation.element(read, values);
    add(element.capture, element.index, values[derivative].real);
  }
}

CaptureGrads Programs::zero_grads() const {
  CaptureGrads grads(captures_.size());
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (wants_grad_[i]) grads[i].assign(captures_[i].values.size(), 0.0);
  }
  return grads;
}

}  // namespace flashjit::reference
