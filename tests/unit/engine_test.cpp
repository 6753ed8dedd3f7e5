// The runtime from call to launch, over a driver that only remembers. Kernels come from a pack that the test
// makes of bytes no GPU would take, or from nowhere: nothing here compiles.
#include "call/engine.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "plan/records.hpp"
#include "support/file.hpp"
#include "tests/support/built.hpp"
#include "tests/support/fake_driver.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/kept_log.hpp"
#include "tests/support/launched_params.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using test::FakeDriver;

constexpr const char* kCompiler = "nvrtc1.2.3";
const KernelSpec kSpec{{.dtype = DType::bf16, .head_dim = 64}};
const AttentionShape kShape{2, 4, 2, 100, 70};

template <class T = void>
T* address(std::uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

ForwardArgs forward_args(const AttentionShape& s = kShape, std::int64_t d = 64) {
  return {.q = ConstTensorView::bhsd(address(0x100000000), s.batch, s.heads_q, s.seqlen_q, d),
          .k = ConstTensorView::bhsd(address(0x200000000), s.batch, s.heads_kv, s.seqlen_kv, d),
          .v = ConstTensorView::bhsd(address(0x300000000), s.batch, s.heads_kv, s.seqlen_kv, d),
          .out = TensorView::bhsd(address(0x400000000), s.batch, s.heads_q, s.seqlen_q, d)};
}

BackwardArgs backward_args(const AttentionShape& s = kShape, std::int64_t d = 64) {
  const ForwardArgs f = forward_args(s, d);
  return {.q = f.q,
          .k = f.k,
          .v = f.v,
          .out = f.out,
          .lse = address<float>(0x500000000),
          .dout = f.out,
          .dq = TensorView::bhsd(address(0x600000000), s.batch, s.heads_q, s.seqlen_q, d),
          .dk = TensorView::bhsd(address(0x700000000), s.batch, s.heads_kv, s.seqlen_kv, d),
          .dv = TensorView::bhsd(address(0x800000000), s.batch, s.heads_kv, s.seqlen_kv, d),
          .workspace = {address(0x900000000), std::size_t{1} << 40}};
}

class EngineTest : public testing::Test {
 protected:
  EngineTest() : folder_(fs::temp_directory_path() / ("flashjit-engine-" + unique_suffix())) {
    fs::create_directories(folder_);
    fake().reset();
  }
  ~EngineTest() override { fs::remove_all(folder_); }

  static FakeDriver& fake() { return FakeDriver::state(); }
  fs::path pack() const { return folder_ / "pack"; }

  /// Never compiles: what the pack lacks is missing.
  Settings settings() {
    Settings settings;
    settings.packs = {pack().string()};
    settings.jit = false;
    settings.log = log_.writer();
    return settings;
  }
  std::unique_ptr<Engine> engine(Settings settings) {
    return std::make_unique<Engine>(std::move(settings), FakeDriver::driver());
  }
  std::unique_ptr<Engine> engine() { return engine(settings()); }

  static DeviceInfo device_info() { return device::query_device(*FakeDriver::driver(), 0); }

  static plan::ExecutionPlan plan_of(const KernelSpec& spec, const AttentionShape& shape,
                                     const std::optional<TileConfig>& config = {},
                                     const plan::Checks& checks = {}) {
    return plan::make_plan(spec, shape, device_info(), {}, config, checks);
  }

  /// Puts a kernel of the spec into a store, with the resources of one entry as ptxas would report them.
  static void add_kernel(const fs::path& folder, const KernelSpec& spec, const TileConfig& config,
                         int registers = 64, const std::string& compiler = kCompiler,
                         const plan::Checks& checks = {}) {
    const KernelSource source =
        render::render(spec, config, device_info(), render::TemplateSet::embedded(), checks);
    CompiledKernel kernel{.cubin = "not really", .log = "", .compiler = compiler, .resources = {}};
    for (const plan::Entry& entry : source.entries)
      kernel.resources.push_back({.entry = entry.name, .registers = registers});
    cache::Store store(folder, cache::Store::Access::read_write);
    ASSERT_TRUE(
        store.store(source, cache::source_digest(source, compile::compile_options(source.arch)), kernel));
  }
  void add_to_pack(const KernelSpec& spec, const AttentionShape& shape = kShape, int registers = 64) {
    add_kernel(pack(), spec, plan_of(spec, shape).config, registers);
  }

  /// A record that chooses tiles which the planner would not, whose kernel is nowhere yet.
  static plan::TuningRecord simt_record() {
    plan::TuningRecord record;
    record.spec = kSpec.normalized();
    record.shape = kShape;
    record.arch = "sm_90a";
    record.best = plan::traits(Family::simt).heuristic(record.spec, kShape, device_info());
    return record;
  }
  void write_to_pack(const plan::TuningRecord& record) const {
    const fs::path records = cache::Store(pack(), cache::Store::Access::read_only).records_folder();
    fs::create_directories(records);
    plan::write_record(records, record);
  }

  template <class Call>
  static Error error_of(Call&& call) {
    try {
      call();
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "nothing was thrown";
    return Error(ErrorCode::internal, "");
  }

  fs::path folder_;
  test::KeptLog log_;
};

KernelSpec backward_spec() { return {kSpec, Pass::backward}; }

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << text

TEST_F(EngineTest, ForwardLaunchesThePlan) {
  add_to_pack(kSpec);
  const auto runtime = engine();
  CUstream stream = reinterpret_cast<CUstream>(0x42);
  runtime->forward(kSpec, forward_args(), stream);
  runtime->forward(kSpec, forward_args(), stream);

  const plan::ExecutionPlan plan = plan_of(kSpec, kShape);
  ASSERT_EQ(fake().launches.size(), 2 * plan.launches.size());
  const FakeDriver::Launch& launch = fake().launches[0];
  EXPECT_EQ(launch.blocks, plan.launches[0].blocks);
  EXPECT_EQ(launch.threads, static_cast<unsigned>(plan.entries[0].threads));
  EXPECT_EQ(launch.shared_bytes, static_cast<unsigned>(plan.entries[0].shared_bytes));
  EXPECT_EQ(launch.stream, stream);
  EXPECT_EQ(test::launched_params(launch, plan).q.data, address(0x100000000));
  EXPECT_EQ(fake().libraries_loaded, 1);
  EXPECT_EQ(fake().functions_touched, static_cast<int>(plan.entries.size()));
}

TEST_F(EngineTest, BackwardLaunchesThePlanInOrder) {
  add_to_pack(backward_spec());
  const auto runtime = engine();
  runtime->backward(kSpec, backward_args(), nullptr);  // the caller's spec may leave the pass
  const plan::ExecutionPlan plan = plan_of(backward_spec(), kShape);
  ASSERT_EQ(fake().launches.size(), plan.launches.size());
  for (std::size_t i = 0; i < plan.launches.size(); ++i)
    EXPECT_EQ(fake().launches[i].threads,
              static_cast<unsigned>(plan.entries[plan.launches[i].entry].threads));
}

TEST_F(EngineTest, ALaunchIsEarlyOnlyWhereGraphsCanHoldIt) {
  Params params{};
  device::TensorMaps maps{};
  std::array<void*, 2> parameters{&params, &maps};
  const auto is_early = [&](int version, bool early) {
    device::Driver driver = *FakeDriver::driver();
    driver.version = version;
    device::launch(driver, nullptr, 1, 32, 0, nullptr, parameters, early);
    return fake().launches.back().early;
  };
  EXPECT_TRUE(is_early(12030, true));
  EXPECT_FALSE(is_early(12020, true));
  EXPECT_FALSE(is_early(13000, false));
}

TEST_F(EngineTest, ShapesShareAKernelAndPointersAreAskedForOncePerShape) {
  add_to_pack(kSpec);
  const auto runtime = engine();
  runtime->forward(kSpec, forward_args(), nullptr);
  const int asked = fake().pointers_asked;
  EXPECT_GT(asked, 0);
  runtime->forward(kSpec, forward_args(), nullptr);
  EXPECT_EQ(fake().pointers_asked, asked);
  runtime->forward(kSpec, forward_args({2, 4, 4, 90, 80}), nullptr);
  EXPECT_EQ(fake().libraries_loaded, 1);
}

TEST_F(EngineTest, BadArgumentsLaunchNothing) {
  add_to_pack(kSpec);
  const auto runtime = engine();
  ForwardArgs args = forward_args();
  args.v.size[2] = 71;
  EXPECT_EQ(error_of([&] { runtime->forward(kSpec, args, nullptr); }).code(), ErrorCode::invalid_argument);
  KernelSpec odd = kSpec;
  odd.head_dim = 60;
  EXPECT_EQ(error_of([&] { runtime->forward(odd, forward_args(kShape, 60), nullptr); }).code(),
            ErrorCode::invalid_argument);
  EXPECT_TRUE(fake().launches.empty());
}

TEST_F(EngineTest, AWorkspaceThatIsTooSmallIsRefusedWithTheBytesThatAreNeeded) {
  add_to_pack(backward_spec());
  const auto runtime = engine();
  const std::size_t needed = runtime->workspace_bytes(backward_spec(), kShape);
  ASSERT_GT(needed, 0u);
  BackwardArgs args = backward_args();
  args.workspace.bytes = needed - 1;
  EXPECT_CONTAINS(error_of([&] { runtime->backward(kSpec, args, nullptr); }).message(),
                  std::to_string(needed));
  EXPECT_TRUE(fake().launches.empty());
  args.workspace.bytes = needed;
  runtime->backward(kSpec, args, nullptr);
  EXPECT_FALSE(fake().launches.empty());
  EXPECT_EQ(runtime->workspace_bytes(backward_spec(), kShape), needed);
}

TEST_F(EngineTest, NoContextIsAnErrorThatSaysWhatToDo) {
  const auto runtime = engine();
  fake().has_context = false;
  for (const Error& error :
       {error_of([&] { runtime->forward(kSpec, forward_args(), nullptr); }),
        error_of([&] { runtime->prepare(kSpec, kShape, {}); }),
        error_of([&] { runtime->workspace_bytes(kSpec, kShape); }), error_of([&] { runtime->device(); })}) {
    EXPECT_EQ(error.code(), ErrorCode::no_device);
    EXPECT_CONTAINS(error.message(), "cuCtxSetCurrent");
  }
}

TEST_F(EngineTest, AMissingKernelNamesItselfAndTheCommandThatPacksIt) {
  const auto runtime = engine();
  const Error error = error_of([&] { runtime->forward(kSpec, forward_args(), nullptr); });
  EXPECT_EQ(error.code(), ErrorCode::kernel_missing);
  const std::string config = to_string(plan_of(kSpec, kShape).config);
  EXPECT_CONTAINS(error.message(),
                  "flashjit pack --spec fwd:bf16:d64 --config " + config + " --arch sm_90a --out");
  EXPECT_TRUE(fake().launches.empty());
}

TEST_F(EngineTest, WithoutNvrtcThePackStillServesAndTheRestSaysWhatIsMissing) {
  add_to_pack(kSpec);
  Settings without = settings();
  without.jit = true;
  without.nvrtc = (folder_ / "no-such-nvrtc.so").string();
  const auto runtime = engine(without);
  runtime->forward(kSpec, forward_args(), nullptr);
  EXPECT_FALSE(fake().launches.empty());
  const Error error = error_of([&] { runtime->backward(kSpec, backward_args(), nullptr); });
  EXPECT_EQ(error.code(), ErrorCode::no_compiler);
  EXPECT_CONTAINS(error.message(), "flashjit pack --spec bwd:bf16:d64");
  EXPECT_CONTAINS(error.message(), "no-such-nvrtc.so");
}

TEST_F(EngineTest, AnNvrtcThatIsTooOldIsRefused) {
  const test::Variable old("FAKE_NVRTC_OLD", "1");
  Settings before = settings();
  before.packs.clear();
  before.jit = true;
  before.nvrtc = test::built(FLASHJIT_FAKE_NVRTC);
  const Error error = error_of([&] { engine(before)->prepare(kSpec, kShape, {}); });
  EXPECT_EQ(error.code(), ErrorCode::no_compiler);
  EXPECT_CONTAINS(error.message(), "is NVRTC 12.0, which is too old); install NVRTC 12.1 or newer");
}

TEST_F(EngineTest, TheDiskCacheServesWithoutCompilingAndDamageIsAMiss) {
  Settings cached = settings();
  cached.packs.clear();
  cached.cache_dir = (folder_ / "cache").string();
  add_kernel(cached.cache_dir, kSpec, plan_of(kSpec, kShape).config);
  EXPECT_EQ(engine(cached)->prepare(kSpec, kShape, {}).origin, KernelOrigin::disk);

  for (const auto& entry : fs::recursive_directory_iterator(cached.cache_dir))
    if (entry.path().extension() == ".cubin") std::ofstream(entry.path(), std::ios::trunc) << "damaged";
  EXPECT_EQ(error_of([&] { engine(cached)->prepare(kSpec, kShape, {}); }).code(), ErrorCode::kernel_missing);
  EXPECT_CONTAINS(log_.text(), "ignoring");
}

TEST_F(EngineTest, AKernelOfAnotherNvrtcIsNotCompiledAgain) {
  Settings upgraded = settings();
  upgraded.packs.clear();
  upgraded.jit = true;
  upgraded.nvrtc = test::built(FLASHJIT_FAKE_NVRTC);
  upgraded.cache_dir = (folder_ / "cache").string();
  add_kernel(upgraded.cache_dir, kSpec, plan_of(kSpec, kShape).config);
  const KernelReport report = engine(upgraded)->prepare(kSpec, kShape, {});
  EXPECT_EQ(report.origin, KernelOrigin::disk);
  EXPECT_TRUE(report.key.ends_with(kCompiler)) << report.key;
}

TEST_F(EngineTest, ThePackComesBeforeTheCache) {
  Settings both = settings();
  both.cache_dir = (folder_ / "cache").string();
  add_to_pack(kSpec);
  add_kernel(both.cache_dir, kSpec, plan_of(kSpec, kShape).config);
  EXPECT_EQ(engine(both)->prepare(kSpec, kShape, {}).origin, KernelOrigin::pack);
}

TEST_F(EngineTest, SeveralPacksAreSearchedInTheirOrder) {
  Settings several = settings();
  const std::string first = (folder_ / "first").string(), second = (folder_ / "second").string();
  several.packs = {first, second};
  const TileConfig config = plan_of(kSpec, kShape).config;
  add_kernel(first, kSpec, config, 64, "nvrtc1.0.0");
  add_kernel(second, kSpec, config, 64, "nvrtc2.0.0");
  add_kernel(second, backward_spec(), plan_of(backward_spec(), kShape).config);
  EXPECT_TRUE(engine(several)->prepare(kSpec, kShape, {}).key.ends_with("nvrtc1.0.0"));
  EXPECT_EQ(engine(several)->prepare(backward_spec(), kShape, {}).origin, KernelOrigin::pack);

  for (const auto& file : fs::recursive_directory_iterator(first))
    if (file.path().extension() == ".cubin") std::ofstream(file.path(), std::ios::trunc) << "damaged";
  EXPECT_TRUE(engine(several)->prepare(kSpec, kShape, {}).key.ends_with("nvrtc2.0.0"));
}

TEST_F(EngineTest, AKernelThatTheDriverRefusesIsPassedOver) {
  add_to_pack(kSpec);
  fake().load_result = CUDA_ERROR_NO_BINARY_FOR_GPU;
  const Error error = error_of([&] { engine()->prepare(kSpec, kShape, {}); });
  EXPECT_EQ(error.code(), ErrorCode::kernel_missing);
  EXPECT_CONTAINS(log_.text(), "from the pack: cuLibraryLoadData failed");
  EXPECT_CONTAINS(error.message(), "The driver refuses the kernel");
  EXPECT_CONTAINS(error.message(), "which the pack has as");
}

TEST_F(EngineTest, AKernelThatDoesNotFitGivesWayToTheNextFamily) {
  const TileConfig first = plan_of(kSpec, kShape).config;
  ASSERT_EQ(first.family, Family::sm90);
  const TileConfig last = plan::traits(Family::sm80).heuristic(kSpec.normalized(), kShape, device_info());
  add_kernel(pack(), kSpec, first, 4000);
  add_kernel(pack(), kSpec, last);
  const KernelReport report = engine()->prepare(kSpec, kShape, {});
  EXPECT_EQ(report.config, last);
  EXPECT_EQ(report.config_source, ConfigSource::heuristic);
  EXPECT_CONTAINS(log_.text(), to_string(first) + " does not work");
  // A configuration that was asked for is not exchanged.
  EXPECT_EQ(error_of([&] { engine()->prepare(kSpec, kShape, first); }).code(), ErrorCode::compile_failed);
}

TEST_F(EngineTest, TensorMapsTellTheTmaUnitOfEveryTensor) {
  KernelSpec spec = kSpec;
  spec.head_dim_v = 40;
  add_to_pack(spec);
  ForwardArgs args = forward_args();
  args.k = ConstTensorView::bshd(address(0x200000000), 2, 70, 2, 64);
  args.v = ConstTensorView::bhsd(address(0x300000000), 2, 2, 70, 40);
  args.out = TensorView::bhsd(address(0x400000000), 2, 4, 100, 40);
  engine()->forward(spec, args, nullptr);

  const plan::ExecutionPlan plan = plan_of(spec, kShape);
  ASSERT_TRUE(plan.tensor_boxes);
  ASSERT_EQ(fake().launches.size(), 1u);
  const device::TensorMaps& maps = fake().launches[0].maps;
  ASSERT_EQ(fake().encoded.size(), 4u);
  using Sizes = std::vector<std::uint64_t>;
  using Box = std::vector<std::uint32_t>;
  const auto check = [&](const CUtensorMap& map, const void* data, const Sizes& sizes, const Sizes& strides,
                         int rows) {
    const FakeDriver::EncodedMap& encoded = fake().encoded.at(map.opaque[0] - 1);
    EXPECT_EQ(encoded.data, data);
    EXPECT_EQ(encoded.type, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
    EXPECT_EQ(encoded.sizes, sizes);
    EXPECT_EQ(encoded.strides, strides);
    EXPECT_EQ(encoded.box, (Box{64, static_cast<std::uint32_t>(rows), 1, 1}));
    EXPECT_EQ(encoded.element_strides, (Box{1, 1, 1, 1}));
    EXPECT_EQ(encoded.interleave, CU_TENSOR_MAP_INTERLEAVE_NONE);
    EXPECT_EQ(encoded.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);
    EXPECT_EQ(encoded.promotion, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
    EXPECT_EQ(encoded.fill, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  check(maps.q, address(0x100000000), {64, 100, 4, 2}, {128, 12800, 51200}, plan.config.br);
  check(maps.k, address(0x200000000), {64, 70, 2, 2}, {256, 128, 17920}, plan.config.bc);
  check(maps.v, address(0x300000000), {40, 70, 2, 2}, {80, 5600, 11200}, plan.config.bc);
  check(maps.o, address(0x400000000), {40, 100, 4, 2}, {80, 8000, 32000}, 16);
}

TEST_F(EngineTest, TmaLoadsABiasTileThatItCan) {
  KernelSpec spec = kSpec;
  spec.score = ScoreProgram("t: fp32 1d; bias: fp16 4d; score + t[h] * bias[b, h, q, kv]");
  add_to_pack(spec);
  const auto runtime = engine();
  const auto map_of = [&](const Capture& bias) {
    fake().encoded.clear();
    ForwardArgs args = forward_args();
    const std::array captures = {bias, Capture::tensor("t", address(0x600000000), {4})};
    args.captures = captures;
    runtime->forward(spec, args, nullptr);
    return fake().launches.back().maps.bias;
  };
  Capture bias = Capture::tensor("bias", address(0x500000000), {2, 4, 100, 80});
  const CUtensorMap map = map_of(bias);
  ASSERT_EQ(fake().encoded.size(), 5u);
  const FakeDriver::EncodedMap& encoded = fake().encoded.at(map.opaque[0] - 1);
  EXPECT_EQ(encoded.data, address(0x500000000));
  EXPECT_EQ(encoded.type, CU_TENSOR_MAP_DATA_TYPE_UINT16);
  EXPECT_EQ(encoded.sizes, (std::vector<std::uint64_t>{80, 100, 4, 2}));
  EXPECT_EQ(encoded.strides, (std::vector<std::uint64_t>{160, 16000, 64000}));
  EXPECT_EQ(encoded.box[0], 64u);
  EXPECT_EQ(encoded.box[1], static_cast<std::uint32_t>(plan_of(spec, kShape).config.br));

  bias.stride[0] = 0;  // the same for all batch entries
  EXPECT_EQ(fake().encoded.at(map_of(bias).opaque[0] - 1).sizes, (std::vector<std::uint64_t>{80, 100, 4, 1}));
  Capture transposed = bias, repeated = bias;
  transposed.stride[2] = 1, transposed.stride[3] = 100;
  repeated.stride[2] = 0;
  const Capture odd = Capture::tensor("bias", address(0x500000000), {2, 4, 100, 81}),
                between = Capture::tensor("bias", address(0x5000008), {2, 4, 100, 80});
  for (const Capture& other : {transposed, repeated, odd, between}) {
    EXPECT_EQ(map_of(other).opaque[0], 0u);
    EXPECT_EQ(fake().encoded.size(), 4u);
  }
}

// Kernels that check indices read each element of a bias by itself: then there is room for O in shared
// memory.
TEST_F(EngineTest, CheckedIndicesArePlannedAsTheyAreCompiled) {
  const KernelSpec spec = parse_spec("fwd:fp16:d96:score{bias: fp16 4d; score + bias[b, h, q, kv]}");
  const plan::Checks checks{.check_indices = true};
  const plan::ExecutionPlan plan = plan_of(spec, kShape, parse_config("sm90:br128:bc128:w8:s2"), checks);
  add_kernel(pack(), spec, plan.config, 64, kCompiler, checks);
  Settings checking = settings();
  checking.check_indices = true;
  const auto runtime = engine(checking);
  runtime->prepare(spec, kShape, plan.config);
  ForwardArgs args = forward_args(kShape, 96);
  const Capture bias = Capture::tensor("bias", address(0x500000000), {2, 4, 100, 80});
  args.captures = {&bias, 1};
  runtime->forward(spec, args, nullptr);
  const FakeDriver::Launch& launch = fake().launches.back();
  EXPECT_EQ(launch.maps.bias.opaque[0], 0u);
  EXPECT_NE(launch.maps.o.opaque[0], 0u);
  EXPECT_EQ(launch.shared_bytes, static_cast<unsigned>(plan.main().shared_bytes));
  EXPECT_EQ(plan.main().shared_bytes,
            plan_of(parse_spec("fwd:fp16:d96"), kShape, plan.config).main().shared_bytes);
}

/// Documents, whose tiles are visited by lists.
class EngineListsTest : public EngineTest {
 protected:
  static KernelSpec documents(Pass pass = Pass::forward) {
    KernelSpec spec{kSpec, pass};
    spec.mask = MaskProgram("doc: int32 1d; doc[q] == doc[kv]");
    return spec;
  }
  ListArgs list_args(std::size_t bytes = std::size_t{1} << 30) const {
    return {.memory = {address(0xc00000000), bytes}, .captures = {&doc_, 1}};
  }
  ForwardArgs forward_with(const TileLists* lists) const {
    ForwardArgs args = forward_args();
    args.captures = {&doc_, 1};
    args.lists = lists;
    args.workspace = {address(0xe00000000), 256};  // for what blocks count
    return args;
  }

  Capture doc_ = Capture::tensor("doc", address(0xd00000000), {100});
};

TEST_F(EngineListsTest, AreMadeOnceForManyCalls) {
  for (const Pass pass : {Pass::forward, Pass::backward}) add_to_pack(documents(pass));
  const auto runtime = engine();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const KernelSpec spec = documents(pass);
    const plan::ExecutionPlan plan = plan_of(spec, kShape);
    const std::size_t bytes = runtime->list_bytes(spec, kShape);
    EXPECT_EQ(bytes, plan.workspace.list_bytes());
    EXPECT_GT(bytes, 0u);
    fake().launches.clear();
    const TileLists lists = runtime->build_lists(spec, kShape, list_args(bytes), nullptr);
    ASSERT_EQ(fake().launches.size(), 2u);  // what masks read, then the lists
    for (int call = 0; call < 2; ++call) {
      if (pass == Pass::forward) {
        runtime->forward(spec, forward_with(&lists), nullptr);
      } else {
        BackwardArgs args = backward_args();
        args.workspace.bytes = runtime->workspace_bytes(spec, kShape) - bytes;
        args.captures = {&doc_, 1};
        args.lists = &lists;
        runtime->backward(spec, args, nullptr);
      }
    }
    EXPECT_EQ(fake().launches.size(), 2 + 2 * (plan.launches.size() - 2));
    for (const FakeDriver::Launch& launch : fake().launches) {
      const TileListParam lists_of = test::launched_params(launch, plan).lists;
      EXPECT_EQ(lists_of.count, address<int>(0xc00000000));
      EXPECT_EQ(lists_of.entries,
                address<int>(0xc00000000 + plan.workspace.list_entries - plan.workspace.list_count));
    }
  }
}

TEST_F(EngineListsTest, TheCountOfWorkBeginsAnewInEveryCall) {
  add_to_pack(documents());
  const auto runtime = engine();
  const TileLists lists = runtime->build_lists(documents(), kShape, list_args(), nullptr);
  fake().launches.clear();
  ForwardArgs args = forward_with(nullptr);
  args.workspace.bytes = runtime->workspace_bytes(documents(), kShape);
  runtime->forward(documents(), args, nullptr);
  EXPECT_EQ(fake().launches.size(), 3u);  // the kernel that makes the lists resets it
  runtime->forward(documents(), forward_with(&lists), nullptr);
  ASSERT_EQ(fake().launches.size(), 5u);
  for (const FakeDriver::Launch& launch : fake().launches)
    EXPECT_EQ(test::launched_params(launch, plan_of(documents(), kShape)).semaphores,
              address<int>(0xe00000000));
  EXPECT_EQ(fake().launches[3].blocks, 1u);
}

TEST_F(EngineListsTest, OfAnotherCallAreRefused) {
  for (const Pass pass : {Pass::forward, Pass::backward}) add_to_pack(documents(pass));
  const auto runtime = engine();
  const auto refusal = [&](const TileLists& lists) {
    fake().launches.clear();
    const Error error = error_of([&] { runtime->forward(documents(), forward_with(&lists), nullptr); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_TRUE(fake().launches.empty());
    EXPECT_CONTAINS(error.message(), "build_lists()");
    EXPECT_CONTAINS(error.message(), to_string(documents()));
    return error.message();
  };
  EXPECT_CONTAINS(refusal({}), "built for nothing");
  EXPECT_CONTAINS(refusal(runtime->build_lists(documents(Pass::backward), kShape, list_args(), nullptr)),
                  "bwd:bf16:d64");
  const TileLists lists = runtime->build_lists(documents(), kShape, list_args(), nullptr);
  runtime->forward(documents(), forward_with(&lists), nullptr);

  // Other tiles from now on.
  const TileConfig other = parse_config("sm80:br64:bc64:w4:s1");
  add_kernel(pack(), documents(), other);
  runtime->prepare(documents(), kShape, other);
  const std::string message = refusal(lists);
  EXPECT_CONTAINS(message, to_string(plan_of(documents(), kShape).config));
  EXPECT_CONTAINS(message, to_string(other));
}

TEST_F(EngineListsTest, NeedMemoryAndTheMasksValues) {
  add_to_pack(documents());
  const auto runtime = engine();
  const auto refusal = [&](const ListArgs& args) {
    return error_of([&] { runtime->build_lists(documents(), kShape, args, nullptr); }).message();
  };
  EXPECT_CONTAINS(refusal(list_args(8)), "has 8 bytes");
  ListArgs args = list_args();
  args.memory.data = address(0xc000010);
  EXPECT_CONTAINS(refusal(args), "multiple of 256");
  args = list_args();
  args.captures = {};
  EXPECT_CONTAINS(refusal(args), "doc");
  args = list_args();
  args.kv_lengths = address<std::int32_t>(0x100);
  EXPECT_CONTAINS(refusal(args), "kv_lengths");
  args = list_args();
  args.cu_seqlens_q = address<std::int32_t>(0x100);
  EXPECT_CONTAINS(refusal(args), "cu_seqlens_q");
  EXPECT_TRUE(fake().launches.empty());
}

TEST_F(EngineListsTest, OfAnotherBlockMapsBatchAreRefused) {
  KernelSpec spec = kSpec;
  spec.block_map = {64, 64};
  add_to_pack(spec);
  const auto runtime = engine();
  ListArgs list_args{.memory = {address(0xc00000000), 1 << 20}};
  list_args.block_map = {address<std::uint8_t>(0xd00000000), {1, 4, 2, 2}};
  const TileLists lists = runtime->build_lists(spec, kShape, list_args, nullptr);
  ForwardArgs args = forward_args();
  args.workspace = {address(0xe00000000), 256};
  args.block_map = list_args.block_map;
  args.lists = &lists;
  runtime->forward(spec, args, nullptr);
  args.block_map.size[0] = 2;
  EXPECT_CONTAINS(error_of([&] { runtime->forward(spec, args, nullptr); }).message(), "has 2 and 4");
}

TEST_F(EngineListsTest, WhereKernelsWalkNoneAreEmptyAndTaken) {
  add_to_pack(kSpec);
  const auto runtime = engine();
  EXPECT_EQ(runtime->list_bytes(kSpec, kShape), 0u);
  const TileLists lists = runtime->build_lists(kSpec, kShape, {}, nullptr);
  EXPECT_TRUE(fake().launches.empty());
  ForwardArgs args = forward_args();
  args.lists = &lists;
  runtime->forward(kSpec, args, nullptr);
  EXPECT_EQ(fake().launches.size(), 1u);
}

TEST_F(EngineTest, StridesOfSingleDimensionsDoNotReachTheTensorMaps) {
  const AttentionShape shape{1, 1, 1, 1, 70};
  KernelSpec spec = kSpec;
  spec.dtype = DType::fp16;
  add_to_pack(spec, shape);
  ForwardArgs args = forward_args(shape);
  args.q.stride = {-3, 0, 7, 1};
  engine()->forward(spec, args, nullptr);
  ASSERT_EQ(fake().encoded.size(), 4u);
  EXPECT_EQ(fake().encoded[0].strides, (std::vector<std::uint64_t>{16, 16, 16}));
  EXPECT_EQ(fake().encoded[1].strides, (std::vector<std::uint64_t>{128, 16, 16}));
  EXPECT_EQ(fake().encoded[0].type, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
}

TEST_F(EngineTest, PersistentKernelsLeaveMultiprocessorsToOthers) {
  const AttentionShape shape{4, 32, 32, 4096, 4096};
  const KernelSpec spec = backward_spec();
  const plan::ExecutionPlan plan = plan_of(spec, shape);
  add_to_pack(spec, shape);
  const auto runtime = engine();
  for (const int reserved : {0, 20, 100000}) {
    fake().launches.clear();
    BackwardArgs args = backward_args(shape);
    args.partial.reserved_sms = reserved;
    runtime->backward(spec, args, nullptr);
    ASSERT_EQ(fake().launches.size(), plan.launches.size());
    for (std::size_t i = 0; i < plan.launches.size(); ++i) {
      const plan::Entry& entry = plan.entries[plan.launches[i].entry];
      const std::int64_t planned = plan.launches[i].blocks;
      const std::int64_t left = std::max<std::int64_t>(planned - reserved * entry.min_blocks, entry.cluster);
      EXPECT_EQ(fake().launches[i].blocks, entry.persistent ? left : planned) << entry.name << reserved;
    }
  }
  EXPECT_TRUE(plan.main().persistent);
}

TEST_F(EngineTest, PackedSequencesAreOneLongBatchEntryOfTheTensorMapsAndManyOfTheGrid) {
  KernelSpec spec = kSpec;
  spec.varlen = true;
  const AttentionShape longest{3, 4, 2, 100, 70};
  add_to_pack(spec, longest);
  ForwardArgs args = forward_args({1, 4, 2, 230, 90});
  args.cu_seqlens_q = address<const std::int32_t>(0xa00000000);
  args.cu_seqlens_kv = address<const std::int32_t>(0xb00000000);
  args.batch_size = 3;
  args.max_seqlen_q = 100;
  args.max_seqlen_kv = 70;
  engine()->forward(spec, args, nullptr);
  ASSERT_EQ(fake().launches.size(), 1u);
  EXPECT_EQ(fake().launches[0].blocks, plan_of(spec, longest).launches[0].blocks);
  const Params params = test::launched_params(fake().launches[0], plan_of(spec, longest));
  EXPECT_EQ(params.batch, 3);
  EXPECT_EQ(params.seqlen_q, 100);
  EXPECT_EQ(params.q.stride_b, 0);
  EXPECT_EQ(params.cu_seqlens_q, args.cu_seqlens_q);
  EXPECT_EQ(params.rows_q, 230);
  EXPECT_EQ(params.rows_kv, 90);
  ASSERT_EQ(fake().encoded.size(), 3u);
  EXPECT_EQ(fake().encoded[0].sizes, (std::vector<std::uint64_t>{64, 230, 4, 1}));
  EXPECT_EQ(fake().encoded[1].sizes, (std::vector<std::uint64_t>{64, 90, 2, 1}));

  // Without rows there is nothing to do.
  args = forward_args({1, 4, 2, 0, 0});
  args.cu_seqlens_q = args.cu_seqlens_kv = address<const std::int32_t>(0xa00000000);
  args.batch_size = 3;
  fake().launches.clear();
  engine()->forward(spec, args, nullptr);
  EXPECT_TRUE(fake().launches.empty());
}

TEST_F(EngineTest, CapturesThatTheProgramsDoNotDeclareAreRefusedBeforeAnythingIsMade) {
  const auto runtime = engine();
  ForwardArgs args = forward_args();
  const Capture window = Capture::number("window", 5);
  args.captures = {&window, 1};
  const Error error = error_of([&] { runtime->forward(kSpec, args, nullptr); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_CONTAINS(error.message(), "'window', but the spec's programs declare no names");
  EXPECT_EQ(fake().libraries_loaded, 0);
}

TEST_F(EngineTest, EmptyTensorsHaveNoTensorMap) {
  const AttentionShape shape{2, 4, 2, 100, 0};
  add_to_pack(kSpec, shape);
  ForwardArgs args = forward_args(shape);
  args.k.data = args.v.data = nullptr;
  engine()->forward(kSpec, args, nullptr);
  ASSERT_EQ(fake().launches.size(), 1u);
  EXPECT_EQ(fake().encoded.size(), 2u);
  EXPECT_EQ(fake().launches[0].maps.q.opaque[0], 1u);
  EXPECT_EQ(fake().launches[0].maps.o.opaque[0], 2u);
  for (const CUtensorMap& map : {fake().launches[0].maps.k, fake().launches[0].maps.v})
    for (const std::uint64_t word : map.opaque) EXPECT_EQ(word, 0u);
}

TEST_F(EngineTest, TheBackwardPassEncodesDoutInsteadOfOut) {
  add_to_pack(backward_spec());
  engine()->backward(kSpec, backward_args(), nullptr);
  EXPECT_FALSE(fake().launches.empty());
  EXPECT_EQ(fake().encoded.size(), 4u);
}

TEST_F(EngineTest, StridesThatTheTmaUnitRefusesAreNamedWithTheRemedy) {
  add_to_pack(kSpec);
  fake().encode_result = CUDA_ERROR_INVALID_VALUE;
  ForwardArgs args = forward_args();
  args.q.stride = {0, 6400, 64, 1};
  const Error error = error_of([&] { engine()->forward(kSpec, args, nullptr); });
  EXPECT_EQ(error.code(), ErrorCode::unsupported);
  for (const char* part : {"cannot copy q", "[2, 4, 100, 64]", "[0, 6400, 64, 1]", "CUDA_ERROR_FAKE",
                           "multiples of 16 bytes", "prepare()", "sm80"})
    EXPECT_CONTAINS(error.message(), part);
  EXPECT_TRUE(fake().launches.empty());
}

TEST_F(EngineTest, PrepareReportsOriginOnceThenMemory) {
  add_to_pack(kSpec, kShape, 77);
  const auto runtime = engine();
  const KernelReport first = runtime->prepare(kSpec, kShape, {});
  EXPECT_EQ(first.origin, KernelOrigin::pack);
  EXPECT_EQ(first.config_source, ConfigSource::heuristic);
  EXPECT_EQ(to_string(first.spec), "fwd:bf16:d64");
  EXPECT_TRUE(first.key.ends_with(kCompiler)) << first.key;
  ASSERT_FALSE(first.entries.empty());
  EXPECT_EQ(first.entries[0].registers, 77);
  EXPECT_GT(first.render_ms, 0);
  const KernelReport second = runtime->prepare(kSpec, kShape, {});
  EXPECT_EQ(second.origin, KernelOrigin::memory);
  EXPECT_EQ(second.render_ms, 0);
  EXPECT_EQ(second.key, first.key);
}

TEST_F(EngineTest, AGivenConfigurationIsRememberedForItsShapeAlone) {
  const TileConfig planned = plan_of(kSpec, kShape).config;
  const TileConfig given = plan::traits(Family::simt).heuristic(kSpec.normalized(), kShape, device_info());
  add_kernel(pack(), kSpec, planned);
  add_kernel(pack(), kSpec, given);
  const auto runtime = engine();
  runtime->forward(kSpec, forward_args(), nullptr);
  EXPECT_EQ(runtime->prepare(kSpec, kShape, given).config, given);
  fake().launches.clear();
  runtime->forward(kSpec, forward_args(), nullptr);
  EXPECT_EQ(fake().launches[0].blocks, plan_of(kSpec, kShape, given).launches[0].blocks);
  EXPECT_EQ(runtime->prepare(kSpec, kShape, {}).config_source, ConfigSource::given);
  EXPECT_EQ(runtime->prepare(kSpec, {2, 4, 2, 101, 70}, {}).config_source, ConfigSource::heuristic);

  TileConfig impossible = given;
  impossible.br = 7;
  EXPECT_EQ(error_of([&] { runtime->prepare(kSpec, kShape, impossible); }).code(),
            ErrorCode::invalid_argument);
  EXPECT_EQ(runtime->prepare(kSpec, kShape, {}).config, given);
}

TEST_F(EngineTest, ATuningRecordOfThePackChooses) {
  const plan::TuningRecord record = simt_record();
  add_kernel(pack(), kSpec, record.best);
  write_to_pack(record);
  const KernelReport report = engine()->prepare(kSpec, kShape, {});
  EXPECT_EQ(report.config, record.best);
  EXPECT_EQ(report.config_source, ConfigSource::tuned);
}

TEST_F(EngineTest, ARecordOfAnotherDriverOrOfAnotherCompilersCodeIsALead) {
  plan::TuningRecord record = simt_record();
  add_kernel(pack(), kSpec, record.best);
  const auto source_with = [&](const std::string& driver, const std::string& nvrtc) {
    record.driver = driver;
    record.nvrtc = nvrtc;
    write_to_pack(record);
    const KernelReport report = engine()->prepare(kSpec, kShape, {});
    EXPECT_EQ(report.config, record.best) << driver << " " << nvrtc;
    return report.config_source;
  };
  EXPECT_EQ(source_with("13.0", kCompiler), ConfigSource::tuned);
  EXPECT_EQ(source_with("", ""), ConfigSource::tuned);
  EXPECT_EQ(source_with("12.4", kCompiler), ConfigSource::tuned_elsewhere);
  EXPECT_EQ(source_with("13.0", "nvrtc1.2.4"), ConfigSource::tuned_elsewhere);
}

TEST_F(EngineTest, ARecordWhoseKernelIsNowhereGivesWayToTheHeuristic) {
  add_to_pack(kSpec);
  const plan::TuningRecord record = simt_record();
  write_to_pack(record);
  const KernelReport report = engine()->prepare(kSpec, kShape, {});
  EXPECT_EQ(report.config, plan_of(kSpec, kShape).config);
  EXPECT_EQ(report.config_source, ConfigSource::heuristic);
  EXPECT_CONTAINS(log_.text(), to_string(record.best));
  EXPECT_EQ(error_of([&] { engine()->prepare(backward_spec(), kShape, {}); }).code(),
            ErrorCode::kernel_missing);
}

TEST_F(EngineTest, CaptureNeedsPrepare) {
  add_to_pack(kSpec);
  const auto runtime = engine();
  fake().capturing = true;
  const Error error = error_of([&] { runtime->forward(kSpec, forward_args(), nullptr); });
  EXPECT_CONTAINS(error.message(), "prepare()");
  EXPECT_EQ(fake().libraries_loaded, 0);
  fake().capturing = false;
  runtime->prepare(kSpec, kShape, {});
  fake().capturing = true;
  runtime->forward(kSpec, forward_args(), nullptr);
  EXPECT_FALSE(fake().launches.empty());
}

TEST_F(EngineTest, EachDeviceIsMadeReady) {
  add_to_pack(kSpec);
  const auto runtime = engine();
  runtime->forward(kSpec, forward_args(), nullptr);
  fake().device = fake().owner_of_pointers = 1;
  runtime->forward(kSpec, forward_args(), nullptr);
  EXPECT_EQ(fake().libraries_loaded, 1);
  EXPECT_EQ(fake().opt_ins[0], fake().opt_ins[1]);
  EXPECT_GT(fake().opt_ins[1], 0);
}

TEST_F(EngineTest, MemoryThatTheDeviceCannotReachIsRefused) {
  add_to_pack(kSpec);
  const auto runtime = engine();
  fake().unknown_pointers_below = 0x100000001;
  const Error host = error_of([&] { runtime->forward(kSpec, forward_args(), nullptr); });
  EXPECT_CONTAINS(host.message(), "q is at 0x100000000");
  fake().unknown_pointers_below = 0;
  fake().owner_of_pointers = 3;
  const Error other = error_of([&] { runtime->forward(kSpec, forward_args(), nullptr); });
  EXPECT_EQ(other.code(), ErrorCode::no_device);
  EXPECT_CONTAINS(other.message(), "device 3");
  EXPECT_TRUE(fake().launches.empty());
}

TEST_F(EngineTest, NothingToDoNeedsNoKernel) {
  const auto runtime = engine();
  runtime->forward(kSpec, forward_args({0, 4, 2, 100, 70}), nullptr);
  runtime->forward(kSpec, forward_args({2, 4, 2, 0, 70}), nullptr);
  EXPECT_TRUE(fake().launches.empty());
  EXPECT_TRUE(runtime->prepare(kSpec, {0, 4, 2, 100, 70}, {}).key.empty());
}

TEST_F(EngineTest, KernelsStayUntilTheEngineGoes) {
  add_to_pack(kSpec);
  auto runtime = engine();
  runtime->prepare(kSpec, kShape, {});
  EXPECT_EQ(fake().libraries_unloaded, 0);
  runtime.reset();
  EXPECT_EQ(fake().libraries_unloaded, 1);
}

TEST_F(EngineTest, MoreShapesThanAreKeptStillWork) {
  // So many Q tiles that no two of them share keys, which would be another kernel.
  add_to_pack(kSpec, {300, 1, 1, 1, 5000});
  const auto runtime = engine();
  const TileConfig config = plan_of(kSpec, {300, 1, 1, 1, 5000}).config;
  int calls = 0;
  for (std::int64_t keys = 1; keys <= 5000; ++keys) {
    const AttentionShape shape{300, 1, 1, 1, keys};
    if (plan_of(kSpec, shape).config != config) continue;
    runtime->forward(kSpec, forward_args(shape), nullptr);
    ++calls;
  }
  EXPECT_GT(calls, 4096);
  EXPECT_EQ(static_cast<int>(fake().launches.size()), calls);
  EXPECT_EQ(fake().libraries_loaded, 1);
}

TEST_F(EngineTest, ManyThreadsLoadOneKernel) {
  add_to_pack(kSpec);
  const auto runtime = engine();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&] {
      for (int call = 0; call < 50; ++call) runtime->forward(kSpec, forward_args(), nullptr);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fake().libraries_loaded, 1);
  EXPECT_EQ(fake().launches.size(), 400 * plan_of(kSpec, kShape).launches.size());
}

TEST(CallKey, TellsProblemsApart) {
  const auto key = [](const char* spec, const char* shape, int device = 0) {
    static std::vector<std::unique_ptr<KernelSpec>> specs;  // views need their spec
    specs.push_back(std::make_unique<KernelSpec>(parse_spec(spec)));
    return CallKeyView(*specs.back(), specs.back()->pass, parse_shape(shape), device);
  };
  const char* shape = "b2:hq4:hkv2:sq100:skv70";
  std::vector<CallKeyView> keys;
  for (const char* spec : {"fwd:bf16:d64",
                           "bwd:bf16:d64",
                           "fwd:fp16:d64",
                           "fwd:bf16:d72",
                           "fwd:bf16:d64x32",
                           "fwd:bf16:d64:causal",
                           "fwd:bf16:d64:causal_top_left",
                           "fwd:bf16:d64:dropout",
                           "fwd:bf16:d64:kvlen",
                           "fwd:bf16:d64:map32x64",
                           "fwd:bf16:d64:map64x32",
                           "bwd:bf16:d64:det",
                           "fwd:bf16:d64:varlen",
                           "fwd:bf16:d64:sinks",
                           "fwd:bf16:d64:varlen:sinks",
                           "fwd:bf16:d64:row_max",
                           "fwd:bf16:d64:cache",
                           "fwd:bf16:d64:pages16",
                           "fwd:bf16:d64:pages5",
                           "append:bf16:d64:cache",
                           "append:bf16:d64:pages16",
                           "append:bf16:d64:pages5",
                           "fwd:bf16:d64:fp32_out",
                           "bwd:bf16:d64:fp32_grads",
                           "bwd:bf16:d64:add_grads",
                           "fwd:bf16:d64:invariant"})
    keys.push_back(key(spec, shape));
  keys.push_back(key("fwd:bf16:d64", "b4:hq4:hkv2:sq100:skv70"));
  keys.push_back(key("fwd:bf16:d64", "b2:hq4:hkv4:sq100:skv70"));
  keys.push_back(key("fwd:bf16:d64", "b2:hq4:hkv2:sq70:skv100"));
  keys.push_back(key("fwd:bf16:d64", shape, 1));
  const CallKeyHash hash;
  for (std::size_t i = 0; i < keys.size(); ++i)
    for (std::size_t j = 0; j < keys.size(); ++j) {
      EXPECT_EQ(keys[i] == keys[j], i == j) << i << " " << j;
      EXPECT_EQ(hash(keys[i]) == hash(keys[j]), i == j) << i << " " << j;
    }
  const CallKey owned(keys[5]);
  EXPECT_TRUE(CallKeyEqual{}(owned, keys[5]));
  EXPECT_EQ(hash(owned), hash(keys[5]));
  EXPECT_TRUE(key("fwd:bf16:d64", shape) == key("fwd:bf16:d64x64", shape));
}

// --- tuning in the background

/// A tuner that only remembers: the test says when it is done.
class BackgroundTest : public EngineTest {
 protected:
  struct Remembers : BackgroundTuner {
    std::vector<BackgroundJob>& jobs;
    explicit Remembers(std::vector<BackgroundJob>& j) : jobs(j) {}
    void want(BackgroundJob job) override { jobs.push_back(std::move(job)); }
  };

  std::unique_ptr<Engine> tuning_engine(bool on = true) {
    Settings settings = this->settings();
    settings.tune_in_background = on;
    return std::make_unique<Engine>(settings, FakeDriver::driver(), [this](const Settings&, Adopt adopt) {
      adopt_ = std::move(adopt);
      return std::make_unique<Remembers>(jobs_);
    });
  }
  static TileConfig better() {
    return plan::traits(Family::simt).heuristic(kSpec.normalized(), kShape, device_info());
  }

  std::vector<BackgroundJob> jobs_;
  Adopt adopt_;
};

TEST_F(BackgroundTest, IsOffByDefault) {
  EXPECT_FALSE(resolve_settings({}, {}).tune_in_background);
  add_to_pack(kSpec);
  tuning_engine(false)->forward(kSpec, forward_args(), nullptr);
  EXPECT_TRUE(jobs_.empty());
  EXPECT_FALSE(resolve_settings({.jit = JitMode::off, .tune_in_background = true}, {}).tune_in_background)
      << "without a compiler there is nothing to choose from";
  EXPECT_TRUE(resolve_settings({.jit = JitMode::on, .tune_in_background = true}, {}).tune_in_background);
}

TEST_F(BackgroundTest, OptionsWinOverTheEnvironment) {
  Environment on;
  on.tune_in_background = true;
  EXPECT_TRUE(resolve_settings({}, on).tune_in_background);
  EXPECT_FALSE(resolve_settings({.tune_in_background = false}, on).tune_in_background);
  EXPECT_FALSE(resolve_settings({.jit = JitMode::off}, on).tune_in_background);
}

TEST_F(BackgroundTest, WhatIsStoppedStaysSoAndKeepsWhatWasTuned) {
  add_to_pack(kSpec);
  add_kernel(pack(), kSpec, better());
  const auto runtime = tuning_engine();
  runtime->stop_tuning();  // before there is anything to stop
  runtime->forward(kSpec, forward_args(), nullptr);
  EXPECT_TRUE(jobs_.empty());

  const auto later = tuning_engine();
  later->forward(kSpec, forward_args(), nullptr);
  ASSERT_EQ(jobs_.size(), 1u);
  adopt_(jobs_[0], better());
  later->stop_tuning();
  later->stop_tuning();
  EXPECT_EQ(later->prepare(kSpec, kShape, {}).config, better());
  AttentionShape other = kShape;
  other.seqlen_kv *= 2;
  later->prepare(kSpec, other, {});
  EXPECT_EQ(jobs_.size(), 1u);
}

TEST_F(BackgroundTest, TheFirstUseOfAShapeAsksOnceAndCallsSwitchWhenItIsDone) {
  add_to_pack(kSpec);
  add_kernel(pack(), kSpec, better());
  const auto runtime = tuning_engine();
  for (int i = 0; i < 3; ++i) runtime->forward(kSpec, forward_args(), nullptr);
  ASSERT_EQ(jobs_.size(), 1u);
  EXPECT_EQ(jobs_[0].spec, kSpec.normalized());
  EXPECT_EQ(jobs_[0].shape, kShape);
  EXPECT_EQ(jobs_[0].current, plan_of(kSpec, kShape).config);
  EXPECT_EQ(jobs_[0].workspace_bytes, runtime->workspace_bytes(kSpec, kShape));
  EXPECT_EQ(jobs_[0].context.context(), FakeDriver::context_of(FakeDriver::own_device));

  adopt_(jobs_[0], better());
  fake().launches.clear();
  runtime->forward(kSpec, forward_args(), nullptr);
  EXPECT_EQ(fake().launches.at(0).blocks, plan_of(kSpec, kShape, better()).launches[0].blocks);
  const KernelReport report = runtime->prepare(kSpec, kShape, {});
  EXPECT_EQ(report.config, better());
  EXPECT_EQ(report.config_source, ConfigSource::tuned);
  EXPECT_EQ(jobs_.size(), 1u);
}

TEST_F(BackgroundTest, WhatTheCallerHasChosenStays) {
  const TileConfig planned = plan_of(kSpec, kShape).config;
  add_kernel(pack(), kSpec, planned);
  add_kernel(pack(), kSpec, better());
  const auto runtime = tuning_engine();
  runtime->forward(kSpec, forward_args(), nullptr);
  runtime->prepare(kSpec, kShape, planned);
  ASSERT_EQ(jobs_.size(), 1u);
  adopt_(jobs_[0], better());
  EXPECT_EQ(runtime->prepare(kSpec, kShape, {}).config, planned);

  jobs_.clear();
  const auto other = tuning_engine();
  other->prepare(kSpec, kShape, planned);
  other->forward(kSpec, forward_args(), nullptr);
  EXPECT_TRUE(jobs_.empty()) << "a given configuration is not tuned";
}

TEST_F(BackgroundTest, ALeadIsTunedAndAMeasurementIsNot) {
  add_kernel(pack(), kSpec, better());
  plan::TuningRecord record = simt_record();
  record.best = better();
  for (const std::string nvrtc : {kCompiler, "nvrtc1.2.4"}) {
    record.nvrtc = nvrtc;
    write_to_pack(record);
    jobs_.clear();
    tuning_engine()->prepare(kSpec, kShape, {});
    ASSERT_EQ(jobs_.size(), nvrtc == kCompiler ? 0u : 1u) << nvrtc;
  }
  EXPECT_EQ(jobs_[0].current, better());
}

TEST_F(BackgroundTest, SpecsWithTileListsAreLeftAlone) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64:mask{kv <= q || kv % 3 == 0}").normalized();
  add_to_pack(spec);
  const auto runtime = tuning_engine();
  EXPECT_GT(runtime->list_bytes(spec, kShape), 0u);
  runtime->prepare(spec, kShape, {});
  EXPECT_TRUE(jobs_.empty());
}

TEST_F(BackgroundTest, AChoiceThatCannotBeLoadedChangesNothing) {
  add_to_pack(kSpec);
  const auto runtime = tuning_engine();
  runtime->forward(kSpec, forward_args(), nullptr);
  ASSERT_EQ(jobs_.size(), 1u);
  EXPECT_EQ(error_of([&] { adopt_(jobs_[0], better()); }).code(), ErrorCode::kernel_missing);
  EXPECT_EQ(runtime->prepare(kSpec, kShape, {}).config, plan_of(kSpec, kShape).config);
}

TEST_F(BackgroundTest, TheRealTunerTellsWhatIsWrongAndEnds) {
  add_to_pack(kSpec);
  Settings settings = this->settings();
  settings.tune_in_background = true;
  fake().ctx_result = CUDA_ERROR_INVALID_VALUE;
  {
    const auto runtime = engine(settings);
    runtime->forward(kSpec, forward_args(), nullptr);
    EXPECT_TRUE(log_.hears("cannot tune fwd:bf16:d64 at b2:hq4:hkv2:sq100:skv70 in the background"));
    runtime->forward(kSpec, forward_args(), nullptr);
  }
  EXPECT_EQ(fake().launches.size(), 2u);
}

}  // namespace
}  // namespace flashjit
