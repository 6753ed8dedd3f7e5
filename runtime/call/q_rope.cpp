#include "call/q_rope.hpp"

#include "support/refuse.hpp"

namespace flashjit {

void check_q(const AttentionSpec& spec, const ConstTensorView& q, const ConstTensorView& q_rope,
             Sizes sizes) {
  if (!spec.prologue.q_rope && q_rope.data)
    refuse(
        "q_rope is given, but the spec has none: set spec.prologue.q_rope, and shared_kv, or leave it out.");
  if (spec.prologue.q_rope) {
    sizes[3].value = spec.head_dim - spec.v_dim();
    check_tensor("q_rope", q_rope, sizes, size_of(spec.dtype), Access::read);
    check_type("q_rope", q_rope, spec.dtype);
    sizes[3].value = spec.v_dim();
  }
  check_tensor("q", q, sizes, size_of(spec.q_type()), Access::read);
}

}  // namespace flashjit
