// What holds for every text that is given as a program or as a spec; shared by the fuzz tests.
#pragma once

#include <string>
#include <string_view>

#include "expr/fold.hpp"
#include "expr/ops.hpp"
#include "flashjit/error.hpp"
#include "flashjit/expr.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::test {

enum class Outcome : std::uint8_t { read, refused, broken };

inline bool is_refusal(const Error& error) {
  return error.code() == ErrorCode::invalid_argument && !error.message().empty();
}

/// Read: it came back from its canonical text, and folds.
inline Outcome read_program(std::string_view text) {
  try {
    const expr::Expr program = expr::parse(text);
    const std::string canonical = to_string(program);
    if (canonical.size() > static_cast<std::size_t>(expr::kMaxText)) return Outcome::refused;
    const expr::Expr back = expr::parse(canonical);
    const expr::NodePtr folded = expr::fold(program.pointer());
    const bool holds = same(program, back) && to_string(back) == canonical && folded->type == program.type();
    return holds ? Outcome::read : Outcome::broken;
  } catch (const Error& error) {
    return is_refusal(error) ? Outcome::refused : Outcome::broken;
  }
}

inline Outcome read_spec(std::string_view text) {
  try {
    const AttentionSpec spec = parse_spec(text);
    return parse_spec(to_string(spec)) == spec.normalized() ? Outcome::read : Outcome::broken;
  } catch (const Error& error) {
    return is_refusal(error) ? Outcome::refused : Outcome::broken;
  }
}

}  // namespace flashjit::test
