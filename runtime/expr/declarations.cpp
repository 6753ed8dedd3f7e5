#include "expr/declarations.hpp"

#include <fmt/format.h>

namespace flashjit::expr {

std::string to_string(const Declaration& d) {
  if (d.is_scalar()) return fmt::format("{}: {}", d.name, d.type == ElementType::int32 ? "int" : "float");
  return fmt::format("{}: {} {}d{}", d.name, flashjit::to_string(d.type), d.rank,
                     d.wants_grad ? " grad" : "");
}

// Until programs can declare: branch expr replaces both.
std::vector<Declaration> declarations(const ScoreProgram&, const MaskProgram&) { return {}; }
bool is_listed(const MaskProgram&) { return false; }

}  // namespace flashjit::expr
