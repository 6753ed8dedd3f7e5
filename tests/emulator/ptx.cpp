#include "tests/emulator/ptx.hpp"

#include <fmt/format.h>

#include <bit>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string_view>

#include "support/small_float.hpp"

namespace flashjit_emulator {
namespace {

using flashjit::Bf16;
using flashjit::E4m3;
using flashjit::Fp16;

/// Reads the text of an asm statement.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  std::vector<Instruction> statement() {
    for (skip_blanks(); at_ < text_.size(); skip_blanks()) line();
    for (const auto& [instruction, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) fail(fmt::format("no label {} in asm \"{}\"", label, text_));
      instructions_[instruction].target = found->second;
    }
    return std::move(instructions_);
  }

 private:
  void line() {
    if (take('{') || take('}') || take(';')) return;
    if (peek() == '.') return declaration();
    Instruction instruction;
    if (take('@')) {
      instruction.guard_negated = take('!');
      instruction.guard = argument();
    }
    instruction.opcode = word();
    if (take(':')) {
      labels_[instruction.opcode] = static_cast<int>(instructions_.size());
      return;
    }
    if (instruction.opcode == "bra") {
      branches_.emplace_back(instructions_.size(), word());
    } else {
      while (!at_end_of_line()) {
        instruction.arguments.push_back(argument());
        if (!take(',')) take('|');
      }
      instruction.execute = find_execution(instruction.opcode);
    }
    instructions_.push_back(std::move(instruction));
  }
  bool at_end_of_line() { return peek() == ';' || peek() == '\0'; }

  /// ".reg .pred first, more;"
  void declaration() {
    word(), word();
    do registers_.emplace(word(), static_cast<int>(registers_.size()));
    while (take(','));
    if (registers_.size() > Frame::kMostRegisters)
      fail("more registers in an asm statement than the emulator has");
  }

  Argument argument() {
    if (take('{')) return list(Argument::Kind::vector, '}');
    if (take('[')) return list(Argument::Kind::memory, ']');
    const std::string text = word();
    const auto number = [&](std::size_t skipped, int base) {
      std::uint64_t value = 0;
      std::from_chars(text.data() + skipped, text.data() + text.size(), value, base);
      return value;
    };
    if (text.empty()) fail(fmt::format("cannot read asm \"{}\"", text_));
    if (text == "_") return {};
    if (text.starts_with("%%")) return {.kind = Argument::Kind::special, .name = text.substr(2)};
    if (text.starts_with("%"))
      return {.kind = Argument::Kind::operand, .index = static_cast<int>(number(1, 10))};
    if (text.starts_with("0x")) return {.kind = Argument::Kind::immediate, .bits = number(2, 16)};
    if (text.starts_with("0f")) return {.kind = Argument::Kind::immediate, .bits = number(2, 16)};
    if (text[0] == '-') return {.kind = Argument::Kind::immediate, .bits = -number(1, 10)};
    if (std::isdigit(static_cast<unsigned char>(text[0])))
      return {.kind = Argument::Kind::immediate, .bits = number(0, 10)};
    const auto found = registers_.find(text);
    if (found == registers_.end()) fail(fmt::format("{} is not declared in asm \"{}\"", text, text_));
    return {.kind = Argument::Kind::reg, .index = found->second};
  }
  Argument list(Argument::Kind kind, char end) {
    Argument all{.kind = kind};
    while (!take(end)) {
      Argument part = argument();
      if (part.kind == Argument::Kind::vector && kind == Argument::Kind::memory) {
        all.parts.insert(all.parts.end(), part.parts.begin(), part.parts.end());
      } else {
        all.parts.push_back(std::move(part));
      }
      take(',');
    }
    return all;
  }

