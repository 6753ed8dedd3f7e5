// Warp specialisation: the one thread of a warp that issues copies, and the registers that producer warps
// give to consumer warps.
#pragma once

namespace flashjit {

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

}  // namespace flashjit
