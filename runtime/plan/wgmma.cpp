#include "plan/wgmma.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "plan/sm90.hpp"
#include "support/dtypes.hpp"

namespace flashjit::plan {
namespace {

/// One warpgroup's product of 64 rows, `columns` columns and a depth of 32 bytes, in the words of PTX.
class Product {
 public:
  Product(DType left, DType right, int columns) : left_(left), right_(right), columns_(columns) {}
  Product(DType dtype, int columns) : Product(dtype, dtype, columns) {}

  /// fp32 accumulators of a thread.
  int accumulators() const { return columns_ / 2; }
  std::string instruction() const {
    return fmt::format("wgmma.mma_async.sync.aligned.m64n{}k{}.f32.{}.{}", columns_, 32 / size_of(right_),
                       dtype_info(left_).mma_name, dtype_info(right_).mma_name);
  }
  /// The accumulators as operands, "{%0, %1, ...}".
  std::string registers() const {
    std::vector<std::string> names;
    for (int i = 0; i < accumulators(); ++i) names.push_back(operand(i));
    return fmt::format("{{{}}}", fmt::join(names, ", "));
  }
  /// Operands of the asm statement: the accumulators, read and written.
  std::string outputs() const {
    std::vector<std::string> constraints;
    for (int i = 0; i < accumulators(); ++i) constraints.push_back(fmt::format("\"+f\"(c[{}])", i));
    return fmt::format("{}", fmt::join(constraints, ", "));
  }
  /// The asm statement's input operand `index`.
  std::string input(int index) const { return operand(accumulators() + index); }

 private:
  static std::string operand(int index) { return fmt::format("%{}", index); }

