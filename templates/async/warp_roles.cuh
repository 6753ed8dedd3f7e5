// Warp specialisation: the one thread of a warp that issues copies, and the registers that producer warps
// give to consumer warps.
#pragma once

namespace flashjit {

/// What the warpgroups of a CTA do from `first` on, until the next role begins: with so many registers a
/// thread, for which they give some back or take some.
struct WarpgroupRole {
  int first, registers;
  bool gives;
};

/// True for one thread of a full warp. ptxas recognises a branch on it as a single thread, and emits no loop
/// around each TMA instruction (../sm90/NOTES.md#order-of-a-step-registers).
__device__ __forceinline__ bool elected() {
  unsigned yes;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(yes));
  return yes != 0;
}

/// Gives registers of this warpgroup back; every warp of the group must execute it.
template <int kRegisters>
__device__ __forceinline__ void lower_register_limit() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
/// Takes registers that were given back, and waits until they are there.
template <int kRegisters>
__device__ __forceinline__ void raise_register_limit() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
/// Gives registers of this warpgroup back, or takes some, so that it has its role's number.
template <WarpgroupRole kRole>
__device__ __forceinline__ void set_register_limit() {
  if constexpr (kRole.gives)
    lower_register_limit<kRole.registers>();
  else
    raise_register_limit<kRole.registers>();
}

}  // namespace flashjit
