#include "call/captures.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "call/tensor_checks.hpp"
#include "support/overflow.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

using expr::Declaration;

std::string list(std::span<const Declaration> declared) {
  std::vector<std::string> texts;
  for (const Declaration& d : declared) texts.push_back(expr::to_string(d));
  return fmt::format("{}", fmt::join(texts, ", "));
}

/// `likely` is the index of the name if the captures are in the order of the declarations.
const Capture* find(std::span<const Capture> given, std::string_view name, std::size_t likely) {
  if (likely < given.size() && given[likely].name == name) return &given[likely];
  const auto found = std::ranges::find(given, name, &Capture::name);
  return found == given.end() ? nullptr : &*found;
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_missing(const Declaration& d,
                                                           std::span<const Capture> given) {
  std::vector<std::string_view> names;
  for (const Capture& capture : given) names.push_back(capture.name);
  refuse("the spec's programs declare '{}', but captures has no value for it; it names {}: give one.",
         expr::to_string(d), names.empty() ? "nothing" : fmt::format("{}", fmt::join(names, ", ")));
}

/// Says which capture is one too many; every declared name has one.
[[noreturn, gnu::cold, gnu::noinline]] void refuse_surplus(std::span<const Declaration> declared,
                                                           std::span<const Capture> given) {
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::string_view name = given[i].name;
    if (std::ranges::find(declared, name, &Declaration::name) == declared.end()) {
      if (declared.empty())
        refuse("captures gives '{}', but the spec's programs declare no names: leave it out.", name);
      refuse("captures gives '{}', which the spec's programs do not declare; they declare {}.", name,
             list(declared));
    }
    if (find(given.first(i), name, 0)) refuse("captures gives '{}' twice: give it once.", name);
  }
  throw Error(ErrorCode::internal, "captures has one value too many, but none is");
}

void check_scalar(const Declaration& d, const Capture& c) {
  if (c.rank != 0 || c.data)
    refuse("{} is given as a tensor, but the program declares '{}': give Capture::number().", d.name,
           expr::to_string(d));
  if (c.grad) refuse("{} has a grad, but it is a scalar: only captured tensors have gradients.", d.name);
  if (d.type == ElementType::int32) {
    constexpr double kLow = std::numeric_limits<std::int32_t>::min(),
                     kHigh = std::numeric_limits<std::int32_t>::max();
    if (!(c.scalar >= kLow && c.scalar <= kHigh) || c.scalar != std::trunc(c.scalar))
      refuse("{} is {}, but the program declares '{}': give an integer from -2^31 to 2^31 - 1.", d.name,
             c.scalar, expr::to_string(d));
  } else if (constexpr double kBeyond = 0x1.ffffffp127;  // from here on a float rounds to infinity
             std::isnan(c.scalar) || (std::isfinite(c.scalar) && std::fabs(c.scalar) >= kBeyond)) {
    refuse("{} is {}, but the program declares '{}': give a number that a float holds.", d.name, c.scalar,
           expr::to_string(d));
  }
}

void check_sizes(const Declaration& d, const Capture& c) {
  std::int64_t extent = 0;
  for (int i = 0; i < c.rank; ++i) {
    if (c.size[i] < 1 || c.size[i] > kMaxInt)
      refuse("{} has size {} in dimension {} of [{}]: give 1 to 2^31 - 1.", d.name, c.size[i], i,
             fmt::join(c.size.begin(), c.size.begin() + c.rank, ", "));
    if (c.size[i] == 1) continue;
    if (c.stride[i] < 0)
      refuse("{} has stride {} in dimension {}: strides must be 0 or more.", d.name, c.stride[i], i);
    std::int64_t span = 0;
    if (multiply_overflows(c.size[i] - 1, c.stride[i], span) || span > kMaxOffset - extent)
      refuse("{} reaches beyond 2^62 elements: sizes [{}] with strides [{}].", d.name,
             fmt::join(c.size.begin(), c.size.begin() + c.rank, ", "),
             fmt::join(c.stride.begin(), c.stride.begin() + c.rank, ", "));
    extent += span;
  }
}

