#include "device/nccl.hpp"

#include <fmt/format.h>

#include "flashjit/error.hpp"
#include "support/libraries.hpp"

namespace flashjit::device {

std::shared_ptr<const Nccl> Nccl::open(const std::string& library) {
  const std::string path = library.empty() ? library_names().nccl : library;
  if (path.empty())
    throw Error(ErrorCode::unsupported,
                "NCCL has no version for this system: sequences that GPUs share need Linux.");
  const auto [opened, problem] = open_library(path);
  void* const handle = opened;
  if (!handle)
    throw Error(ErrorCode::unsupported,
                fmt::format("NCCL cannot be opened ({}): install it (`pip install nvidia-nccl-cu13`, or the "
                            "package libnccl2), or set FLASHJIT_NCCL to the path of libnccl.so.2.",
                            problem));
  auto nccl = std::make_shared<Nccl>();
  const auto resolve = [&](auto& member, const char* symbol) {
    member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(find_symbol(handle, symbol));
    if (!member)
      throw Error(ErrorCode::unsupported,
                  fmt::format("{} has no {}: flashjit needs NCCL 2.7 or newer.", path, symbol));
  };
  resolve(nccl->get_error_string, "ncclGetErrorString");
  resolve(nccl->comm_count, "ncclCommCount");
  resolve(nccl->comm_user_rank, "ncclCommUserRank");
  resolve(nccl->group_start, "ncclGroupStart");
  resolve(nccl->group_end, "ncclGroupEnd");
  resolve(nccl->send, "ncclSend");
  resolve(nccl->recv, "ncclRecv");
  resolve(nccl->all_gather, "ncclAllGather");
  resolve(nccl->reduce_scatter, "ncclReduceScatter");
  return nccl;
}

void Nccl::check(int result, std::string_view what) const {
  if (result != kSuccess)
    throw Error(ErrorCode::cuda, fmt::format("{} failed: {} ({}). Where a rank has ended, its peers learn "
                                             "it so: abort the communicator.",
                                             what, get_error_string(result), result));
}

}  // namespace flashjit::device
