// Calls that differ from an earlier one in their memory alone: they launch what they would have launched if
// none had been known, and whatever else differs makes another call.
#include "call/known_calls.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "api/c_arguments.hpp"
#include "call/arguments.hpp"
#include "call/engine.hpp"
#include "plan/params_layout.hpp"
#include "plan/plan.hpp"
#include "tests/support/c_abi_support.hpp"
#include "tests/support/fakes.hpp"

namespace flashjit {
namespace {

using test::FakeDriver;
using test::RuntimePtr;
using test::SpecPtr;
using test::Variable;

/// Makes addresses, none of which is read.
class Addresses {
 public:
  explicit Addresses(std::uint64_t first) : next_(first) {}

  void* next() { return reinterpret_cast<void*>(next_ += std::uint64_t{1} << 36); }
  template <class T>
  void set(T*& pointer) {
    pointer = static_cast<T*>(next());
  }

 private:
  std::uint64_t next_;
};

flashjit_tensor tensor(Addresses& at, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) {
  return {at.next(), {b, h, s, d}, {h * s * d, s * d, d, 1}};
}

/// A forward call and what lies beside its struct.
struct Call {
  flashjit_forward_args args{};
  std::vector<flashjit_capture> captures;
};

constexpr std::int64_t kBatch = 2, kHeads = 8, kHeadsKv = 2, kQueries = 128, kKeys = 256, kDim = 64;

Call dense(Addresses& at) {
  Call call;
  call.args.struct_size = sizeof call.args;
  call.args.q = tensor(at, kBatch, kHeads, kQueries, kDim);
  call.args.k = tensor(at, kBatch, kHeadsKv, kKeys, kDim);
  call.args.v = tensor(at, kBatch, kHeadsKv, kKeys, kDim);
  call.args.out = tensor(at, kBatch, kHeads, kQueries, kDim);
  at.set(call.args.workspace);
  call.args.workspace_bytes = std::size_t{1} << 30;
  return call;
}

/// Few queries over pages of 16 keys.
Call paged(Addresses& at) {
  Call call = dense(at);
  call.args.q = tensor(at, kBatch, kHeads, 1, kDim);
  call.args.out = tensor(at, kBatch, kHeads, 1, kDim);
  call.args.k = tensor(at, 4096, kHeadsKv, 16, kDim);
  call.args.v = tensor(at, 4096, kHeadsKv, 16, kDim);
  at.set(call.args.kv_lengths);
  at.set(call.args.page_table.data);
  call.args.page_table.sequences = kBatch, call.args.page_table.columns = 1024;
  return call;
}

Call with_captures(Addresses& at) {
  Call call = dense(at);
  flashjit_capture slopes{}, bias{}, limit{};
  slopes.name = "slopes", slopes.data = at.next(), slopes.rank = 1, slopes.size[0] = kHeads,
  slopes.stride[0] = 1;
  bias.name = "bias", bias.data = at.next(), bias.rank = 2, bias.size[0] = kQueries, bias.size[1] = kKeys;
  bias.stride[0] = kKeys, bias.stride[1] = 1;
  limit.name = "limit", limit.scalar = 3;
  call.captures = {slopes, limit, bias};
  return call;
}

Call packed(Addresses& at) {
  Call call = dense(at);
  call.args.q = tensor(at, 1, kHeads, 300, kDim);
  call.args.out = tensor(at, 1, kHeads, 300, kDim);
  call.args.k = tensor(at, 1, kHeadsKv, 400, kDim);
  call.args.v = tensor(at, 1, kHeadsKv, 400, kDim);
  at.set(call.args.cu_seqlens_q), at.set(call.args.cu_seqlens_kv);
  call.args.batch_size = 3, call.args.max_seqlen_q = 200, call.args.max_seqlen_kv = 250;
  return call;
}

/// Prefills and decodes over pages of one key, which are copied for the prefills.
Call divided(Addresses& at) {
  Call call = dense(at);
  call.args.q = tensor(at, 1, 32, 40000, 128);
  call.args.out = tensor(at, 1, 32, 40000, 128);
  call.args.k = tensor(at, 300000, 8, 1, 128);
  call.args.v = tensor(at, 300000, 8, 1, 128);
  at.set(call.args.cu_seqlens_q), at.set(call.args.kv_lengths), at.set(call.args.page_table.data);
  call.args.page_table.sequences = 64, call.args.page_table.columns = 4096;
  call.args.batch_size = 64, call.args.max_seqlen_q = 1024, call.args.max_seqlen_kv = 4096;
  call.args.workspace_bytes = std::size_t{1} << 35;
  return call;
}

struct Case {
  std::string name, spec;
  std::function<Call(Addresses&)> call;
};

template <class Change>
std::function<Call(Addresses&)> with(Call (*make)(Addresses&), Change change) {
  return [=](Addresses& at) {
    Call call = make(at);
    change(call.args, at);
    return call;
  };
}

const float kScale = 0.3f;

std::vector<Case> cases() {
  return {
      {"dense", "bf16:d64:causal", dense},
      {"lse", "bf16:d64", with(dense, [](auto& args, auto& at) { at.set(args.lse); })},
      {"scale", "bf16:d64", with(dense, [](auto& args, auto&) { args.softmax_scale = &kScale; })},
      {"sinks", "bf16:d64:causal:sinks", with(dense, [](auto& args, auto& at) { at.set(args.sinks); })},
      {"row_max", "bf16:d64:row_max", with(dense, [](auto& args, auto& at) { at.set(args.row_max); })},
      {"shared_kv", "bf16:d64:shared_kv", with(dense, [](auto& args, auto&) { args.v = args.k; })},
      {"state", "bf16:d64:fp32_out:running_state",
       with(dense,
            [](auto& args, auto& at) {
              at.set(args.lse), at.set(args.state.lse);
              args.state.out = args.out;
            })},
      {"scales", "bf16:d64:kve4m3",
       with(dense,
            [](auto& args, auto& at) {
              for (flashjit_scales* scales : {&args.k_scale, &args.v_scale}) {
                at.set(scales->data);
                for (std::int64_t& size : scales->size) size = 1;
              }
            })},
      {"map", "bf16:d64:map128x128",
       with(dense,
            [](auto& args, auto& at) {
              at.set(args.block_map.data);
              const std::int64_t size[] = {1, 1, kQueries / 128, kKeys / 128};
              std::copy_n(size, 4, args.block_map.size);
            })},
      {"indices", "bf16:d64:indices",
       with(dense,
            [](auto& args, auto& at) {
              at.set(args.indices.data);
              const std::int64_t size[] = {kBatch, kQueries, kHeadsKv, 64};
              const std::int64_t stride[] = {kQueries * kHeadsKv * 64, kHeadsKv * 64, 64, 1};
              std::copy_n(size, 4, args.indices.size), std::copy_n(stride, 4, args.indices.stride);
            })},
      {"q_mod", "bf16:d64:q_mod{element * 2.0}", dense},
      {"out_mod", "bf16:d64:out_mod{out * 2.0}",
       with(dense,
            [](auto& args, auto& at) {
              args.out_before_mod = args.out;
              at.set(args.out_before_mod.data);
            })},
      {"divided", "bf16:d128:causal:varlen:pages1", divided},
      {"packed", "bf16:d64:causal:varlen", packed},
      {"pages", "bf16:d64:causal:pages16", paged},
      {"captures",
       "bf16:d64:score{slopes: fp32 1d; bias: bf16 2d; score * slopes[h] + bias[q, kv]}:"
       "mask{limit: int; q >= kv - limit}",
       with_captures},
      {"simt", "fp32:d64", dense},
  };
}

class KnownCallsTest : public testing::Test {
 protected:
  KnownCallsTest() { fake().reset(); }
  ~KnownCallsTest() override { fake().reset(); }

