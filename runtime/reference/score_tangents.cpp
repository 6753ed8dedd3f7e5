#include "reference/score_tangents.hpp"

#include "expr/derive.hpp"
#include "expr/nodes.hpp"

namespace flashjit::reference {

ScoreTangents::ScoreTangents(const ScoreProgram& score, const std::vector<Captured>& captures,
                             const std::vector<std::vector<double>>& capture_tangents)
    : capture_tangents_(capture_tangents), program_(bound(captures), expr::Floats::exact) {
  const expr::NodePtr program = score.empty() ? make_name(expr::Name::score) : score.tree();
  reads_ = reads_with_grad(program);
  for (const expr::NodePtr& read : reads_) read_places_.push_back(program_.add(read));
  score_ = derived(program);
  slope_ = derived(derivative(program, make_name(expr::Name::score)));
  for (const expr::NodePtr& read : reads_) read_slopes_.push_back(derived(derivative(program, read)));
}

ScoreTangents::Derived ScoreTangents::derived(const expr::NodePtr& program) {
  Derived made{program_.add(program), program_.add(derivative(program, make_name(expr::Name::score)))};
  for (const expr::NodePtr& read : reads_) made.by_read.push_back(program_.add(derivative(program, read)));
  return made;
}

double ScoreTangents::tangent_of(const Derived& derived, const std::vector<expr::Value>& values,
                                 double s_tangent, const std::vector<double>& tangents_of_reads) const {
  double sum = along(s_tangent, values[derived.by_score].real);
  for (std::size_t i = 0; i < reads_.size(); ++i)
    sum += along(tangents_of_reads[i], values[derived.by_read[i]].real);
  return sum;
}

PairScoreTangents ScoreTangents::at(const Point& point, double s, double s_tangent) const {
  const std::vector<expr::Value> values = program_.run(as_program_sees(point, s));
  PairScoreTangents found;
  std::vector<double> tangents;
  for (std::size_t i = 0; i < reads_.size(); ++i) {
    const expr::Evaluation::Element element = program_.element(read_places_[i], values);
    found.reads.push_back({element.capture, element.index, values[read_slopes_[i].value].real, 0});
    const bool given =
        element.capture < capture_tangents_.size() && !capture_tangents_[element.capture].empty();
    tangents.push_back(given ? capture_tangents_[element.capture][element.index] : 0.0);
  }
  found.tangent = tangent_of(score_, values, s_tangent, tangents);
  found.slope = values[slope_.value].real;
  found.slope_tangent = tangent_of(slope_, values, s_tangent, tangents);
  for (std::size_t i = 0; i < reads_.size(); ++i)
    found.reads[i].slope_tangent = tangent_of(read_slopes_[i], values, s_tangent, tangents);
  return found;
}

}  // namespace flashjit::reference