  void skip_blanks() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  char peek() {
    skip_blanks();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char wanted) {
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  std::string word() {
    skip_blanks();
    const std::size_t begin = at_;
    const auto belongs = [&](char c) {
      // Two colons are part of a modifier, one ends a label.
      if (c == ':') return text_.substr(at_, 2) == "::" || (at_ > begin && text_[at_ - 1] == ':');
      return std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '%' || c == '-';
    };
    while (at_ < text_.size() && belongs(text_[at_])) ++at_;
    return std::string(text_.substr(begin, at_ - begin));
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::vector<Instruction> instructions_;
  std::map<std::string, int> registers_, labels_;
  std::vector<std::pair<std::size_t, std::string>> branches_;
};

std::uint64_t special_register(const std::string& name) {
  static std::uint64_t clock = 0;
  const Block& block = *current().warp->block;
  if (name == "tid.x") return current().index.x;
  if (name == "cluster_ctarank") return block.rank;
  if (name == "cluster_nctaid.x") return block.cluster.blocks.size();
  if (name == "globaltimer") return ++clock;
  fail(fmt::format("the emulator does not know the register %{}", name));
}

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

/// A NaN that instructions of PTX for fp32 make is 0x7fffffff, whatever NaN they are given.
float canonical(float x) { return std::isnan(x) ? std::bit_cast<float>(0x7fffffffu) : x; }

template <float (*function)(float)>
void unary(const Instruction& of, Frame& frame) {
  const float x = flushed(frame.get_float(of.arguments[1]));
  frame.set_float(of.arguments[0], canonical(flushed(function(x))));
}
float reciprocal_root(float x) { return 1 / std::sqrt(x); }
float reciprocal(float x) { return 1 / x; }

void do_nothing(const Instruction&, Frame&) {}

/// Global memory; the arguments' other parts are a vector or one value.
template <class T>
void load(const Instruction& of, Frame& frame) {
  const auto* from = reinterpret_cast<const T*>(device_memory(of, frame, 1));
  const Argument& to = of.arguments[0];
  if (to.kind != Argument::Kind::vector) return frame.set(to, *from);
  for (std::size_t i = 0; i < to.parts.size(); ++i) frame.set(to.parts[i], from[i]);
}
void store_words(const Instruction& of, Frame& frame) {
  auto* to = reinterpret_cast<unsigned*>(device_memory(of, frame, 0));
  const Argument& from = of.arguments[1];
  for (std::size_t i = 0; i < from.parts.size(); ++i) to[i] = static_cast<unsigned>(frame.get(from, i));
}
void store_shared_words(const Instruction& of, Frame& frame) {
  const Argument& from = of.arguments[1];
  const bool is_vector = from.kind == Argument::Kind::vector;
  const std::size_t count = is_vector ? from.parts.size() : 1;
  char* to = place(of, frame, 0).bytes(static_cast<unsigned>(4 * count));
  if (reinterpret_cast<std::uintptr_t>(to) % (4 * count) != 0)
    fail(of.opcode + " to an address that is not aligned");
  for (std::size_t i = 0; i < count; ++i) {
    const auto value =
        static_cast<unsigned>(is_vector ? frame.get(from, static_cast<int>(i)) : frame.get(from));
    std::memcpy(to + 4 * i, &value, 4);
  }
}
void add_floats(const Instruction& of, Frame& frame) {
  auto* to = reinterpret_cast<float*>(device_memory(of, frame, 0));
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0) fail("red.add.v4 to an address that is not aligned");
  reach_atomic();
  for (std::size_t i = 0; i < of.arguments[1].parts.size(); ++i)
    to[i] += frame.get_float(of.arguments[1].parts[i]);
}

std::uint64_t selected_bytes(std::uint64_t low, std::uint64_t high, std::uint64_t bytes) {
  const std::uint64_t all = (high << 32) | (low & 0xffffffff);
  std::uint64_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint64_t which = bytes >> (4 * i) & 15;
    std::uint64_t byte = all >> (8 * (which & 7)) & 255;
    if (which & 8) byte = byte >> 7 ? 255 : 0;
    word |= byte << (8 * i);
  }
  return word;
}

template <class Format>
std::uint64_t pair_of(const Instruction& of, const Frame& frame) {
  return Format::encode(frame.get_float(of.arguments[2])) |
         std::uint64_t{Format::encode(frame.get_float(of.arguments[1]))} << 16;
}

template <class Operation>
void fp16_pairs(const Instruction& of, Frame& frame) {
  const std::uint64_t a = frame.get(of.arguments[1]), b = frame.get(of.arguments[2]);
  std::uint64_t pair = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto value = [&](std::uint64_t bits) {
      return Fp16::decode(static_cast<std::uint16_t>(bits >> shift));
    };
    pair |= std::uint64_t{Fp16::encode(Operation{}(value(a), value(b)))} << shift;
  }
  frame.set(of.arguments[0], pair);
}

