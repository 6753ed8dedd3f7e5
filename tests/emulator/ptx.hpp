// The instructions of an asm statement, and their execution.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/emulator/machine.hpp"

namespace flashjit_emulator {

struct Argument {
  enum class Kind { none, operand, reg, immediate, special, vector, memory };
  Kind kind = Kind::none;
  int index = 0;                     ///< of the operand or the register
  std::uint64_t bits = 0;            ///< an immediate's
  std::string name = {};             ///< a special register's
  std::vector<Argument> parts = {};  ///< of a vector; of a memory operand: its address, then coordinates
};

struct Instruction;

/// A statement's values while it runs.
struct Frame {
  static constexpr int kMostRegisters = 8;

  const Operand* operands;
  std::uint64_t registers[kMostRegisters] = {};

  std::uint64_t get(const Argument& argument) const;
  void set(const Argument& argument, std::uint64_t bits);
  /// A part of a vector or a memory operand.
  std::uint64_t get(const Argument& argument, std::size_t part) const { return get(argument.parts[part]); }
  /// Where an output's variable is, for what becomes known later.
  void* variable(const Argument& argument) const;
  float get_float(const Argument& argument) const { return as<float>(static_cast<unsigned>(get(argument))); }
  void set_float(const Argument& argument, float value) { set(argument, as<unsigned>(value)); }
};

using Execute = void (*)(const Instruction&, Frame&);

struct Instruction {
  std::string opcode;  ///< "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
  std::vector<Argument> arguments;
  Execute execute = nullptr;  ///< null: a branch
  Argument guard;             ///< of "@p" or "@!p"
  bool guard_negated = false;
  int target = 0;  ///< a branch's

  bool has(std::string_view modifier) const { return opcode.find(modifier) != opcode.npos; }
};

/// An instruction's argument of 32 bits.
inline unsigned word(const Instruction& of, const Frame& frame, int argument) {
  return static_cast<unsigned>(frame.get(of.arguments[argument]));
}
/// The place of a memory operand whose address has 32 bits.
inline SharedPlace place(const Instruction& of, const Frame& frame, int argument) {
  return shared_place(static_cast<unsigned>(frame.get(of.arguments[argument], 0)));
}

/// Device memory that a memory operand of 64 bits names.
inline char* device_memory(const Instruction& of, const Frame& frame, int argument) {
  char* memory = reinterpret_cast<char*>(frame.get(of.arguments[argument], 0));
  touch_device_memory(memory);
  return memory;
}

/// How an instruction is executed; fails for one that the emulator does not know.
Execute find_execution(const std::string& opcode);
/// Among them those of matrices and of TMA; null: none of these.
Execute find_matrix_execution(const std::string& opcode);
Execute find_copy_execution(const std::string& opcode);

}  // namespace flashjit_emulator