  static FakeDriver& fake() { return test::fake_cuda(); }

  RuntimePtr runtime() {
    flashjit_options options{};
    options.struct_size = sizeof options;
    options.cache_dir = "", options.nvrtc = nvrtc_.c_str();
    options.log = [](void*, const char*) {};
    return test::make_runtime(options);
  }
  static flashjit_status forward(const RuntimePtr& runtime, const SpecPtr& spec, Call& call,
                                 CUstream_st* stream = nullptr) {
    call.args.captures = call.captures.data(), call.args.capture_count = call.captures.size();
    return flashjit_forward(runtime.get(), spec.get(), &call.args, stream);
  }
  static CallWords words(const SpecPtr& spec, Call& call) {
    call.args.captures = call.captures.data(), call.args.capture_count = call.captures.size();
    CallWords words;
    EXPECT_TRUE(c_api::add_words(words, *spec, call.args));
    return words;
  }
  static std::string key(const SpecPtr& spec, Call& call) { return std::string(words(spec, call).key()); }
  static bool launch_known(const RuntimePtr& runtime, const SpecPtr& spec, Call& call,
                           CUstream_st* stream = nullptr) {
    return engine_of(runtime->runtime).launch_known(words(spec, call), stream);
  }
  /// A call is known when it was met twice.
  static void make_known(const RuntimePtr& runtime, const SpecPtr& spec, Call& call) {
    for (int i = 0; i < 2; ++i)
      ASSERT_EQ(forward(runtime, spec, call), FLASHJIT_OK) << flashjit_last_error_message();
  }

