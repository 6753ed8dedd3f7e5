// Instructions that a warp executes together on matrices: ldmatrix, stmatrix, movmatrix, mma and wgmma.
#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "support/small_float.hpp"
#include "tests/emulator/ptx.hpp"

namespace flashjit_emulator {
namespace {

using Element = std::uint16_t;

/// Floats of all patterns of bits.
template <class Format>
const std::vector<float>& floats_of() {
  static const std::vector<float> all = [] {
    std::vector<float> values(1 << Format::kBits);
    for (unsigned bits = 0; bits < values.size(); ++bits)
      values[bits] = static_cast<float>(Format::decode(static_cast<typename Format::Bits>(bits)));
    return values;
  }();
  return all;
}
/// Values of the bits of one of mma's operands: 0 the left one, 1 the right one.
const float* floats_of_operand(const Instruction& of, int operand) {
  const std::string_view types = std::string_view(of.opcode).substr(of.opcode.find(".f32.") + 5);
  const std::string_view type = operand == 0 ? types : types.substr(types.find('.') + 1);
  if (type.starts_with("e4m3")) return floats_of<flashjit::E4m3>().data();
  if (type.starts_with("e5m2")) return floats_of<flashjit::E5m2>().data();
  return (type.starts_with("bf16") ? floats_of<flashjit::Bf16>() : floats_of<flashjit::Fp16>()).data();
}

/// What one lane brings to an instruction.
struct Lane {
  const Instruction* instruction;
  Frame* frame;

  std::uint64_t get(int argument) const { return frame->get(instruction->arguments[argument]); }
  std::uint64_t get(int argument, int part) const {
    return frame->get(instruction->arguments[argument], part);
  }
};
const Lane& lane_of(const Brought& brought, int lane) { return *static_cast<const Lane*>(brought[lane]); }

template <Together act>
void together(const Instruction& of, Frame& frame) {
  Lane lane{&of, &frame};
  current().warp->gather(&of, kAllLanes, &lane, [](Warp& warp, const Brought& brought, unsigned lanes) {
    if (lanes != kAllLanes)
      fail(lane_of(brought, std::countr_zero(lanes)).instruction->opcode + " by part of a warp");
    act(warp, brought, lanes);
  });
}

/// Rows of 8 elements at the addresses that lanes 8i to 8i + 7 bring for matrix i.
char* matrix_row(const Brought& brought, int argument, int matrix, int row) {
  const auto address = static_cast<unsigned>(lane_of(brought, 8 * matrix + row).get(argument, 0));
  if (address % 16 != 0) fail(fmt::format("a row of a matrix at {:#x}", address));
  return shared_place(address).bytes(16);
}

void load_matrices(Warp&, const Brought& brought, unsigned) {
  const Instruction& of = *lane_of(brought, 0).instruction;
  const bool transposed = of.has(".trans");
  const int matrices = of.has(".x2") ? 2 : 4;
  for (int matrix = 0; matrix < matrices; ++matrix) {
    std::array<std::array<Element, 8>, 8> values;
    for (int row = 0; row < 8; ++row)
      std::memcpy(values[row].data(), matrix_row(brought, 1, matrix, row), 16);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      const auto at = [&](int c) { return transposed ? values[c][row] : values[row][c]; };
      const Lane& own = lane_of(brought, lane);
      own.frame->set(of.arguments[0].parts[matrix], at(column) | unsigned{at(column + 1)} << 16);
    }
  }
}

void store_matrices(Warp& warp, const Brought& brought, unsigned) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto pair = static_cast<unsigned>(lane_of(brought, lane).get(1, matrix));
      char* to = matrix_row(brought, 0, matrix, lane / 4) + lane % 4 * 4;
      std::memcpy(to, &pair, 4);
      SharedMemory& shared = warp.block->shared;
      shared.note_write(shared.offset(to), 4, warp.lanes[lane]);
    }
  }
}

/// Of a matrix in registers, a word a lane.
void transpose_matrix(Warp&, const Brought& brought, unsigned) {
  std::array<std::array<Element, 8>, 8> values;
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto word = static_cast<unsigned>(lane_of(brought, lane).get(1));
    values[lane / 4][lane % 4 * 2] = static_cast<Element>(word);
    values[lane / 4][lane % 4 * 2 + 1] = static_cast<Element>(word >> 16);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = lane / 4, column = lane % 4 * 2;
    const Lane& own = lane_of(brought, lane);
    own.frame->set(own.instruction->arguments[0],
                   values[column][row] | unsigned{values[column + 1][row]} << 16);
  }
}

constexpr int kRows = 16, kDepth = 16;  // of 16-bit elements; of codes twice as many
template <int depth>
using LeftOf = std::array<std::array<float, depth>, kRows>;

/// Calls use(place, bits) for the elements of a lane's word, of which eight in a row have `depth`.
template <int depth, class Use>
void for_each_element(unsigned word, int first_word, Use use) {
  constexpr int kCount = depth / 8, kBits = 32 / kCount;
  for (int i = 0; i < kCount; ++i) use(first_word * kCount + i, word >> i * kBits & ((1u << kBits) - 1));
}

