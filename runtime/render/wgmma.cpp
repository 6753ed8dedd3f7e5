#include "render/wgmma.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "plan/sm90.hpp"

namespace flashjit::render {
namespace {

/// One warp group's product of 64 rows, `columns` columns and depth 16, in the words of PTX.
class Product {
 public:
  Product(DType dtype, int columns) : dtype_(dtype), columns_(columns) {}

  /// fp32 accumulators of a thread.
  int accumulators() const { return columns_ / 2; }
  std::string instruction() const {
    const char* type = dtype_ == DType::fp16 ? "f16" : "bf16";
    return fmt::format("wgmma.mma_async.sync.aligned.m64n{}k16.f32.{}.{}", columns_, type, type);
  }
  /// The accumulators as operands, "{%0, %1, ...}".
  std::string registers() const {
    std::vector<std::string> names;
    for (int i = 0; i < accumulators(); ++i) names.push_back(operand(i));
    return fmt::format("{{{}}}", fmt::join(names, ", "));
  }
  /// Of the asm statement: the accumulators, read and written.
  std::string outputs() const {
    std::vector<std::string> constraints;
    for (int i = 0; i < accumulators(); ++i) constraints.push_back(fmt::format("\"+f\"(c[{}])", i));
    return fmt::format("{}", fmt::join(constraints, ", "));
  }
  /// The asm statement's input operand `index`.
  std::string input(int index) const { return operand(accumulators() + index); }

 private:
  static std::string operand(int index) { return fmt::format("%{}", index); }

  DType dtype_;
  int columns_;
};

/// How far each step's operand is from the first step's, in the 16 bytes that descriptors count in.
using Offsets = std::vector<int>;

/// Of tiles of `rows` rows whose `columns` columns are summed: four steps to a slice of 64.
Offsets along_columns(int rows, int columns) {
  Offsets offsets;
  for (int step = 0; step * 16 < columns; ++step)
    offsets.push_back((step / 4 * rows * sm90::kRowBytes + step % 4 * 32) / 16);
  return offsets;
}
/// Of tiles whose `rows` rows are summed.
Offsets along_rows(int rows) {
  Offsets offsets;
  for (int row = 0; row < rows; row += 16) offsets.push_back(row * sm90::kRowBytes / 16);
  return offsets;
}

/// The asm text of a product's steps. `left`: each step's left operand, none where it is a tile in shared
/// memory, which the first input describes. `right`: which input describes the right tile; the next says
/// whether the first step adds to the accumulators.
std::string text_of(const Product& product, const std::vector<std::string>& left, const Offsets& left_offsets,
                    int right, const Offsets& right_offsets, const char* transposed) {
  std::string text = fmt::format(
      R"(        "{{\n"
        ".reg .pred first, more;\n"
        ".reg .b64 left, right;\n"
        "setp.ne.b32 first, {}, 0;\n"
        "setp.eq.b32 more, 0, 0;\n"
)",
      product.input(right + 1));
  for (std::size_t step = 0; step < right_offsets.size(); ++step) {
    if (left.empty())
      text += fmt::format("        \"add.s64 left, {}, {};\\n\"\n", product.input(0), left_offsets[step]);
    text += fmt::format("        \"add.s64 right, {}, {};\\n\"\n", product.input(right), right_offsets[step]);
    text += fmt::format("        \"{} {}, {}, right, {}, 1, 1, {};\\n\"\n", product.instruction(),
                        product.registers(), left.empty() ? "left" : left[step], step == 0 ? "first" : "more",
                        transposed);
  }
  return text + "        \"}\\n\"\n";
}

/// A function that multiplies tiles in shared memory: rows along the product's rows and columns ("0, 0"), or
/// along the summed dimension ("1, 1").
std::string from_shared(const std::string& name, const Product& product, const char* transposed,
                        const Offsets& left = {0}, const Offsets& right = {0}) {
  return fmt::format(
      R"(  static __device__ __forceinline__ void {}(float (&c)[{}], unsigned long long a, unsigned long long b,
                                              int accumulate) {{
    asm volatile(
{}        : {}
        : "l"(a), "l"(b), "r"(accumulate));
  }}
)",
      name, product.accumulators(), text_of(product, {}, left, 1, right, transposed), product.outputs());
}

/// A function that adds the product of a left operand in registers, four words a step, and a tile in shared
/// memory whose rows are summed, or begins anew with it.
std::string from_registers(const std::string& name, const Product& product, const Offsets& right = {0}) {
  std::vector<std::string> left, inputs;
  for (int step = 0, word = 0; step < static_cast<int>(right.size()); ++step, word += 4) {
    left.push_back(fmt::format("{{{}, {}, {}, {}}}", product.input(word), product.input(word + 1),
                               product.input(word + 2), product.input(word + 3)));
    for (int i = 0; i < 4; ++i) inputs.push_back(fmt::format("\"r\"(a[{}][{}])", step, i));
  }
  return fmt::format(
      R"(  static __device__ __forceinline__ void {}(float (&c)[{}], const unsigned (*a)[4],
                                              unsigned long long b, int accumulate) {{
    asm volatile(
{}        : {}
        : {}, "l"(b), "r"(accumulate));
  }}
)",
      name, product.accumulators(), text_of(product, left, {}, static_cast<int>(inputs.size()), right, "1"),
      product.outputs(), fmt::join(inputs, ", "));
}

}  // namespace

std::string wgmma_functions(const AttentionSpec& spec, const TileConfig& config) {
  const DType dtype = spec.dtype;
  // A statement of all steps compiles sooner, by 6 to 12% of the backward pass. The forward pass, which ptxas
  // orders otherwise then, is up to 3% slower with it.
  if (spec.pass == Pass::forward)
    return from_shared("multiply_scores", {dtype, config.bc}, "0, 0") +
           from_registers("multiply_output", {dtype, spec.v_dim()});
  const sm90::BackwardLayout layout = plan::sm90_backward_layout(spec, config);
  const int own = layout.wide() ? 2 : 1;  // shares of the queries of S and of the columns of dK and dV
  const auto scores = [&](const char* name, int dim) {
    return from_shared(name, {dtype, config.br / own}, "0, 0", along_columns(layout.keys(), dim),
                       along_columns(config.br, dim));
  };
  const auto gradient = [&](const char* name, int columns) {
    const Product product(dtype, columns / own);
    return layout.wide() ? from_shared(name, product, "0, 1", along_columns(layout.keys(), config.br),
                                       along_rows(config.br))
                         : from_registers(name, product, along_rows(config.br));
  };
  return scores("multiply_scores", spec.head_dim) + scores("multiply_dp", spec.v_dim()) +
         gradient("multiply_dv", layout.columns_v()) + gradient("multiply_dk", layout.columns()) +
         from_shared("multiply_dq", {dtype, layout.dq_columns()}, "1, 1", along_rows(layout.keys()),
                     along_rows(layout.keys()));
}

}  // namespace flashjit::render