template <class Number>
void fma_of_pairs(const Instruction& of, Frame& frame) {
  std::uint64_t pair = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto value = [&](int argument) {
      const std::uint64_t bits = frame.get(of.arguments[argument]) >> shift;
      return static_cast<double>(Number::decode(static_cast<std::uint16_t>(bits)));
    };
    const double sum = value(1) * value(2) + value(3);
    pair |= std::uint64_t{Number::encode(static_cast<float>(sum))} << shift;
  }
  frame.set(of.arguments[0], pair);
}

void compare(const Instruction& of, Frame& frame) {
  const auto wide = [&](int i) {
    const std::uint64_t bits = frame.get(of.arguments[i]);
    return of.has("64") ? bits : bits & 0xffffffff;
  };
  bool result = false;
  if (of.opcode == "setp.lt.f32") {
    result = frame.get_float(of.arguments[1]) < frame.get_float(of.arguments[2]);
  } else if (of.has(".ne.")) {
    result = wide(1) != wide(2);
  } else if (of.has(".eq.")) {
    result = wide(1) == wide(2);
  } else if (of.opcode == "setp.le.u64") {
    result = wide(1) <= wide(2);
  } else {
    fail(fmt::format("the emulator does not know {}", of.opcode));
  }
  frame.set(of.arguments[0], result);
}

void elect(const Instruction& of, Frame& frame) {
  Warp& warp = *current().warp;
  warp.gather(&of, static_cast<unsigned>(frame.get(of.arguments[2])), nullptr,
              [](Warp&, const Brought&, unsigned) {});
  frame.set(of.arguments[1], static_cast<int>(warp.elected) == current().lane);
}

struct Known {
  std::string_view prefix;
  Execute execute;
};

const Known kArithmetic[] = {
    {"ex2.approx.ftz.f32", unary<std::exp2>},
    {"lg2.approx.ftz.f32", unary<std::log2>},
    {"sqrt.approx.ftz.f32", unary<std::sqrt>},
    {"rcp.approx.ftz.f32", unary<reciprocal>},
    {"rcp.approx.f32", unary<reciprocal>},
    {"rsqrt.approx.ftz.f32", unary<reciprocal_root>},
    {"tanh.approx.f32", unary<std::tanh>},
    {"div.full.ftz.f32",
     [](const Instruction& of, Frame& frame) {
       frame.set_float(of.arguments[0], flushed(flushed(frame.get_float(of.arguments[1])) /
                                                flushed(frame.get_float(of.arguments[2]))));
     }},
    {"max.NaN.f32",
     [](const Instruction& of, Frame& frame) {
       const float a = frame.get_float(of.arguments[1]), b = frame.get_float(of.arguments[2]);
       frame.set_float(of.arguments[0], std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b));
     }},
    {"prmt.b32",
     [](const Instruction& of, Frame& frame) {
       frame.set(of.arguments[0], selected_bytes(frame.get(of.arguments[1]), frame.get(of.arguments[2]),
                                                 frame.get(of.arguments[3])));
     }},
    {"lop3.b32",  // bit n of the table: what bits of the three that are n together become
     [](const Instruction& of, Frame& frame) {
       const std::uint64_t a = frame.get(of.arguments[1]), b = frame.get(of.arguments[2]),
                           c = frame.get(of.arguments[3]), table = frame.get(of.arguments[4]);
       std::uint64_t bits = 0;
       for (int i = 0; i < 32; ++i)
         bits |= (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i;
       frame.set(of.arguments[0], bits);
     }},
    {"cvt.f32.f16",
     [](const Instruction& of, Frame& frame) {
       frame.set_float(
           of.arguments[0],
           static_cast<float>(Fp16::decode(static_cast<std::uint16_t>(frame.get(of.arguments[1])))));
     }},
    {"cvt.rn.f16.f32",
     [](const Instruction& of, Frame& frame) {
       frame.set(of.arguments[0], Fp16::encode(frame.get_float(of.arguments[1])));
     }},
    {"cvt.u32.u16", [](const Instruction& of,
                       Frame& frame) { frame.set(of.arguments[0], frame.get(of.arguments[1]) & 0xffff); }},
    {"cvt.rn.f16x2.f32",
     [](const Instruction& of, Frame& frame) { frame.set(of.arguments[0], pair_of<Fp16>(of, frame)); }},
    {"cvt.rn.bf16x2.f32",
     [](const Instruction& of, Frame& frame) { frame.set(of.arguments[0], pair_of<Bf16>(of, frame)); }},
    {"cvt.rn.f16x2.e4m3x2",
     [](const Instruction& of, Frame& frame) {
       const std::uint64_t codes = frame.get(of.arguments[1]);
       const auto half = [&](int i) {
         return std::uint64_t{Fp16::encode(E4m3::decode(static_cast<std::uint8_t>(codes >> (8 * i))))};
       };
       frame.set(of.arguments[0], half(0) | half(1) << 16);
     }},
    {"cvt.rn.satfinite.e4m3x2.f32",
     [](const Instruction& of, Frame& frame) {
       const auto code = [&](int argument) {
         return std::uint64_t{E4m3::encode(frame.get_float(of.arguments[argument]))};
       };
       frame.set(of.arguments[0], code(2) | code(1) << 8);
     }},
    {"mul.f16x2", fp16_pairs<std::multiplies<>>},
    {"sub.f16x2", fp16_pairs<std::minus<>>},
    {"fma.rn.f16x2", fma_of_pairs<Fp16>},
    {"fma.rn.bf16x2", fma_of_pairs<Bf16>},
    {"setp.", compare},
    {"selp.u32",
     [](const Instruction& of, Frame& frame) {
       frame.set(of.arguments[0], frame.get(of.arguments[frame.get(of.arguments[3]) ? 1 : 2]));
     }},
    {"mov.b32",  // two halves of a word
     [](const Instruction& of, Frame& frame) {
       const std::uint64_t bits = frame.get(of.arguments[1]);
       for (std::size_t i = 0; i < 2; ++i) frame.set(of.arguments[0].parts.at(i), bits >> (16 * i) & 0xffff);
     }},
    {"mov.u",
     [](const Instruction& of, Frame& frame) { frame.set(of.arguments[0], frame.get(of.arguments[1])); }},
    {"add.s64",
     [](const Instruction& of, Frame& frame) {
       frame.set(of.arguments[0], frame.get(of.arguments[1]) + frame.get(of.arguments[2]));
     }},
    {"sub.u64",
     [](const Instruction& of, Frame& frame) {
       frame.set(of.arguments[0], frame.get(of.arguments[1]) - frame.get(of.arguments[2]));
     }},
};