/// The left operand that lanes hold in `words` words each: four, or two of half as many columns, and the
/// others are zeros.
template <int depth>
LeftOf<depth> left_of(const float* floats, const Brought& brought, int argument, int words = 4) {
  LeftOf<depth> left{};
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < words; ++i)
      for_each_element<depth>(
          static_cast<unsigned>(lane_of(brought, lane).get(argument, i)), lane % 4 + i / 2 * 4,
          [&](int column, unsigned bits) { left[lane / 4 + i % 2 * 8][column] = floats[bits]; });
  return left;
}

/// Adds the product to `sums`, 16 rows of `columns`; so is `right`.
template <std::size_t depth>
void multiply(const std::array<std::array<float, depth>, kRows>& left, const float* right, float* sums,
              int columns) {
  for (int row = 0; row < kRows; ++row) {
    float* sum = sums + row * columns;
    for (std::size_t k = 0; k < depth; ++k) {
      const float factor = left[row][k];
      const float* with = right + k * columns;
      for (int column = 0; column < columns; ++column) sum[column] += factor * with[column];
    }
  }
}

/// Calls use(lane, number of its accumulator, row, column).
template <class Use>
void for_each_accumulator(int columns, Use use) {
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < columns / 2; ++i)
      use(lane, i, lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
}

template <int depth, int words = 4>
void multiply_in_registers(Warp&, const Brought& brought, unsigned) {
  constexpr int kColumns = 8;
  const Instruction& of = *lane_of(brought, 0).instruction;
  const float* floats = floats_of_operand(of, 1);
  std::array<float, depth * kColumns> right{};
  std::array<float, kRows * kColumns> sums;
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < words / 2; ++i)
      for_each_element<depth>(static_cast<unsigned>(lane_of(brought, lane).get(2, i)), lane % 4 + i * 4,
                              [&](int k, unsigned bits) { right[k * kColumns + lane / 4] = floats[bits]; });
  for_each_accumulator(kColumns, [&](int lane, int i, int row, int column) {
    sums[row * kColumns + column] = as<float>(static_cast<unsigned>(lane_of(brought, lane).get(3, i)));
  });
  multiply(left_of<depth>(floats_of_operand(of, 0), brought, 1, words), right.data(), sums.data(), kColumns);
  for_each_accumulator(kColumns, [&](int lane, int i, int row, int column) {
    lane_of(brought, lane).frame->set_float(of.arguments[0].parts[i], sums[row * kColumns + column]);
  });
}

/// A tile of shared memory that wgmma's descriptor names, with rows of 128 bytes, swizzled. `depth` is the
/// product's, of 32 bytes.
template <int depth>
struct Tile {
  static constexpr unsigned kBytes = 32 / depth;  // of an element
  static constexpr unsigned kColumns = 128 / kBytes;
  Block* block;
  unsigned address, slice_bytes, eight_rows_bytes;
  bool transposed;  ///< its rows are the depth

  Tile(Block* block, std::uint64_t descriptor, bool transposed)
      : block(block),
        address((descriptor & 0x3fff) << 4),
        slice_bytes((descriptor >> 16 & 0x3fff) << 4),
        eight_rows_bytes((descriptor >> 32 & 0x3fff) << 4),
        transposed(transposed) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
      fail(fmt::format("the emulator does not know the layout of wgmma's descriptor {:#x}", descriptor));
  }
  Element at(unsigned row_of_product, unsigned k) const {
    const unsigned row = transposed ? k : row_of_product, column = transposed ? row_of_product : k;
    const unsigned slice = transposed ? column / kColumns : 0;
    const unsigned plain = address + slice * slice_bytes + row / 8 * eight_rows_bytes + row % 8 * 128 +
                           (column - slice * kColumns) * kBytes;
    const unsigned swizzled = plain ^ (plain >> 7 & 7) << 4;
    Element bits = 0;
    std::memcpy(&bits, block->shared.read_async(swizzled, kBytes), kBytes);
    return bits;
  }
};

/// One warp's 16 rows of a product, with all that it needs once its operands' registers have changed.
template <int depth>
struct Product {
  const float *left_floats, *right_floats;
  int columns;
  bool accumulates;
  std::optional<Tile<depth>> left_tile;
  LeftOf<depth> left;
  unsigned first_row;  ///< of the left tile
  Tile<depth> right_tile;
  std::vector<std::array<float*, kLanes>> accumulators;

  void operator()() {
    if (left_tile)
      for (unsigned row = 0; row < kRows; ++row)
        for (unsigned k = 0; k < depth; ++k) left[row][k] = left_floats[left_tile->at(first_row + row, k)];
    std::vector<float> right(depth * columns), sums(kRows * columns);
    for (int k = 0; k < depth; ++k)
      for (int column = 0; column < columns; ++column)
        right[k * columns + column] = right_floats[right_tile.at(column, k)];
    if (accumulates)
      for_each_accumulator(columns, [&](int lane, int i, int row, int column) {
        sums[row * columns + column] = *accumulators[i][lane];
      });
    multiply(left, right.data(), sums.data(), columns);
    for_each_accumulator(columns, [&](int lane, int i, int row, int column) {
      *accumulators[i][lane] = sums[row * columns + column];
    });
  }
};