  DType left_, right_;
  int columns_;
};

/// How far each step's operand is from the first step's, in the 16 bytes that descriptors count in.
using Offsets = std::vector<int>;

/// Tiles of `rows` rows whose `columns` columns of 16 bits are summed: four steps to a slice of 64.
Offsets along_columns(int rows, int columns) {
  Offsets offsets;
  for (int step = 0; step * 16 < columns; ++step)
    offsets.push_back((step / 4 * rows * sm90::kRowBytes + step % 4 * 32) / 16);
  return offsets;
}
/// Tiles whose `rows` rows are summed.
Offsets along_rows(int rows) {
  Offsets offsets;
  for (int row = 0; row < rows; row += 16) offsets.push_back(row * sm90::kRowBytes / 16);
  return offsets;
}

/// Where the left operand is: a tile in shared memory, or four words a step in registers.
enum class Left { shared, registers };

/// A product over several steps. `transposed`: "0, 0" where the tiles' rows are the product's, "1, 1" where
/// they are summed; of the right tile alone where the left operand is in registers; empty for codes, whose
/// rows are never summed.
struct Multiplication {
  Product product;
  Left left;
  const char* transposed;
  Offsets left_offsets, right_offsets;
};

/// The function: one asm statement for all steps; the first may overwrite the accumulators.
std::string function(const std::string& name, const Multiplication& of) {
  const int steps = static_cast<int>(of.right_offsets.size());
  std::vector<std::string> inputs, left;
  for (int step = 0; of.left == Left::registers && step < steps; ++step) {
    std::vector<std::string> words;
    for (int i = 0; i < 4; ++i) {
      words.push_back(of.product.input(static_cast<int>(inputs.size())));
      inputs.push_back(fmt::format("\"r\"(a[{}][{}])", step, i));
    }
    left.push_back(fmt::format("{{{}}}", fmt::join(words, ", ")));
  }
  if (of.left == Left::shared) inputs.emplace_back("\"l\"(a)");
  const int right = static_cast<int>(inputs.size());
  inputs.insert(inputs.end(), {"\"l\"(b)", "\"r\"(accumulate)"});

  std::string text = fmt::format(
      R"(  static __device__ __forceinline__ void {}(float (&c)[{}], {},
                                              unsigned long long b, int accumulate) {{
    asm volatile(
        "{{\n"
        ".reg .pred first, more;\n"
        ".reg .b64 left, right;\n"
        "setp.ne.b32 first, {}, 0;\n"
        "setp.eq.b32 more, 0, 0;\n"
)",
      name, of.product.accumulators(),
      of.left == Left::shared ? "unsigned long long a" : "const unsigned (*a)[4]",
      of.product.input(right + 1));
  for (int step = 0; step < steps; ++step) {
    if (of.left == Left::shared)
      text +=
          fmt::format("        \"add.s64 left, {}, {};\\n\"\n", of.product.input(0), of.left_offsets[step]);
    text += fmt::format("        \"add.s64 right, {}, {};\\n\"\n", of.product.input(right),
                        of.right_offsets[step]);
    text += fmt::format("        \"{} {}, {}, right, {}, 1, 1{}{};\\n\"\n", of.product.instruction(),
                        of.product.registers(), of.left == Left::shared ? "left" : left[step],
                        step == 0 ? "first" : "more", *of.transposed ? ", " : "", of.transposed);
  }
  return text + fmt::format("        \"}}\\n\"\n        : {}\n        : {});\n  }}\n", of.product.outputs(),
                            fmt::join(inputs, ", "));
}

/// The forward pass's products of codes. P is e4m3, and the tile of V is V^T.
std::string functions_of_codes(const AnalysedSpec& spec, const TileConfig& config) {
  const DType type = spec.kv_type();
  const int columns = sm90::tile_columns(spec.head_dim, true),
            parts = hopper::sums_tiles(spec) ? 1 : sm90::pv_parts(spec.v_dim(), true, true);
  return function("multiply_scores", {{type, config.bc},
                                      Left::shared,
                                      "",
                                      along_columns(sm90::kWarpgroupRows, columns),
                                      along_columns(config.bc, columns)}) +
         function("multiply_output", {{DType::e4m3, type, spec.v_dim() / parts},
                                      Left::registers,
                                      "",
                                      {},
                                      along_columns(spec.v_dim(), sm90::tile_columns(config.bc, true))});
}

}  // namespace

std::string wgmma_functions(const AnalysedSpec& spec, const TileConfig& config) {
  if (spec.prologue.q_codes) return functions_of_codes(spec, config);
  const DType dtype = hopper::multiplies_as_fp16(spec) ? DType::fp16 : spec.dtype;
  // `columns` of the product, from so many rows of the left tile and of the right one, over columns `dim`.
  const auto scores = [&](const char* name, int columns, int left_rows, int right_rows, int dim) {
    return function(name, {{dtype, columns},
                           Left::shared,
                           "0, 0",
                           along_columns(left_rows, dim),
                           along_columns(right_rows, dim)});
  };
  if (spec.pass == Pass::jvp)
    return scores("multiply_scores", config.bc, sm90::kWarpgroupRows, config.bc, 16) +
           function("multiply_output", {{dtype, spec.v_dim()}, Left::registers, "1", {}, along_rows(16)});
  if (spec.pass == Pass::forward) {
    const bool whole = sm90::has_whole_products(spec.v_dim(), false), shares_rows = config.d_split > 1;
    const int columns = sm90::own_columns(spec.v_dim(), config.d_split);
    const Product output(dtype,
                         columns / sm90::pv_parts(columns, hopper::converts(spec), false, config.min_blocks));
    std::string text =
        (hopper::holds_q(spec, config)
             ? function("multiply_scores",
                        {{dtype, config.bc}, Left::registers, "0", {}, along_columns(config.bc, 16)})
             : scores("multiply_scores", config.bc, sm90::kWarpgroupRows, config.bc,
                      whole && !shares_rows ? spec.head_dim : 16)) +
        function("multiply_output", {output, Left::registers, "1", {}, along_rows(whole ? config.bc : 16)});
    if (shares_rows)
      text += function("multiply_output_of_tile", {output, Left::shared, "0, 1",
                                                   along_columns(sm90::kWarpgroupRows, 16), along_rows(16)});
    return text;
  }
  const sm90::BackwardLayout layout = hopper::backward_layout(spec, config);
  const int own = layout.wide() ? 2 : 1;  // shares of the queries of S
  const auto transposed_scores = [&](const char* name, int dim) {
    return scores(name, layout.rows() / own, layout.keys(), layout.rows(), dim);
  };
  const auto gradient = [&](const char* name, int columns) {
    Multiplication product{{dtype, columns}, Left::registers, "1", {}, along_rows(layout.rows())};
    if (layout.wide()) {
      product.left = Left::shared;
      product.transposed = "0, 1";
      product.left_offsets = along_columns(layout.keys(), config.br);
    }
    return function(name, product);
  };
  const auto dq = [&](const char* name, int columns) {
    return function(
        name, {{dtype, columns}, Left::shared, "1, 1", along_rows(layout.keys()), along_rows(layout.keys())});
  };
  const int fifth = layout.fifth_slice();
  std::string text = transposed_scores("multiply_scores", layout.cta_dim()) +
                     transposed_scores("multiply_dp", layout.cta_dim_v()) +
                     gradient("multiply_dv", layout.wg_dim_v()) +
                     gradient("multiply_dk", layout.wg_dim() - fifth / 2) +
                     dq("multiply_dq", layout.dq_columns() - fifth / 4);
  if (fifth > 0) text += gradient("multiply_fifth_dk", fifth / 2) + dq("multiply_fifth_dq", fifth / 4);
  return text;
}

}  // namespace flashjit::plan
