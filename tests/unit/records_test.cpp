// Tuning records: JSON, files, and the choice of the nearest.
#include "plan/records.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include "flashjit/error.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "plan/shipped.hpp"
#include "support/file.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit::plan {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

class TemporaryFolder : public testing::Test {
 protected:
  TemporaryFolder() { fs::create_directories(folder_); }
  ~TemporaryFolder() override { fs::remove_all(folder_); }

  std::vector<std::string> names(const fs::path& folder) const {
    std::vector<std::string> out;
    for (const auto& entry : fs::directory_iterator(folder)) out.push_back(entry.path().filename().string());
    return out;
  }

  const fs::path folder_ = fs::temp_directory_path() / ("flashjit-records-" + unique_suffix());
};
using RecordFile = TemporaryFolder;

TuningRecord example() {
  TuningRecord record;
  record.spec = parse_spec("fwd:bf16:d128:causal");
  record.shape = {2, 32, 8, 4096, 4096};
  record.arch = "sm_90a";
  record.device = "NVIDIA H100 80GB HBM3";
  record.driver = "13.0";
  record.nvrtc = "nvrtc13.0.88";
  record.library = FLASHJIT_VERSION;
  record.best = parse_config("sm80:br128:bc64:w4:s2");
  record.timings = {{record.best, 1.25, ""}, {parse_config("sm80:br64:bc64:w4"), 0, "spills 32 bytes"}};
  return record;
}

DeviceInfo h100() {
  DeviceInfo device = DeviceInfo::parse("sm_90a");
  device.name = example().device;
  device.driver = example().driver;
  return device;
}

TuningRecord with_shape(const std::string& shape, const std::string& best = "simt:br16:bc16:w4") {
  TuningRecord record = example();
  record.shape = parse_shape(shape);
  record.best = parse_config(best);
  return record;
}

// --- JSON

TEST(Record, RoundTrip) {
  EXPECT_EQ(parse_record(to_json(example())), example());
  TuningRecord bare = example();
  bare.device = bare.driver = bare.nvrtc = bare.library = "";
  bare.timings.clear();
  EXPECT_EQ(parse_record(to_json(bare)), bare);
  TuningRecord odd = example();
  odd.device = "quotes \" and \\ and \n and \xc3\xa9";
  odd.timings[0].ms = 0.1 + 1e-17;
  EXPECT_EQ(parse_record(to_json(odd)), odd);
}

TEST(Record, RandomTimingsKeepEveryBit) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(-20, 20);
  for (int round = 0; round < 500; ++round) {
    TuningRecord record = example();
    record.timings[0].ms = std::exp(exponent(random));
    ASSERT_EQ(parse_record(to_json(record)), record);
  }
}

TEST(Record, BytesThatAreNoTextDoNotThrow) {
  TuningRecord record = example();
  record.device = "GPU \xff";
  EXPECT_NE(parse_record(to_json(record)).device, "");
}

TEST(Record, EveryMissingFieldIsNamed) {
  const Json whole = Json::parse(to_json(example()));
  for (const char* field :
       {"format", "spec", "shape", "arch", "device", "driver", "nvrtc", "library", "best", "timings"}) {
    Json damaged = whole;
    ASSERT_EQ(damaged.erase(field), 1u) << field;
    const std::string message = failure(ErrorCode::io, [&] { parse_record(damaged.dump()); });
    expect_in("the tuning record is damaged: '" + std::string(field) + "' is missing", message);
    expect_in("delete it and tune again", message);
  }
  for (const char* field : {"config", "ms"}) {
    Json damaged = whole;
    damaged["timings"][1].erase(field);
    expect_in("'" + std::string(field) + "' is missing",
              failure(ErrorCode::io, [&] { parse_record(damaged.dump()); }));
  }
}

TEST(Record, EveryFieldOfAnotherTypeIsNamed) {
  const Json whole = Json::parse(to_json(example()));
  for (const auto& [field, value] : whole.items()) {
    for (const Json& other :
         {Json(nullptr), Json(true), Json(17), Json("text"), Json::array(), Json::object()}) {
      if (other.type() == value.type() && !other.is_string()) continue;
      if (other.is_number() && value.is_number()) continue;
      // Any text is a device or a version.
      if (other.is_string() && std::set<std::string>{"device", "driver", "nvrtc", "library"}.contains(field))
        continue;
      Json damaged = whole;
      damaged[field] = other;
      expect_in("'" + field + "'", failure(ErrorCode::io, [&] { parse_record(damaged.dump()); }));
    }
  }
}

