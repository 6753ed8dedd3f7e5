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

/// A function that multiplies tiles in shared memory: rows along the product's rows and columns ("0, 0"), or
/// along the summed dimension ("1, 1").
std::string from_shared(const std::string& name, const Product& product, const char* transposed) {
  return fmt::format(
      R"(  static __device__ __forceinline__ void {}(float (&c)[{}], unsigned long long a, unsigned long long b,
                                              int accumulate) {{
    asm volatile(
        "{{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, {}, 0;\n"
        "{} {}, {}, {}, p, 1, 1, {};\n"
        "}}\n"
        : {}
        : "l"(a), "l"(b), "r"(accumulate));
  }}
)",
      name, product.accumulators(), product.input(2), product.instruction(), product.registers(),
      product.input(0), product.input(1), transposed, product.outputs());
}

/// A function that adds the product of a left operand in registers and a tile in shared memory whose rows are
/// summed, or begins anew with it.
std::string from_registers(const std::string& name, const Product& product) {
  return fmt::format(
      R"(  static __device__ __forceinline__ void {}(float (&c)[{}], const unsigned (&a)[4],
                                              unsigned long long b, int accumulate) {{
    asm volatile(
        "{{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, {}, 0;\n"
        "{} {}, {{{}, {}, {}, {}}}, {}, p, 1, 1, 1;\n"
        "}}\n"
        : {}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
  }}
)",
      name, product.accumulators(), product.input(5), product.instruction(), product.registers(),
      product.input(0), product.input(1), product.input(2), product.input(3), product.input(4),
      product.outputs());
}

}  // namespace

std::string wgmma_functions(const AttentionSpec& spec, const TileConfig& config) {
  const DType dtype = spec.dtype;
  if (spec.pass == Pass::forward)
    return from_shared("multiply_scores", {dtype, config.bc}, "0, 0") +
           from_registers("multiply_output", {dtype, spec.v_dim()});
  const sm90::BackwardLayout layout = plan::sm90_backward_layout(spec, config);
  const int d = layout.columns(), dv = layout.columns_v();
  const int own = layout.wide() ? 2 : 1;  // shares of the queries of S and of the columns of dK and dV
  const auto gradient = [&](const char* name, int columns) {
    return layout.wide() ? from_shared(name, {dtype, columns / own}, "0, 1")
                         : from_registers(name, {dtype, columns});
  };
  return from_shared("multiply_scores", {dtype, config.br / own}, "0, 0") + gradient("multiply_dv", dv) +
         gradient("multiply_dk", d) + from_shared("multiply_dq", {dtype, layout.dq_columns()}, "1, 1");
}

}  // namespace flashjit::render