  /// What was launched since the last time.
  static std::vector<FakeDriver::Launch> launches() { return std::exchange(fake().launches, {}); }

  static void expect_equal(const FakeDriver::EncodedMap& a, const FakeDriver::EncodedMap& b) {
    EXPECT_EQ(a.data, b.data);
    EXPECT_EQ(a.sizes, b.sizes);
    EXPECT_EQ(a.strides, b.strides);
    EXPECT_EQ(a.box, b.box);
    EXPECT_EQ(a.type, b.type);
  }
  static void expect_equal(const FakeDriver::Launch& a, const FakeDriver::Launch& b, std::size_t bytes) {
    EXPECT_EQ(a.blocks, b.blocks);
    EXPECT_EQ(a.threads, b.threads);
    EXPECT_EQ(a.shared_bytes, b.shared_bytes);
    EXPECT_EQ(a.stream, b.stream);
    EXPECT_EQ(a.early, b.early);
    EXPECT_EQ(std::memcmp(a.params.data(), b.params.data(), bytes), 0);
    const auto number = [](const CUtensorMap& map) { return map.opaque[0]; };
    const auto maps = [](const FakeDriver::Launch& launch) {
      return std::vector<CUtensorMap>{launch.maps.q, launch.maps.k,    launch.maps.v,
                                      launch.maps.o, launch.maps.bias, launch.maps.q_rope};
    };
    for (std::size_t i = 0; i < 6; ++i) {
      const auto x = number(maps(a)[i]), y = number(maps(b)[i]);
      ASSERT_EQ(x == 0, y == 0) << "map " << i;
      if (x != 0) expect_equal(fake().encoded.at(x - 1), fake().encoded.at(y - 1));
    }
  }

  const std::string nvrtc_ = test::built(FLASHJIT_FAKE_NVRTC);
  const Variable libcuda_{"FLASHJIT_LIBCUDA", test::built(FLASHJIT_FAKE_CUDA)};
};

/// Those that all kernels of the call have.
std::size_t bytes_of_params(const std::string& text, const Call& call, flashjit_runtime& runtime) {
  const KernelSpec spec{parse_spec(text)};
  c_api::Captures room;
  const AttentionShape shape = shape_of(spec, c_api::forward_args(call.args, room));
  const auto plan = plan::make_plan(spec, shape, runtime.runtime.device(), {});
  const std::size_t bytes = plan::params_layout(plan).bytes;
  return plan.decodes ? std::min(bytes, plan::params_layout(*plan.decodes).bytes) : bytes;
}

TEST_F(KnownCallsTest, LaunchWhatTheyWouldHaveLaunchedIfNoneHadBeenKnown) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const RuntimePtr r = runtime(), fresh = runtime();
    const SpecPtr spec = test::make_spec(c.spec.c_str());
    Addresses first(std::uint64_t{1} << 40), second(std::uint64_t{3} << 40);
    Call known = c.call(first), other = c.call(second);
    make_known(r, spec, known);
    launches();
    const auto stream = reinterpret_cast<CUstream_st*>(0x77);
    ASSERT_TRUE(launch_known(r, spec, other, stream));
    const auto got = launches();
    ASSERT_EQ(forward(fresh, spec, other, stream), FLASHJIT_OK) << flashjit_last_error_message();
    const auto want = launches();
    ASSERT_EQ(got.size(), want.size());
    ASSERT_FALSE(got.empty());
    for (std::size_t i = 0; i < got.size(); ++i)
      expect_equal(got[i], want[i], bytes_of_params(c.spec, other, *r));
    // The C function does the same.
    ASSERT_EQ(forward(r, spec, other, stream), FLASHJIT_OK) << flashjit_last_error_message();
    EXPECT_EQ(launches().size(), got.size());
  }
}