TEST(Record, DamageIsToldByItsText) {
  const Json whole = Json::parse(to_json(example()));
  const auto message_with = [&](const char* pointer, const Json& value) {
    Json damaged = whole;
    damaged[Json::json_pointer(pointer)] = value;
    return failure(ErrorCode::io, [&] { parse_record(damaged.dump()); });
  };
  expect_in("'format' is '2'; this version reads format 1", message_with("/format", 2));
  expect_in("'format' is '1.5'", message_with("/format", 1.5));
  expect_in("'fwd:bf16:d7'", message_with("/spec", "fwd:bf16:d7"));
  expect_in("'b1'", message_with("/shape", "b1"));
  expect_in("'best' cannot be read", message_with("/best", "sm80"));
  expect_in("'../../sm_90'", message_with("/arch", "../../sm_90"));
  expect_in("'sm_/x'", message_with("/arch", "sm_/x"));
  expect_in("'sm_'", message_with("/arch", "sm_"));
  expect_in("'ms' is -1; it must be finite and not negative", message_with("/timings/0/ms", -1));
  expect_in("'ms' is null where a number should stand", message_with("/timings/0/ms", nullptr));
  expect_in("'ms' is string where a number should stand", message_with("/timings/0/ms", "1"));
  expect_in("'skipped' is number where a string should stand", message_with("/timings/1/skipped", 3));
  expect_in("an object should stand where there is number", message_with("/timings/0", 3));
}

TEST(Record, TextThatIsNoRecordIsRefused) {
  for (const std::string text : {"", "{", "[]", "null", "\xff", "{\"format\": 1e999}", "nonsense"}) {
    expect_in("the tuning record is damaged", failure(ErrorCode::io, [&] { parse_record(text); }));
  }
  const std::string deep(100000, '[');
  expect_in("damaged", failure(ErrorCode::io, [&] { parse_record(deep); }));
  const std::string message = failure(ErrorCode::io, [&] { parse_record(std::string(1 << 20, 'x')); });
  EXPECT_LT(message.size(), 500u) << "a message stays a message";
}

TEST(Record, EveryTruncationIsRefused) {
  std::string json = to_json(example());
  json.erase(json.find_last_of('}'));
  for (std::size_t length = 0; length <= json.size(); ++length) {
    failure(ErrorCode::io, [&] { parse_record(json.substr(0, length)); });
  }
}

// --- files of records

// A record has no digest, so that people may write one: whatever it says, the plan is one that runs.
TEST(Record, EveryFlippedOrMissingByteIsRefusedOrChoosesWhatIsAdmitted) {
  int refused = 0, chosen = 0;
  for_each_damage(to_json(example()), [&](const std::string& text) {
    TuningRecords records;
    std::vector<std::string> warnings;
    records.load(std::vector<EmbeddedFile>{{"a.json", text}}, &warnings);
    ASSERT_EQ(records.size() + warnings.size(), 1u);
    refused += !warnings.empty();
    const ExecutionPlan plan = make_plan(example().spec, example().shape, h100(), records);
    chosen += plan.config_source != ConfigSource::heuristic;
    ASSERT_TRUE(traits(plan.config.family).admits(plan.spec, plan.config, h100()))
        << to_string(plan.config) << " of " << text;
  });
  EXPECT_GT(refused, 500);
  EXPECT_GT(chosen, 300) << "names and times may be wrong and harm nobody";
}

TEST(RecordPath, IsReadableAndSafe) {
  EXPECT_EQ(record_path(example()), "sm_90a/fwd-bf16-d128-causal__b2-hq32-hkv8-sq4096-skv4096.json");
}

TEST(RecordPath, DiffersWhereTheProblemDiffers) {
  std::set<fs::path> paths;
  int count = 0;
  for (const char* arch : {"sm_80", "sm_90a"}) {
    for (const char* spec : {"fwd:bf16:d128", "bwd:bf16:d128", "fwd:bf16:d128x64", "fwd:bf16:d128:causal"}) {
      for (const char* shape : {"b1:hq1:hkv1:sq1:skv11", "b1:hq1:hkv1:sq11:skv1", "b11:hq1:hkv1:sq1:skv1"}) {
        TuningRecord record = example();
        record.arch = arch;
        record.spec = parse_spec(spec);
        record.shape = parse_shape(shape);
        paths.insert(record_path(record));
        ++count;
      }
    }
  }
  EXPECT_EQ(paths.size(), static_cast<std::size_t>(count));
}

