// The two passes of the C interface: a call that differs from an earlier one in its memory alone is neither
// read nor checked again.
#include "api/c_arguments.hpp"
#include "api/c_call.hpp"
#include "api/read_struct.hpp"
#include "call/engine.hpp"
#include "flashjit/flashjit.h"

namespace flashjit::c_api {
namespace {

auto arguments(const flashjit_forward_args& c, Captures& room) { return forward_args(c, room); }
auto arguments(const flashjit_backward_args& c, Captures& room) { return backward_args(c, room); }

void run(Engine& engine, const AttentionSpec& spec, const ForwardArgs& args, Stream stream) {
  engine.forward(spec, args, stream);
}
void run(Engine& engine, const AttentionSpec& spec, const BackwardArgs& args, Stream stream) {
  engine.backward(spec, args, stream);
}

/// The call was launched: what goes wrong here leaves the next one as this was.
template <class CArgs, class Args>
void remember(Engine& engine, const AttentionSpec& spec, Pass pass, const CallWords& call, const CArgs& c,
              const Args& args) noexcept {
  try {
    MovedCaptures moved;
    Captures room;
    engine.know(spec, pass, call, args, arguments(with_moved_addresses(c, moved), room));
  } catch (...) {
  }
}

template <class CArgs>
flashjit_status run_pass(const char* name, Pass pass, flashjit_runtime* runtime, const flashjit_spec* spec,
                         const CArgs* given, CUstream_st* stream) noexcept {
  return guarded([&] {
    Engine& engine = engine_of(get(runtime));
    const AttentionSpec& attention = get(spec);
    const CArgs& c = checked_struct(name, given);
    CallWords call;
    const bool may_be_known = add_words(call, *spec, c);
    if (may_be_known && engine.launch_known(call, stream)) return;
    Captures room;
    const auto args = arguments(c, room);
    run(engine, attention, args, stream);
    if (may_be_known && engine.known().wants(call)) remember(engine, attention, pass, call, c, args);
  });
}

}  // namespace
}  // namespace flashjit::c_api

using flashjit::c_api::run_pass;

flashjit_status flashjit_forward(flashjit_runtime* runtime, const flashjit_spec* spec,
                                 const flashjit_forward_args* args, CUstream_st* stream) noexcept {
  return run_pass("flashjit_forward_args", flashjit::Pass::forward, runtime, spec, args, stream);
}

flashjit_status flashjit_backward(flashjit_runtime* runtime, const flashjit_spec* spec,
                                  const flashjit_backward_args* args, CUstream_st* stream) noexcept {
  return run_pass("flashjit_backward_args", flashjit::Pass::backward, runtime, spec, args, stream);
}