TEST_F(KnownCallsTest, BackwardPassesToo) {
  const RuntimePtr r = runtime(), fresh = runtime();
  const SpecPtr spec = test::make_spec("bf16:d64:causal");
  const auto make = [](std::uint64_t first) {
    Addresses at(first);
    const flashjit_forward_args f = dense(at).args;
    flashjit_backward_args args{};
    args.struct_size = sizeof args;
    args.q = f.q, args.k = f.k, args.v = f.v, args.out = f.out;
    args.dout = tensor(at, kBatch, kHeads, kQueries, kDim);
    args.dq = tensor(at, kBatch, kHeads, kQueries, kDim);
    args.dk = tensor(at, kBatch, kHeadsKv, kKeys, kDim);
    args.dv = tensor(at, kBatch, kHeadsKv, kKeys, kDim);
    at.set(args.lse);
    args.workspace = f.workspace, args.workspace_bytes = f.workspace_bytes;
    return args;
  };
  flashjit_backward_args known = make(std::uint64_t{1} << 40), other = make(std::uint64_t{3} << 40);
  for (int i = 0; i < 2; ++i)
    ASSERT_EQ(flashjit_backward(r.get(), spec.get(), &known, nullptr), FLASHJIT_OK)
        << flashjit_last_error_message();
  launches();
  CallWords words;
  ASSERT_TRUE(c_api::add_words(words, *spec, other));
  ASSERT_TRUE(engine_of(r->runtime).launch_known(words, nullptr));
  const auto got = launches();
  ASSERT_EQ(flashjit_backward(fresh.get(), spec.get(), &other, nullptr), FLASHJIT_OK);
  const auto want = launches();
  ASSERT_EQ(got.size(), want.size());
  const AttentionShape shape{kBatch, kHeads, kHeadsKv, kQueries, kKeys};
  const auto plan =
      plan::make_plan({parse_spec("bf16:d64:causal"), Pass::backward}, shape, r->runtime.device(), {});
  for (std::size_t i = 0; i < got.size(); ++i) expect_equal(got[i], want[i], plan::params_layout(plan).bytes);
}

/// Whatever is not an address makes another call, and so does an address that is missing or lies otherwise.
TEST_F(KnownCallsTest, WordsTellAllButAddresses) {
  const SpecPtr spec = test::make_spec(), same_text = test::make_spec();
  Addresses at(std::uint64_t{1} << 40);
  Call call = with_captures(at);
  const std::string before = key(spec, call);
  EXPECT_NE(key(same_text, call), before);
  std::size_t addresses = 0;
  constexpr std::size_t kWords = sizeof(flashjit_forward_args) / 8;
  for (std::size_t word = 0; word < kWords; ++word) {
    const auto with_word = [&](std::uint64_t value) {
      Call other = call;
      std::memcpy(reinterpret_cast<char*>(&other.args) + word * 8, &value, 8);
      CallWords words;
      const bool is_kept = c_api::add_words(words, *spec, other.args);
      return is_kept ? std::string(words.key()) : "not kept";
    };
    call.args.captures = call.captures.data(), call.args.capture_count = call.captures.size();
    if (word == offsetof(flashjit_forward_args, captures) / 8 ||
        word == offsetof(flashjit_forward_args, capture_count) / 8 ||
        word == offsetof(flashjit_forward_args, softmax_scale) / 8 ||
        word == offsetof(flashjit_forward_args, skip_softmax_threshold) / 8)
      continue;  // on the host
    std::uint64_t value = 0;
    std::memcpy(&value, reinterpret_cast<const char*>(&call.args) + word * 8, 8);
    EXPECT_NE(with_word(value + 1), before) << "word " << word;
    const bool is_address = value != 0 && with_word(value + 256) == before;
    addresses += is_address;
    EXPECT_EQ(is_address, value >= std::uint64_t{1} << 40) << "word " << word;
    EXPECT_NE(with_word(is_address ? 0 : ~value), before) << "word " << word;
  }
  EXPECT_EQ(addresses, 5u);  // Q, K, V, O and the workspace
}

