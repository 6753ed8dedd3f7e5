#include "plan/family.hpp"

#include <array>

namespace flashjit::plan {

std::span<const FamilyTraits> families() {
  static const std::array<FamilyTraits, 4> kFamilies{sm90_traits(), sm80_traits(), sm75_traits(),
                                                     simt_traits()};
  return kFamilies;
}

const FamilyTraits& traits(Family family) {
  for (const FamilyTraits& candidate : families()) {
    if (candidate.family == family) return candidate;
  }
  throw Error(ErrorCode::internal, "no traits for the kernel family " + to_string(family));
}

}  // namespace flashjit::plan