const Known kMemory[] = {
    {"ld.global.nc.v4.u32", load<unsigned>},
    {"ld.relaxed.gpu.global.v2.s32",
     [](const Instruction& of, Frame& frame) {
       load<unsigned>(of, frame);
       reach_atomic();
     }},
    {"ld.acquire.gpu.global.s32",
     [](const Instruction& of, Frame& frame) {
       spin();
       load<unsigned>(of, frame);
     }},
    {"ld.acquire.gpu.global.u64",
     [](const Instruction& of, Frame& frame) {
       spin();
       load<std::uint64_t>(of, frame);
     }},
    {"st.global.v2.b32", store_words},
    {"st.global.v4.b32", store_words},
    {"st.shared.f32",
     [](const Instruction& of, Frame& frame) {
       const unsigned value = word(of, frame, 1);
       std::memcpy(place(of, frame, 0).bytes(4), &value, 4);
     }},
    {"st.shared.b32", store_shared_words},
    {"st.shared.v4.b32", store_shared_words},
    {"red.relaxed.gpu.global.add.v4.f32", add_floats},
    {"trap", [](const Instruction&, Frame&) { fail("a kernel trapped"); }},
    {"fence.proxy.async.shared::cta",
     [](const Instruction&, Frame&) { current().warp->block->shared.fence(current()); }},
    {"fence.", do_nothing},
    {"griddepcontrol.wait", [](const Instruction&, Frame&) { current().waited_for_prior_grid = true; }},
    {"griddepcontrol.launch_dependents", [](const Instruction&, Frame&) { let_next_grid_start(); }},
    {"prefetch.tensormap", do_nothing},
    {"prefetch.global.L2", do_nothing},
    {"setmaxnreg.", do_nothing},
};

