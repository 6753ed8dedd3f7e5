// Asynchronous copies: cp.async, bulk copies and TMA.
#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "tests/emulator/ptx.hpp"
#include "tests/emulator/tensor_map.hpp"

namespace flashjit_emulator {
namespace {

void check_multiple(const Instruction& of, std::uint64_t number, unsigned unit) {
  if (number % unit != 0)
    fail(fmt::format("{} with {:#x}, which is no multiple of {}", of.opcode, number, unit));
}
void check_multiple(const Instruction& of, const void* pointer, unsigned unit) {
  check_multiple(of, reinterpret_cast<std::uintptr_t>(pointer), unit);
}

/// Ends the thread's group, and does now what it might do later.
void commit(Groups& groups) {
  groups.emplace_back();
  if (random_below(4) == 0) complete(groups, 0);
}

/// "cp.async.cg.shared.global [to], [from], bytes, bytes to read": the others are zeros.
void copy_async(const Instruction& of, Frame& frame) {
  const unsigned bytes = word(of, frame, 2);
  const unsigned read = of.arguments.size() > 3 ? word(of, frame, 3) : bytes;
  const SharedPlace to = place(of, frame, 0);
  const char* from = device_memory(of, frame, 1);
  check_multiple(of, to.offset, bytes);
  check_multiple(of, from, bytes);
  to.bytes(bytes);
  current().copies.back().emplace_back([=] {
    char* target = to.bytes(bytes);
    std::memset(target, 0, bytes);
    std::memcpy(target, from, read);
    to.block->shared.note_copy(to.offset, bytes);
  });
}

/// "cp.async.mbarrier.arrive.noinc [barrier]": an arrival when all of the thread's cp.async have happened.
void arrive_after_copies(const Instruction& of, Frame& frame) {
  const SharedPlace barrier = place(of, frame, 0);
  Groups groups = std::exchange(current().copies, Groups(1));
  groups.emplace_back();
  start_copy(*barrier.block, [barrier, groups = std::move(groups)]() mutable {
    complete(groups, 0);
    barrier_arrive(barrier, 0);
  });
}

/// "cp.async.bulk ... mbarrier::complete_tx [to], [from], bytes, [barrier]" to shared memory.
void copy_line(const Instruction& of, Frame& frame) {
  const SharedPlace to = place(of, frame, 0), barrier = place(of, frame, 3);
  const unsigned bytes = word(of, frame, 2);
  const bool from_shared = of.has(".shared::cta.");
  const SharedPlace shared_source = from_shared ? place(of, frame, 1) : SharedPlace{};
  const char* from = from_shared ? shared_source.bytes(bytes) : device_memory(of, frame, 1);
  check_multiple(of, to.offset, 16);
  check_multiple(of, from, 16);
  check_multiple(of, bytes, 16);
  start_copy(*to.block, [=] {
    if (from_shared) shared_source.read_async(bytes);
    std::memcpy(to.write_async(bytes), from, bytes);
    barrier_complete(barrier, static_cast<int>(bytes));
  });
}

/// "st.async ... mbarrier::complete_tx [to], value or {values}, [barrier]".
void store_async(const Instruction& of, Frame& frame) {
  const SharedPlace to = place(of, frame, 0), barrier = place(of, frame, 2);
  const Argument& from = of.arguments[1];
  std::vector<unsigned> words;
  if (from.kind == Argument::Kind::vector) {
    for (std::size_t i = 0; i < from.parts.size(); ++i)
      words.push_back(static_cast<unsigned>(frame.get(from, i)));
  } else {
    words.push_back(word(of, frame, 1));
  }
  const auto bytes = static_cast<unsigned>(4 * words.size());
  check_multiple(of, to.offset, bytes);
  start_copy(*to.block, [=] {
    std::memcpy(to.write_async(bytes), words.data(), bytes);
    barrier_complete(barrier, static_cast<int>(bytes));
  });
}

/// "cp.reduce.async.bulk ... add.f32 [to], [from], bytes" from shared memory.
void add_line(const Instruction& of, Frame& frame) {
  auto* to = reinterpret_cast<float*>(device_memory(of, frame, 0));
  const SharedPlace from = place(of, frame, 1);
  const unsigned bytes = word(of, frame, 2);
  check_multiple(of, to, 16);
  check_multiple(of, from.offset, 16);
  check_multiple(of, bytes, 16);
  from.bytes(bytes);
  current().bulk_copies.back().emplace_back([=] {
    const auto* values = reinterpret_cast<const float*>(from.read_async(bytes));
    for (unsigned i = 0; i < bytes / 4; ++i) to[i] += values[i];
  });
}

/// A box of a tensor and where it is in shared memory.
class Box {
 public:
  /// The memory operand is a map's address, then the coordinates of the box's first element.
  Box(const Instruction& of, const Frame& frame, int argument, SharedPlace in) : in_(in) {
    const Argument& tensor = of.arguments[argument];
    std::memcpy(&map_, reinterpret_cast<const void*>(frame.get(tensor, 0)), sizeof map_);
    if (map_.dimensions == 0 || map_.dimensions + 1u != tensor.parts.size())
      fail(fmt::format("{} with a map of {} dimensions", of.opcode, map_.dimensions));
    check_multiple(of, in.offset, 128);
    for (unsigned i = 0; i < map_.dimensions; ++i) first_[i] = static_cast<int>(frame.get(tensor, i + 1));
    in.bytes(bytes());
  }

