// Programs as a list of operations: what evaluation, analysis and the emitted code go through.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "flashjit/expr.hpp"

namespace flashjit::expr {

/// What a value depends on; bits. An element of O, Q or K counts as a score, its column as a key.
enum Uses : unsigned { kUsesScore = 1, kUsesBatch = 2, kUsesHead = 4, kUsesQ = 8, kUsesKv = 16 };

/// Each operation comes after its operands, and equal operations occur once.
class Graph {
 public:
  struct Item {
    NodePtr node;           ///< its arguments are given by `args`
    std::vector<int> args;  ///< places of the operands
    unsigned uses;          ///< Uses
  };

  /// The place of the tree's root; what is new is added behind.
  int add(const NodePtr& node);

  int size() const { return static_cast<int>(items_.size()); }
  const Item& operator[](int place) const { return items_[place]; }
  const Node& node(int place) const { return *items_[place].node; }
  unsigned uses(int place) const { return items_[place].uses; }
  /// Depends on neither score nor positions: the same for all pairs of a head.
  bool uniform(int place) const { return !(uses(place) & (kUsesScore | kUsesQ | kUsesKv)); }
  bool uses_positions(int place) const { return uses(place) & (kUsesQ | kUsesKv); }

 private:
  using Key = std::tuple<Op, Type, Name, std::uint32_t, std::string, std::vector<int>>;

  std::vector<Item> items_;
  std::map<Key, int> places_;
  std::map<NodePtr, int> seen_;  // trees share nodes
};

}  // namespace flashjit::expr