/// wgmma's operands: the accumulators, the left operand, the right one, whether it accumulates, the signs of
/// both, and for each operand of 16 bits in shared memory whether its tile's rows are the depth.
template <int depth>
void start_product(Warp& warp, const Brought& brought, unsigned) {
  const Lane& first = lane_of(brought, 0);
  const Instruction& of = *first.instruction;
  const bool left_in_registers = of.arguments[1].kind == Argument::Kind::vector;
  constexpr bool kHasTransposed = depth == kDepth;
  constexpr std::size_t kTransposed = 6;
  const std::size_t flags = !kHasTransposed ? 0 : left_in_registers ? 1 : 2;
  const auto transposed = [&](std::size_t flag) {
    return kHasTransposed && first.get(kTransposed + flag) != 0;
  };
  if (of.arguments.size() != kTransposed + flags || first.get(4) != 1 || first.get(5) != 1)
    fail(fmt::format("the emulator does not know these operands of {}", of.opcode));
  const unsigned warp_in_group = current().index.x / kLanes % 4;
  Product<depth> product{.left_floats = floats_of_operand(of, 0),
                         .right_floats = floats_of_operand(of, 1),
                         .columns = static_cast<int>(2 * of.arguments[0].parts.size()),
                         .accumulates = first.get(3) != 0,
                         .left_tile = {},
                         .left = {},
                         .first_row = warp_in_group * kRows,
                         .right_tile = {warp.block, first.get(2), transposed(left_in_registers ? 0 : 1)},
                         .accumulators = {}};
  if (!of.has(fmt::format("m64n{}k{}.", product.columns, depth)))
    fail(fmt::format("too few accumulators of {}", of.opcode));
  if (left_in_registers) {
    product.left = left_of<depth>(product.left_floats, brought, 1);
  } else {
    product.left_tile.emplace(warp.block, first.get(1), transposed(0));
  }
  for (const Argument& accumulator : of.arguments[0].parts) {
    auto& places = product.accumulators.emplace_back();
    for (int lane = 0; lane < kLanes; ++lane)
      places[lane] = static_cast<float*>(lane_of(brought, lane).frame->variable(accumulator));
  }
  warp.products.open.emplace_back(std::move(product));
}

void commit_products(Warp& warp, const Brought&, unsigned) {
  warp.products.commit();
  if (random_below(2) == 0) warp.products.complete(warp.products.committed);
  for (Fiber* fiber : std::exchange(warp.block->waiting_for_products, {})) wake(*fiber);
}

/// A product is the whole warpgroup's: when one warp has waited for it, no other reads its operands any more.
void wait_for_products(const Instruction& of, Frame& frame) {
  constexpr unsigned kWarps = 4;
  const Fiber& fiber = current();
  Block& block = *fiber.warp->block;
  const std::uint64_t committed = fiber.warp->products.committed, pending = frame.get(of.arguments[0]);
  const std::uint64_t number = committed > pending ? committed - pending : 0;
  const unsigned first = fiber.index.x / kLanes / kWarps * kWarps;
  for (unsigned w = first; w < first + kWarps; ++w) {
    while (block.warps[w].products.committed < number) {
      block.waiting_for_products.push_back(&current());
      park({"products of wgmma that warp {} has not committed", w});
    }
    block.warps[w].products.complete(number);
  }
}

}  // namespace

Execute find_matrix_execution(const std::string& opcode) {
  const auto is = [&](std::string_view prefix) { return opcode.starts_with(prefix); };
  if (is("ldmatrix.sync.aligned.m8n8.x4.") || is("ldmatrix.sync.aligned.m8n8.x2.shared."))
    return together<load_matrices>;
  if (is("movmatrix.sync.aligned.m8n8.trans.b16")) return together<transpose_matrix>;
  if (is("stmatrix.sync.aligned.m8n8.x4.shared.b16")) return together<store_matrices>;
  if (is("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") ||
      is("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"))
    return together<multiply_in_registers<kDepth>>;
  if (is("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"))
    return together<multiply_in_registers<kDepth, 2>>;
  if (is("mma.sync.aligned.m16n8k32.row.col.f32.e")) return together<multiply_in_registers<2 * kDepth>>;
  if (is("wgmma.mma_async.sync.aligned.m64n")) {
    if (opcode.find("k32.") != std::string::npos) return together<start_product<2 * kDepth>>;
    return together<start_product<kDepth>>;
  }
  if (is("wgmma.commit_group.")) return together<commit_products>;
  if (is("wgmma.wait_group.")) return wait_for_products;
  if (is("wgmma.fence.")) return [](const Instruction&, Frame&) {};
  return nullptr;
}

}  // namespace flashjit_emulator