TEST(RecordPath, LongAndOddProgramsStaySafeAndApart) {
  TuningRecord record = example();
  std::set<fs::path> paths;
  std::string sum = "kv";
  for (int i = 0; i < 150; ++i) sum += " + q";
  for (const std::string& mask : {sum + " < 1", sum + " < 2", std::string("q / kv < .5"),
                                  std::string("q / kv < .25"), std::string("q <= kv")}) {
    record.spec.mask = MaskProgram(mask);
    const fs::path path = record_path(record);
    paths.insert(path);
    EXPECT_LT(path.filename().string().size(), 200u);
    EXPECT_EQ(path.filename().string().find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-."),
              std::string::npos);
    EXPECT_EQ(path.parent_path(), "sm_90a");
  }
  EXPECT_EQ(paths.size(), 5u);
}

TEST_F(RecordFile, WriteThenLoad) {
  const TuningRecord record = example();
  write_record(folder_ / "new", record);
  EXPECT_EQ(parse_record(read_file(folder_ / "new" / record_path(record))), record);

  TuningRecords records;
  std::vector<std::string> warnings;
  records.load(folder_ / "new", &warnings);
  EXPECT_TRUE(warnings.empty());
  ASSERT_EQ(records.size(), 1u);
  const auto match = records.find(record.spec, record.shape, h100());
  ASSERT_NE(match.record, nullptr);
  EXPECT_TRUE(match.exact);
  EXPECT_EQ(*match.record, record);
}

TEST_F(RecordFile, WhatCouldNotBeReadIsNotWritten) {
  for (const double ms :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -1.0}) {
    TuningRecord record = example();
    record.timings[0].ms = ms;
    expect_in("cannot be written: 'ms'",
              failure(ErrorCode::invalid_argument, [&] { write_record(folder_, record); }));
  }
  TuningRecord foreign = example();
  foreign.arch = "../x";
  expect_in("'../x'", failure(ErrorCode::invalid_argument, [&] { write_record(folder_, foreign); }));
  expect_in("'../x'", failure(ErrorCode::invalid_argument, [&] { record_path(foreign); }));
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(RecordFile, AFolderThatCannotBeMadeIsNamed) {
  write_file_atomically(folder_ / "file", "x");
  expect_in("cannot make the folder '" + (folder_ / "file").string() + "'",
            failure(ErrorCode::io, [&] { write_record(folder_ / "file", example()); }));
}

TEST_F(RecordFile, DamagedFilesAreReportedAndPassedOver) {
  write_record(folder_, example());
  fs::create_directories(folder_ / "sm_80" / "folder.json");
  write_file_atomically(folder_ / "sm_80" / "damaged.json", "{");
  write_file_atomically(folder_ / "sm_80" / "notes.txt", "{");
  fs::create_symlink("nowhere", folder_ / "sm_80" / "dangling.json");
  TuningRecords records;
  std::vector<std::string> warnings;
  records.load(folder_, &warnings);
  EXPECT_EQ(records.size(), 1u);
  ASSERT_EQ(warnings.size(), 1u);
  expect_in("damaged.json': the tuning record is damaged", warnings[0]);
  TuningRecords silent;
  silent.load(folder_);
  EXPECT_EQ(silent.size(), 1u);
}

TEST_F(RecordFile, AMissingFolderHoldsNothing) {
  TuningRecords records;
  std::vector<std::string> warnings;
  records.load(folder_ / "missing", &warnings);
  EXPECT_EQ(records.size(), 0u);
  EXPECT_TRUE(warnings.empty());
  write_file_atomically(folder_ / "file", "x");
  records.load(folder_ / "file", &warnings);
  ASSERT_EQ(warnings.size(), 1u);
  expect_in("cannot list the tuning records in '" + (folder_ / "file").string(), warnings[0]);
}

// --- the choice

class Choice : public testing::Test {
 protected:
  std::string found(const std::string& shape,
                    const std::function<bool(const TileConfig&)>& usable = {}) const {
    const auto match = records_.find(example().spec, parse_shape(shape), h100(), usable);
    if (!match.record) return "none";
    return to_string(match.record->best) + (match.exact ? " exact" : " near");
  }

  TuningRecords records_;
};

