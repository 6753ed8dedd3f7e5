#include "tests/emulator/translate.hpp"

#include <fmt/format.h>

#include <cctype>
#include <stdexcept>
#include <vector>

namespace flashjit_emulator {
namespace {

bool is_of_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

class Translator {
 public:
  explicit Translator(std::string_view text) : text_(text) {}

  std::string result() {
    while (at_ < text_.size()) {
      const std::string_view token = next();
      if (token == "asm") {
        assembly();
      } else if (token == "__shared__") {
        shared_variable(false);
      } else if (token == "__global__") {
        kernel();
      } else if (token == "extern" && text_.substr(at_).starts_with(" __shared__")) {
        next(), next();
        shared_variable(true);
      } else {
        out_ += token;
      }
    }
    return std::move(out_);
  }

 private:
  /// A name, a comment, a literal, or a character.
  std::string_view next() {
    const std::size_t begin = at_;
    const std::string_view rest = text_.substr(at_);
    if (rest.starts_with("//")) {
      at_ = std::min(text_.find('\n', at_), text_.size());
    } else if (is_of_name(rest[0])) {
      while (at_ < text_.size() && is_of_name(text_[at_])) ++at_;
      // In numbers such as 10'000 it is no quote.
      while (std::isdigit(static_cast<unsigned char>(rest[0])) && at_ + 1 < text_.size() &&
             text_[at_] == '\'' && is_of_name(text_[at_ + 1]))
        for (++at_; at_ < text_.size() && is_of_name(text_[at_]);) ++at_;
    } else if (rest[0] == '"' || rest[0] == '\'') {
      for (++at_; at_ < text_.size() && text_[at_] != rest[0]; ++at_)
        if (text_[at_] == '\\') ++at_;
      ++at_;
    } else {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  /// Up to the first of `ends` that no bracket encloses, which follows.
  std::string_view until(std::string_view ends) {
    const std::size_t begin = at_;
    for (int depth = 0; at_ < text_.size();) {
      const char c = text_[at_];
      if (depth == 0 && ends.find(c) != ends.npos) return text_.substr(begin, at_ - begin);
      if (c == '(' || c == '[' || c == '{') ++depth;
      if (c == ')' || c == ']' || c == '}') --depth;
      next();
    }
    throw std::runtime_error("the emulator cannot read a kernel's source: a bracket is open");
  }
  std::string_view in_parentheses() {
    until("(");
    ++at_;
    const std::string_view inside = until(")");
    ++at_;
    return inside;
  }

  /// asm volatile("text" : outputs : inputs : clobbers);
  void assembly() {
    const std::string_view inside = in_parentheses();
    until(";");
    ++at_;
    Translator parts(inside);
    std::vector<std::string_view> sections;
    for (;;) {
      std::size_t begin = parts.at_;
      while (parts.at_ < inside.size() && inside[parts.at_] != ':') parts.skip();
      sections.push_back(inside.substr(begin, parts.at_ - begin));
      if (parts.at_ == inside.size()) break;
      ++parts.at_;
    }
    sections.resize(4);
    if (trimmed(sections[0]) == "\"\"") {
      out_ += "{}";
      return;
    }
    out_ += fmt::format(
        "{{ static flashjit_emulator::Statement flashjit_statement{{{}, __FILE__, __LINE__, nullptr}}; "
        "flashjit_emulator::run(flashjit_statement",
        sections[0]);
    operands("output", sections[1]);
    operands("input", sections[2]);
    out_ += "); }";
  }
  /// A token, or all that is in brackets.
  void skip() {
    const char c = text_[at_];
    if (c != '(' && c != '[' && c != '{') {
      next();
      return;
    }
    ++at_;
    until(c == '(' ? ")" : c == '[' ? "]" : "}");
    ++at_;
  }
  /// "=r"(x), "+f"(y)
  void operands(std::string_view function, std::string_view list) {
    Translator of(list);
    while (!trimmed(list.substr(of.at_)).empty())
      out_ += fmt::format(", flashjit_emulator::{}({})", function, of.in_parentheses());
  }

  /// What follows __shared__: alignment, type, name, dimensions.
  void shared_variable(bool dynamic) {
    std::string_view declaration = trimmed(until(";"));
    if (declaration.starts_with("__align__")) {
      Translator of(declaration);
      of.in_parentheses();
      declaration = trimmed(declaration.substr(of.at_));
    }
    const std::size_t end = std::min(declaration.find('['), declaration.size());
    std::size_t begin = end;
    while (begin > 0 && is_of_name(declaration[begin - 1])) --begin;
    const std::string_view type = declaration.substr(0, begin), name = declaration.substr(begin, end - begin);
    out_ += dynamic ? fmt::format("{}* {} = static_cast<{}*>(flashjit_emulator::dynamic_shared())", type,
                                  name, type)
                    : fmt::format("auto& {} = flashjit_emulator::shared_variable<{}{}>([] {{}})", name, type,
                                  declaration.substr(end));
  }

  /// What follows extern "C" __global__: result, attributes, name, parameters.
  void kernel() {
    std::string_view name, cluster = "1";
    for (;;) {
      const std::string_view token = next();
      if (token == "(") break;
      if (token == "__launch_bounds__" || token == "__cluster_dims__") {
        const std::string_view inside = in_parentheses();
        if (token == "__cluster_dims__") cluster = inside.substr(0, inside.find(','));
      } else if (is_of_name(token[0])) {
        name = token;
      }
    }
    const std::string_view parameters = until(")");
    ++at_;
    out_ += fmt::format(
        "void {0}({1});\nextern \"C\" __attribute__((visibility(\"default\"))) const "
        "flashjit_emulator::Entry {0}_entry{{{2}, [](void** parameters) "
        "{{ "
        "flashjit_emulator::call({0}, parameters); }}}};\nextern \"C\" void {0}({1})",
        name, parameters, cluster);
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::string out_;
};

}  // namespace

std::string translate(std::string_view text) { return Translator(text).result(); }

}  // namespace flashjit_emulator