void check_grad(const Declaration& d, const Capture& c, Pass pass) {
  if (c.grad && !d.wants_grad)
    refuse("{} has a grad, but the program declares '{}': write '{} grad' there or leave the grad out.",
           d.name, expr::to_string(d), expr::to_string(d));
  if (pass == Pass::forward || !d.wants_grad) return;
  if (!c.grad)
    refuse("{} has no grad, but the program declares '{}': give fp32 device memory of its sizes, {}.", d.name,
           expr::to_string(d), pass == Pass::jvp ? "with its tangent" : "zeroed");
  if (reinterpret_cast<std::uintptr_t>(c.grad) % alignof(float) != 0)
    refuse("the grad of {} is at {}, which is no multiple of 4 bytes: align its memory.", d.name,
           static_cast<const void*>(c.grad));
  std::int64_t elements = 1;
  for (int i = 0; i < c.rank; ++i)
    if (multiply_overflows(elements, c.size[i], elements) || elements > kMaxOffset)
      refuse("the grad of {} has more than 2^62 elements: its sizes are [{}].", d.name,
             fmt::join(c.size.begin(), c.size.begin() + c.rank, ", "));
}

void check_tensor(const Declaration& d, const Capture& c, Pass pass) {
  if (c.rank == 0 && !c.data)
    refuse("{} is given as the number {}, but the program declares '{}': give Capture::tensor().", d.name,
           c.scalar, expr::to_string(d));
  if (c.rank != d.rank)
    refuse("{} is given with {} dimensions, but the program declares '{}': give {}.", d.name, c.rank,
           expr::to_string(d), d.rank);
  if (c.type && *c.type != d.type)
    refuse("{} holds {}, but the program declares '{}': convert it or change the program.", d.name,
           to_string(*c.type), expr::to_string(d));
  check_sizes(d, c);
  if (!c.data) refuse("{} is null, but it has elements: give device memory.", d.name);
  if (reinterpret_cast<std::uintptr_t>(c.data) % size_of(d.type) != 0)
    refuse("{} is at {}, which is no multiple of its elements' {} bytes: align its memory.", d.name, c.data,
           size_of(d.type));
  check_grad(d, c, pass);
}

CaptureParam capture_param(const Capture& c, bool grad) {
  CaptureParam param{.data = c.data, .grad = grad ? c.grad : nullptr, .stride = {}, .size = {}};
  static_assert(std::size(param.size) == kMaxCaptureDims && std::size(param.stride) == kMaxCaptureDims);
  std::ranges::fill(param.size, 1);
  for (int i = 0; i < c.rank; ++i) {
    param.size[i] = static_cast<int>(c.size[i]);
    param.stride[i] = c.size[i] > 1 ? c.stride[i] : 0;
  }
  return param;
}

unsigned bits_of(const Declaration& d, double value) {
  if (d.type == ElementType::int32) return std::bit_cast<unsigned>(static_cast<std::int32_t>(value));
  return std::bit_cast<unsigned>(static_cast<float>(value));
}

}  // namespace

void check_captures(std::span<const Declaration> declared, std::span<const Capture> given, Pass pass) {
  for (std::size_t i = 0; i < declared.size(); ++i) {
    const Declaration& d = declared[i];
    const Capture* capture = find(given, d.name, i);
    if (!capture) refuse_missing(d, given);
    if (d.is_scalar())
      check_scalar(d, *capture);
    else
      check_tensor(d, *capture, pass);
  }
  if (given.size() != declared.size()) refuse_surplus(declared, given);
}

void set_captures(Params& params, std::span<const Declaration> declared, std::span<const Capture> given,
                  Pass pass) {
  int tensors = 0, scalars = 0;
  for (std::size_t i = 0; i < declared.size(); ++i) {
    const Declaration& d = declared[i];
    const Capture& capture = *find(given, d.name, i);
    if (d.is_scalar())
      params.scalars[scalars++] = bits_of(d, capture.scalar);
    else
      params.captures[tensors++] = capture_param(capture, d.wants_grad && pass != Pass::forward);
  }
}

std::vector<NamedPointer> with_captures(std::vector<NamedPointer> pointers,
                                        std::span<const Capture> captures) {
  for (const Capture& capture : captures) pointers.push_back({capture.name, capture.data});
  std::erase_if(pointers, [](const NamedPointer& named) { return named.pointer == nullptr; });
  return pointers;
}

}  // namespace flashjit