TEST_F(Choice, NothingForAnotherProblemOrDevice) {
  records_.add(example());
  const AttentionShape shape = example().shape;
  EXPECT_EQ(records_.find(parse_spec("bwd:bf16:d128:causal"), shape, h100()).record, nullptr);
  EXPECT_EQ(records_.find(parse_spec("fwd:bf16:d64:causal"), shape, h100()).record, nullptr);
  EXPECT_EQ(records_.find(example().spec, shape, DeviceInfo::parse("sm_80")).record, nullptr);
  EXPECT_NE(records_.find(example().spec, shape, h100()).record, nullptr);
  KernelSpec spelled = example().spec;
  spelled.head_dim_v = 0;
  EXPECT_NE(records_.find(spelled, shape, h100()).record, nullptr) << "equal problems have one spelling";
}

TEST_F(Choice, ExactBeforeNear) {
  records_.add(with_shape("b2:hq16:hkv16:sq1024:skv1024", "simt:br16:bc16:w4"));
  records_.add(with_shape("b1:hq32:hkv32:sq1024:skv1024", "simt:br32:bc32:w4"));
  // Both have the same batch * heads and so the same distance: only the second is this very shape.
  EXPECT_EQ(found("b1:hq32:hkv32:sq1024:skv1024"), "simt:br32:bc32:w4 exact");
  EXPECT_EQ(found("b4:hq8:hkv8:sq1024:skv1024"), "simt:br16:bc16:w4 near");
}