const Known kSynchronisation[] = {
    {"bar.sync",
     [](const Instruction& of, Frame& frame) {
       current().warp->block->synchronise(static_cast<int>(word(of, frame, 0)),
                                          static_cast<int>(word(of, frame, 1)), true);
     }},
    {"bar.red.or.pred",
     [](const Instruction& of, Frame& frame) {
       Block& block = *current().warp->block;
       const int name = static_cast<int>(word(of, frame, 1));
       block.synchronise(name, static_cast<int>(word(of, frame, 2)), true, frame.get(of.arguments[3]) != 0);
       frame.set(of.arguments[0], block.barriers[name].last_holding > 0);
     }},
    {"bar.arrive",
     [](const Instruction& of, Frame& frame) {
       current().warp->block->synchronise(static_cast<int>(word(of, frame, 0)),
                                          static_cast<int>(word(of, frame, 1)), false);
     }},
    {"barrier.cluster.arrive", [](const Instruction&, Frame&) { arrive_at_cluster(); }},
    {"barrier.cluster.wait", [](const Instruction&, Frame&) { wait_for_cluster(); }},
    {"elect.sync", elect},
    {"mapa.shared::cluster.u32",
     [](const Instruction& of, Frame& frame) {
       frame.set(of.arguments[0], map_to_rank(word(of, frame, 1), word(of, frame, 2)));
     }},
    {"mbarrier.init.",
     [](const Instruction& of, Frame& frame) { barrier_init(place(of, frame, 0), word(of, frame, 1)); }},
    {"mbarrier.arrive.expect_tx.",
     [](const Instruction& of, Frame& frame) {
       reach_atomic();
       barrier_arrive(place(of, frame, 1), static_cast<int>(word(of, frame, 2)));
     }},
    {"mbarrier.arrive.",
     [](const Instruction& of, Frame& frame) {
       reach_atomic();
       barrier_arrive(place(of, frame, 1), 0);
     }},
    {"mbarrier.try_wait.parity.",
     [](const Instruction& of, Frame& frame) {
       barrier_wait(place(of, frame, 1), word(of, frame, 2));
       frame.set(of.arguments[0], 1);
     }},
    {"mbarrier.test_wait.parity.",
     [](const Instruction& of, Frame& frame) {
       spin();
       frame.set(of.arguments[0], barrier_is_complete(place(of, frame, 1), word(of, frame, 2)));
     }},
};

}  // namespace

std::uint64_t Frame::get(const Argument& argument) const {
  switch (argument.kind) {
    case Argument::Kind::operand: {
      const Operand& operand = operands[argument.index];
      if (!operand.variable) return operand.bits;
      std::uint64_t bits = 0;
      std::memcpy(&bits, operand.variable, operand.bytes);
      return bits;
    }
    case Argument::Kind::reg:
      return registers[argument.index];
    case Argument::Kind::immediate:
      return argument.bits;
    case Argument::Kind::special:
      return special_register(argument.name);
    default:
      fail("an operand of a PTX instruction is of the wrong kind");
  }
}

void Frame::set(const Argument& argument, std::uint64_t bits) {
  if (argument.kind == Argument::Kind::none) return;
  if (argument.kind == Argument::Kind::reg) {
    registers[argument.index] = bits;
  } else {
    std::memcpy(variable(argument), &bits, operands[argument.index].bytes);
  }
}

void* Frame::variable(const Argument& argument) const {
  if (argument.kind != Argument::Kind::operand || !operands[argument.index].variable)
    fail("a PTX instruction writes to what is no output of its asm statement");
  return operands[argument.index].variable;
}

Execute find_execution(const std::string& opcode) {
  for (const Execute found : {find_matrix_execution(opcode), find_copy_execution(opcode)})
    if (found) return found;
  const auto find = [&](const auto& table) -> Execute {
    for (const Known& known : table)
      if (opcode.starts_with(known.prefix)) return known.execute;
    return nullptr;
  };
  for (const Execute found : {find(kArithmetic), find(kMemory), find(kSynchronisation)})
    if (found) return found;
  fail(fmt::format("the emulator does not know the PTX instruction {}", opcode));
}

void execute(Statement& statement, const Operand* operands, unsigned) {
  current().statement = &statement;
  if (!statement.instructions) statement.instructions = new std::vector(Parser(statement.text).statement());
  const auto& instructions = *static_cast<const std::vector<Instruction>*>(statement.instructions);
  Frame frame{.operands = operands};
  for (std::size_t next = 0; next < instructions.size();) {
    const Instruction& instruction = instructions[next++];
    const bool guarded = instruction.guard.kind != Argument::Kind::none;
    if (guarded && (frame.get(instruction.guard) != 0) == instruction.guard_negated) continue;
    if (instruction.execute) {
      instruction.execute(instruction, frame);
    } else {
      next = static_cast<std::size_t>(instruction.target);
    }
  }
}

}  // namespace flashjit_emulator