TEST_F(KnownCallsTest, WordsTellWhatIsBesideTheStruct) {
  const SpecPtr spec = test::make_spec();
  Addresses at(std::uint64_t{1} << 40);
  Call call = with_captures(at);
  float scale = 0.5f, threshold = 0.1f;
  call.args.softmax_scale = &scale, call.args.skip_softmax_threshold = &threshold;
  const std::string before = key(spec, call);
  const auto differs = [&](const std::function<void(Call&)>& change) {
    Call other = call;
    change(other);
    return key(spec, other) != before;
  };
  EXPECT_FALSE(differs([](Call&) {}));
  std::string same_letters = "slopes";
  EXPECT_FALSE(differs([&](Call& other) { other.captures[0].name = same_letters.c_str(); }));
  EXPECT_TRUE(differs([](Call& other) { other.captures[0].name = "slope"; }));
  EXPECT_TRUE(differs([](Call& other) { other.captures[1].scalar = 4; }));
  EXPECT_TRUE(differs([](Call& other) { other.captures[2].stride[0] = 2 * kKeys; }));
  EXPECT_TRUE(differs([](Call& other) { other.captures.pop_back(); }));
  EXPECT_FALSE(differs([&](Call& other) { other.captures[0].data = at.next(); }));
  EXPECT_TRUE(differs([&](Call& other) { other.args.k.data = other.args.v.data; }));
  scale = 0.25f;
  EXPECT_TRUE(differs([](Call&) {}));
  scale = 0.5f, threshold = 0.2f;
  EXPECT_TRUE(differs([](Call&) {}));
}

TEST_F(KnownCallsTest, WrittenMemoryThatIsReadIsRefused) {
  const RuntimePtr r = runtime();
  const SpecPtr spec = test::make_spec("bf16:d64");
  Addresses at(std::uint64_t{1} << 40);
  Call call = with(dense, [](auto& args, auto& addresses) { addresses.set(args.lse); })(at);
  make_known(r, spec, call);
  ASSERT_TRUE(launch_known(r, spec, call));
  launches();
  for (const auto& change : std::vector<std::function<void(flashjit_forward_args&)>>{
           [](auto& args) { args.out.data = args.q.data; },
           [](auto& args) { args.lse = static_cast<float*>(args.k.data); },
           [](auto& args) { args.lse = static_cast<float*>(args.out.data); },
           [](auto& args) { args.v.data = static_cast<char*>(args.out.data) + 256; }}) {
    Call other = call;
    change(other.args);
    EXPECT_FALSE(launch_known(r, spec, other));
    EXPECT_EQ(forward(r, spec, other), FLASHJIT_INVALID_ARGUMENT);
    EXPECT_TRUE(launches().empty());
  }
  EXPECT_TRUE(launch_known(r, spec, call));
}

TEST_F(KnownCallsTest, AnotherConfigurationOrDeviceIsNotThatOfTheKnownCall) {
  const RuntimePtr r = runtime();
  const SpecPtr spec = test::make_spec();
  Addresses at(std::uint64_t{1} << 40);
  Call call = dense(at);
  EXPECT_FALSE(launch_known(r, spec, call));
  ASSERT_EQ(forward(r, spec, call), FLASHJIT_OK);
  EXPECT_FALSE(launch_known(r, spec, call));  // met once
  ASSERT_EQ(forward(r, spec, call), FLASHJIT_OK);
  EXPECT_TRUE(launch_known(r, spec, call));
  fake().device = 1;
  EXPECT_FALSE(launch_known(r, spec, call));
  fake().device = 0;
  EXPECT_TRUE(launch_known(r, spec, call));
  const AttentionShape shape{kBatch, kHeads, kHeadsKv, kQueries, kKeys};
  const KernelSpec kernel{parse_spec("bf16:d64:causal")};
  const auto config = plan::traits(Family::simt).heuristic(kernel, shape, r->runtime.device());
  r->runtime.prepare(kernel, shape, config);
  EXPECT_FALSE(launch_known(r, spec, call));
  make_known(r, spec, call);
  launches();
  EXPECT_TRUE(launch_known(r, spec, call));
  const auto known = launches();
  const RuntimePtr fresh = runtime();
  fresh->runtime.prepare(kernel, shape, config);
  ASSERT_EQ(forward(fresh, spec, call), FLASHJIT_OK);
  const auto want = launches();
  ASSERT_EQ(known.size(), want.size());
  EXPECT_EQ(known[0].threads, want[0].threads);
  EXPECT_EQ(known[0].blocks, want[0].blocks);
}

TEST_F(KnownCallsTest, AFailedLaunchIsReported) {
  const RuntimePtr r = runtime();
  const SpecPtr spec = test::make_spec();
  Addresses at(std::uint64_t{1} << 40);
  Call call = dense(at);
  make_known(r, spec, call);
  fake().launch_result = CUDA_ERROR_INVALID_VALUE;
  EXPECT_EQ(forward(r, spec, call), FLASHJIT_CUDA);
  fake().launch_result = CUDA_SUCCESS;
  fake().has_context = false;
  EXPECT_EQ(forward(r, spec, call), FLASHJIT_NO_DEVICE) << flashjit_last_error_message();
}

}  // namespace
}  // namespace flashjit