TEST_F(Choice, NearestByRatio) {
  records_.add(with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br16:bc16:w4"));
  records_.add(with_shape("b1:hq8:hkv8:sq4096:skv4096", "simt:br32:bc32:w4"));
  EXPECT_EQ(found("b1:hq8:hkv8:sq1024:skv1024"), "simt:br16:bc16:w4 near");
  EXPECT_EQ(found("b1:hq8:hkv8:sq2048:skv2048"), "simt:br32:bc32:w4 near");
  EXPECT_EQ(found("b1:hq8:hkv8:sq3000:skv3000"), "simt:br32:bc32:w4 near");
}

TEST_F(Choice, WhatIsFarIsLeftToTheHeuristic) {
  records_.add(with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br16:bc16:w4"));
  EXPECT_EQ(found("b1:hq8:hkv8:sq1024:skv1024"), "simt:br16:bc16:w4 near");
  for (const char* shape :
       {"b1:hq8:hkv8:sq2048:skv2048", "b4:hq8:hkv8:sq1024:skv1024", "b1:hq8:hkv8:sq0:skv0",
        "b0:hq0:hkv0:sq512:skv512", "b1:hq8:hkv8:sq100000:skv100000"})
    EXPECT_EQ(found(shape), "none") << shape;
}

TEST_F(Choice, EarlierWinsTies) {
  records_.add(with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br16:bc16:w4"));
  records_.add(with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br32:bc32:w4"));
  EXPECT_EQ(records_.size(), 2u);
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512"), "simt:br16:bc16:w4 exact");
  EXPECT_EQ(found("b1:hq8:hkv8:sq513:skv512"), "simt:br16:bc16:w4 near");
}

TEST_F(Choice, UnusableRecordsArePassedOver) {
  records_.add(with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br16:bc16:w4"));
  records_.add(with_shape("b1:hq8:hkv8:sq1024:skv512", "simt:br32:bc32:w4"));
  const auto not_16 = [](const TileConfig& config) { return config.br != 16; };
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512", not_16), "simt:br32:bc32:w4 near");
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512", [](const TileConfig&) { return false; }), "none");
}

TEST_F(Choice, LongLoopsAndManyBlocksAreAllAlike) {
  records_.add(with_shape("b1:hq8:hkv8:sq16384:skv16384", "simt:br16:bc16:w4"));
  records_.add(with_shape("b1:hq8:hkv8:sq1024:skv1024", "simt:br32:bc32:w4"));
  EXPECT_EQ(found("b16:hq32:hkv32:sq131072:skv131072"), "simt:br16:bc16:w4 near");
  records_.add(with_shape("b64:hq32:hkv32:sq1024:skv1024", "simt:br64:bc64:w8"));
  EXPECT_EQ(found("b512:hq32:hkv32:sq1024:skv1024"), "simt:br64:bc64:w8 near")
      << "as many waves as one could want";
  EXPECT_EQ(found("b1:hq4:hkv4:sq1024:skv1024"), "simt:br32:bc32:w4 near") << "hardly a wave";
}

TEST_F(Choice, LengthsThatAreWholeTilesAreUnlikeThoseThatAreNot) {
  records_.add(with_shape("b1:hq8:hkv8:sq1024:skv1024", "simt:br16:bc16:w4"));
  records_.add(with_shape("b1:hq8:hkv8:sq1100:skv1100", "simt:br32:bc32:w4"));
  EXPECT_EQ(found("b1:hq8:hkv8:sq1050:skv1050"), "simt:br32:bc32:w4 near");
}

TEST_F(Choice, AnotherDevicesRecordIsALead) {
  TuningRecord other = with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br16:bc16:w4");
  other.device = "another GPU of this architecture";
  records_.add(other);
  const auto match = records_.find(example().spec, other.shape, h100());
  ASSERT_NE(match.record, nullptr);
  EXPECT_TRUE(match.same_shape);
  EXPECT_FALSE(match.exact);
  records_.add(with_shape("b1:hq8:hkv8:sq640:skv512", "simt:br32:bc32:w4"));
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512"), "simt:br32:bc32:w4 near") << "a near shape of this device";
  EXPECT_TRUE(records_.find(example().spec, other.shape, DeviceInfo::parse("sm_90a")).exact)
      << "a device built by hand has no name that could differ";
}

TEST_F(Choice, AnotherVersionsRecordIsALead) {
  TuningRecord other = with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br16:bc16:w4");
  other.library = "0.0.1";
  records_.add(other);
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512"), "simt:br16:bc16:w4 near");
  records_.add(with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br32:bc32:w4"));
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512"), "simt:br32:bc32:w4 exact");
}

TEST_F(Choice, AnotherDriversRecordIsALeadThatStillWinsOverTheHeuristic) {
  TuningRecord other = example();
  other.driver = "12.4";
  records_.add(other);
  const auto match = records_.find(other.spec, other.shape, h100());
  ASSERT_NE(match.record, nullptr);
  EXPECT_TRUE(match.same_shape);
  EXPECT_FALSE(match.exact);
  const ExecutionPlan plan = make_plan(other.spec, other.shape, h100(), records_);
  EXPECT_EQ(plan.config, other.best) << "an update of the driver loses no tuned choice";
  EXPECT_EQ(plan.config_source, ConfigSource::tuned_elsewhere);
  EXPECT_EQ(plan.tuned_nvrtc, other.nvrtc);
  DeviceInfo by_hand = h100();
  by_hand.driver.clear();
  EXPECT_TRUE(records_.find(other.spec, other.shape, by_hand).exact) << "a driver that nobody knows of";

  TuningRecord shipped = example();
  shipped.best = parse_config("sm80:br64:bc64:w4");
  records_.add(shipped, TuningRecords::Origin::shipped);
  EXPECT_EQ(found(to_string(other.shape)), to_string(other.best) + " near") << "one's own";
  records_.add(with_shape(to_string(other.shape), "simt:br32:bc32:w4"));
  EXPECT_EQ(found(to_string(other.shape)), "simt:br32:bc32:w4 exact");
}

TEST_F(Choice, ARecordThatTellsNoVersionsIsTaken) {
  TuningRecord bare = example();
  bare.device = bare.driver = bare.nvrtc = bare.library = "";
  records_.add(bare);
  EXPECT_EQ(make_plan(bare.spec, bare.shape, h100(), records_).config_source, ConfigSource::tuned);
}

TEST_F(Choice, TheOther16BitTypeIsALead) {
  TuningRecord other = with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br16:bc16:w4");
  other.spec.dtype = DType::fp16;
  records_.add(other);
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512"), "simt:br16:bc16:w4 near");
  other.spec.dtype = DType::fp32;
  EXPECT_EQ(records_.find(other.spec, other.shape, h100()).record, nullptr);
}

TEST_F(Choice, OInFp32IsALead) {
  TuningRecord other = with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br16:bc16:w4");
  records_.add(other);
  other.spec.partial.fp32_out = true;
  const auto match = records_.find(other.spec, other.shape, h100());
  ASSERT_NE(match.record, nullptr);
  EXPECT_FALSE(match.exact);
  other.spec.sinks = true;
  EXPECT_EQ(records_.find(other.spec, other.shape, h100()).record, nullptr);
}

TEST_F(Choice, OnesOwnRecordsBeforeShippedOnes) {
  records_.add(with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br16:bc16:w4"), TuningRecords::Origin::shipped);
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512"), "simt:br16:bc16:w4 exact");
  records_.add(with_shape("b1:hq8:hkv8:sq4096:skv4096", "simt:br64:bc64:w8"));
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512"), "simt:br16:bc16:w4 exact") << "too far away to compare";
  records_.add(with_shape("b1:hq8:hkv8:sq640:skv512", "simt:br32:bc32:w4"));
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512"), "simt:br32:bc32:w4 near")
      << "nearly this shape, and one's own";
  records_.add(with_shape("b1:hq8:hkv8:sq512:skv512", "simt:br64:bc32:w8"));
  EXPECT_EQ(found("b1:hq8:hkv8:sq512:skv512"), "simt:br64:bc32:w8 exact");
}

TEST_F(Choice, OnesOwnWinOverShippedOnesUpTo2OctavesAway) {
  const std::string here = "b1:hq8:hkv8:sq512:skv512";
  const auto own_wins = [&](const char* shape) {
    TuningRecords records;
    records.add(with_shape(here, "simt:br16:bc16:w4"), TuningRecords::Origin::shipped);
    records.add(with_shape(shape, "simt:br32:bc32:w4"));
    return records.find(example().spec, parse_shape(here), h100()).record->best.br == 32;
  };
  for (const char* shape :
       {"b3:hq8:hkv8:sq512:skv512", "b1:hq24:hkv24:sq512:skv512", "b1:hq8:hkv8:sq512:skv1920",
        "b1:hq8:hkv8:sq896:skv512", "b1:hq8:hkv8:sq768:skv768", "b1:hq8:hkv8:sq384:skv384"})
    EXPECT_TRUE(own_wins(shape)) << shape;
  for (const char* shape : {"b5:hq8:hkv8:sq512:skv512", "b1:hq8:hkv8:sq512:skv2560",
                            "b1:hq8:hkv8:sq1280:skv512", "b1:hq8:hkv8:sq1024:skv1024"})
    EXPECT_FALSE(own_wins(shape)) << shape;
}

// --- what ships

TEST(Shipped, TextAndBack) {
  std::vector<TuningRecord> records;
  for (const char* spec : {"fwd:bf16:d128:causal", "bwd:bf16:d64:mask{kv <= q && q - kv < 1024}"}) {
    TuningRecord record = with_shape("b1:hq8:hkv8:sq512:skv512");
    record.spec = parse_spec(spec).normalized();
    record.timings.clear();
    records.push_back(record);
  }
  const std::string text = shipped_text(records);
  EXPECT_EQ(parse_shipped(text), records);
  EXPECT_EQ(parse_shipped("# a comment\n\n" + text), records);
  EXPECT_LT(text.size(), 400u) << "small";
}

TEST(Shipped, WhatIsWrongIsNamedWithItsLine) {
  const auto message = [](const std::string& text) {
    return failure(ErrorCode::io, [&] { parse_shipped(text); });
  };
  expect_in("line 1 of the shipped records: a line 'arch sm_90a'",
            message("fwd:bf16:d128 b1:hq8:hkv8:sq512:skv512 simt:br16:bc16:w4\n"));
  expect_in("line 2", message("arch sm_90a\nfwd:bf16:d128\n"));
  expect_in("line 2", message("arch sm_90a\nfwd:bf16:d128 b1 simt:br16:bc16:w4\n"));
  expect_in("line 3", message("arch sm_90a\n\nfwd:bf16:d7 b1:hq8:hkv8:sq512:skv512 simt:br16:bc16:w4"));
}

TEST(Shipped, RecordsOfSeveralDevicesAreNotMixed) {
  std::vector<TuningRecord> records{example(), example()};
  records[1].driver = "12.4";
  expect_in("more than one driver", failure(ErrorCode::invalid_argument, [&] { shipped_text(records); }));
  expect_in("no records", failure(ErrorCode::invalid_argument, [] { shipped_text({}); }));
}

TEST(Shipped, EveryRecordOfThisLibraryIsAdmitted) {
  EXPECT_GT(shipped_records().size(), 30u);
  for (const TuningRecord& record : shipped_records()) {
    const DeviceInfo device = DeviceInfo::parse(record.arch);
    const Support admitted = traits(record.best.family).admits(record.spec, record.best, device);
    EXPECT_TRUE(admitted) << to_string(record.spec) << " " << to_string(record.best) << ": "
                          << admitted.reason;
    EXPECT_FALSE(record.device.empty() || record.driver.empty() || record.nvrtc.empty() ||
                 record.library.empty())
        << "without a name nobody knows what it was measured on";
  }
}

}  // namespace
}  // namespace flashjit::plan