  const void* data() const { return map_.data; }
  unsigned bytes() const { return rows() * row_bytes(); }
  /// Elements outside of the tensor are zeros.
  void load() const {
    for_each_element([this](SharedPlace shared, const char* global) {
      char* to = shared.write_async(element_bytes());
      std::memset(to, 0, element_bytes());
      if (global) std::memcpy(to, global, element_bytes());
    });
  }
  /// Elements outside of the tensor are dropped.
  void store() const {
    for_each_element([this](SharedPlace shared, char* global) {
      if (global) std::memcpy(global, shared.read_async(element_bytes()), element_bytes());
    });
  }

 private:
  unsigned element_bytes() const { return static_cast<unsigned>(map_.strides[0]); }
  unsigned row_bytes() const { return map_.box[0] * element_bytes(); }
  unsigned rows() const {
    unsigned count = 1;
    for (unsigned i = 1; i < map_.dimensions; ++i) count *= map_.box[i];
    return count;
  }
  template <class Use>
  void for_each_element(Use use) const {
    for (unsigned row = 0; row < rows(); ++row) {
      char* start = map_.data;
      bool inside = true;
      for (unsigned i = 1, rest = row; i < map_.dimensions; rest /= map_.box[i], ++i) {
        const long long at = first_[i] + static_cast<long long>(rest % map_.box[i]);
        inside = inside && at >= 0 && at < map_.sizes[i];
        if (inside) start += at * static_cast<long long>(map_.strides[i]);
      }
      for (unsigned column = 0; column < map_.box[0]; ++column) {
        const long long at = first_[0] + static_cast<long long>(column);
        const unsigned plain = in_.offset + row * row_bytes() + column * element_bytes();
        const unsigned swizzle = element_bytes() == 2 ? (plain >> 7 & 7) << 4 : 0;
        const SharedPlace swizzled{in_.block, plain ^ swizzle};
        const bool exists = inside && at >= 0 && at < map_.sizes[0];
        use(swizzled, exists ? start + at * element_bytes() : nullptr);
      }
    }
  }

  TensorMap map_;
  std::array<int, TensorMap::kMostDimensions> first_{};
  SharedPlace in_;
};

/// "cp.async.bulk.tensor ... mbarrier::complete_tx [to], [map, {coordinates}], [barrier]".
void load_box(const Instruction& of, Frame& frame) {
  const SharedPlace to = place(of, frame, 0), barrier = place(of, frame, 2);
  const Box from(of, frame, 1, to);
  touch_input(from.data());
  start_copy(*to.block, [barrier, box = from] {
    box.load();
    barrier_complete(barrier, static_cast<int>(box.bytes()));
  });
}
/// "cp.async.bulk.tensor ... bulk_group [map, {coordinates}], [from]".
void store_box(const Instruction& of, Frame& frame) {
  const Box to(of, frame, 0, place(of, frame, 1));
  touch_device_memory(to.data());
  current().bulk_copies.back().emplace_back([box = to] { box.store(); });
}

}  // namespace

Execute find_copy_execution(const std::string& opcode) {
  const auto is = [&](std::string_view prefix) { return opcode.starts_with(prefix); };
  if (is("cp.async.cg.shared.global") || is("cp.async.ca.shared.global")) return copy_async;
  if (is("cp.async.mbarrier.arrive.noinc.shared")) return arrive_after_copies;
  if (is("cp.async.commit_group")) return [](const Instruction&, Frame&) { commit(current().copies); };
  if (is("cp.async.wait_group"))
    return [](const Instruction& of, Frame& frame) { complete(current().copies, word(of, frame, 0)); };
  if (is("cp.async.bulk.commit_group"))
    return [](const Instruction&, Frame&) { commit(current().bulk_copies); };
  if (is("cp.async.bulk.wait_group"))
    return [](const Instruction& of, Frame& frame) { complete(current().bulk_copies, word(of, frame, 0)); };
  if (is("cp.async.bulk.tensor.")) return opcode.find(".bulk_group") == opcode.npos ? load_box : store_box;
  if (is("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes") ||
      is("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"))
    return copy_line;
  if (is("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32")) return add_line;
  if (is("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.")) return store_async;
  return nullptr;
}

}  // namespace flashjit_emulator
