// The C interface of attention over shared sequences.
#include <fmt/format.h>

#include "api/c_arguments.hpp"
#include "api/c_call.hpp"
#include "api/read_struct.hpp"
#include "flashjit/distributed.hpp"

struct flashjit_shared_attention {
  flashjit::SharedAttention shared;
};

namespace flashjit::c_api {
namespace {

SharedAttention& attention_of(flashjit_shared_attention* shared) {
  return required(shared, "shared", "make one with flashjit_shared_create()").shared;
}

/// The pass, if a shared sequence has it.
Pass shared_pass(flashjit_pass pass) {
  if (pass == FLASHJIT_FORWARD || pass == FLASHJIT_BACKWARD) return static_cast<Pass>(pass);
  throw Error(ErrorCode::invalid_argument,
              fmt::format("pass is {}: give FLASHJIT_FORWARD (0) or FLASHJIT_BACKWARD (1).", pass));
}

SharedSequence shared_sequence(const flashjit_spec* spec, const flashjit_shared_sequence* given) {
  const auto c = read_struct("flashjit_shared_sequence", given);
  if (c.scheme < FLASHJIT_RING || c.scheme > FLASHJIT_ULYSSES)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("scheme is {}: give FLASHJIT_RING (0), FLASHJIT_ALL_GATHER (1) or "
                            "FLASHJIT_ULYSSES (2).",
                            c.scheme));
  if (c.layout != FLASHJIT_ZIGZAG && c.layout != FLASHJIT_CONTIGUOUS)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("layout is {}: give FLASHJIT_ZIGZAG (0) or FLASHJIT_CONTIGUOUS (1).", c.layout));
  SharedSequence sequence{
      .spec = get(spec),
      .batch = c.batch,
      .heads_q = c.heads_q,
      .heads_kv = c.heads_kv,
      .rows = c.rows,
      .scheme = static_cast<SharingScheme>(c.scheme),
      .layout = c.layout == FLASHJIT_ZIGZAG ? ShardLayout::zigzag : ShardLayout::contiguous,
      .window = c.window,
      .reserved_sms = c.reserved_sms,
      .heads_communicator = c.heads_communicator};
  if (!c.documents && c.document_count > 0)
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("documents is null, but document_count is {}: give document_count + 1 numbers, or 0 "
                    "for none.",
                    c.document_count));
  if (c.documents) sequence.documents.assign(c.documents, c.documents + c.document_count + 1);
  return sequence;
}

/// The members that both passes share.
template <class Args, class CArgs>
Args shared_args(const CArgs& c, Captures& room) {
  Args args{.q = c.q, .k = c.k, .v = c.v, .out = c.out, .lse = c.lse};
  set_alike(args, c, room);
  return args;
}

}  // namespace
}  // namespace flashjit::c_api

using namespace flashjit::c_api;

extern "C" {

flashjit_status flashjit_shared_create(flashjit_runtime* runtime, const flashjit_spec* spec,
                                       const flashjit_shared_sequence* sequence, void* communicator,
                                       const char* nccl, flashjit_shared_attention** shared) noexcept {
  return guarded([&] {
    flashjit_shared_attention*& created =
        required(shared, "shared", "give the address of a flashjit_shared_attention*");
    created = nullptr;
    created = new flashjit_shared_attention{flashjit::SharedAttention(
        get(runtime), shared_sequence(spec, sequence), communicator, nccl ? nccl : "")};
  });
}

void flashjit_shared_destroy(flashjit_shared_attention* shared) noexcept { delete shared; }

flashjit_status flashjit_shared_workspace_bytes(flashjit_shared_attention* shared, flashjit_pass pass,
                                                size_t* bytes) noexcept {
  return guarded([&] {
    size_t& needed = required(bytes, "bytes", "give the address of a size_t");
    needed = attention_of(shared).workspace_bytes(shared_pass(pass));
  });
}

flashjit_status flashjit_shared_prepare(flashjit_shared_attention* shared, flashjit_pass pass,
                                        void* workspace, size_t workspace_bytes,
                                        CUstream_st* stream) noexcept {
  return guarded([&] {
    attention_of(shared).prepare(shared_pass(pass), {workspace, workspace_bytes}, stream);
  });
}

flashjit_status flashjit_shared_forward(flashjit_shared_attention* shared,
                                        const flashjit_shared_forward_args* args, CUstream_st* stream,
                                        CUstream_st* copies) noexcept {
  return guarded([&] {
    const auto c = flashjit::read_struct("flashjit_shared_forward_args", args);
    Captures room;
    attention_of(shared).forward(shared_args<flashjit::SharedForwardArgs>(c, room), stream, copies);
  });
}

flashjit_status flashjit_shared_backward(flashjit_shared_attention* shared,
                                         const flashjit_shared_backward_args* args, CUstream_st* stream,
                                         CUstream_st* copies) noexcept {
  return guarded([&] {
    const auto c = flashjit::read_struct("flashjit_shared_backward_args", args);
    Captures room;
    auto read = shared_args<flashjit::SharedBackwardArgs>(c, room);
    read.dout = c.dout;
    read.dq = c.dq;
    read.dk = c.dk;
    read.dv = c.dv;
    read.dlse = c.dlse;
    read.dsinks = c.dsinks;
    attention_of(shared).backward(read, stream, copies);
  });
}

}  // extern "C"
