// Tests an engine that has more adapters than device slots. Clients see no
// difference, and a failed move loses no adapter.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/engine/engine_fixture.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

namespace fs = std::filesystem;
using ::weft::testing::Wait;
using enum absl::StatusCode;

std::string Contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class ResidencyFixture : public weft::testing::EngineFixture {
 protected:
  void Restart(int slots, int64_t host_bytes, Dtype dtype = Dtype::kF32) {
    EngineOptions options = Options();
    options.max_resident_adapters = slots;
    options.adapter_host_bytes = host_bytes;
    options.dtype = dtype;
    engine_.reset();
    fs::remove_all(folder_ / "checkpoints");
    Start(options);
  }

  AdapterInfo Info(const std::string& id) {
    const auto info =
        Wait<AdapterInfo>([&](auto done) { engine_->GetAdapter(id, done); });
    EXPECT_THAT(info, IsOk());
    return info.value_or(AdapterInfo());
  }

  absl::StatusOr<StepReply<PublishedSnapshot>> Publish(
      const std::string& id, const std::string& name) {
    return Wait<StepReply<PublishedSnapshot>>([&](auto done) {
      engine_->PublishSnapshot({.adapter_id = id, .name = name}, done);
    });
  }

  absl::StatusOr<bool> Release(const std::string& id, const std::string& name) {
    return Wait<bool>([&](auto done) {
      engine_->ReleaseSnapshot({.adapter_id = id, .name = name}, done);
    });
  }

  absl::StatusOr<StepReply<CheckpointInfo>> Save(const std::string& id) {
    return Wait<StepReply<CheckpointInfo>>([&](auto done) {
      engine_->SaveCheckpoint(
          {.adapter_id = id, .name = "c", .overwrite = true}, done);
    });
  }

  absl::StatusOr<StepReply<AdapterInfo>> Load(const std::string& id,
                                              const std::string& source) {
    return Wait<StepReply<AdapterInfo>>([&](auto done) {
      engine_->LoadCheckpoint(
          {.adapter_id = id, .source_adapter_id = source, .name = "c"}, done);
    });
  }

  absl::StatusOr<bool> Delete(const std::string& id) {
    return Wait<bool>([&](auto done) { engine_->DeleteAdapter(id, done); });
  }

  // Waits until all work has ended. No new work may follow.
  void Settle() {
    ASSERT_THAT(Wait<bool>([&](auto done) { engine_->Drain(done); }), IsOk());
  }

  fs::path Spill() const { return folder_ / "checkpoints" / ".spill" / "0"; }
  int NumSpilled() const {
    return static_cast<int>(std::distance(fs::directory_iterator(Spill()), {}));
  }

  // Makes the next spills fail, because files with their names exist already.
  void BlockSpills() {
    for (int n = 1; n <= 40; ++n) {
      std::ofstream(Spill() / absl::StrCat(n), std::ios::app);
    }
  }
  void UnblockSpills() {
    for (const auto& entry : fs::directory_iterator(Spill())) {
      if (fs::file_size(entry) == 0) fs::remove(entry);
    }
  }

  void Note(const std::string& id, const absl::StatusOr<SampleResult>& result) {
    ASSERT_THAT(result, IsOk());
    seen_.emplace_back(id, result->samples[0].logprobs);
    std::vector<float> tokens(result->samples[0].tokens.begin(),
                              result->samples[0].tokens.end());
    tokens.push_back(static_cast<float>(result->version));
    seen_.emplace_back(id, std::move(tokens));
  }

  // Uses four adapters in turn, and collects everything that clients can see of
  // them.
  void RunScript() {
    seen_.clear();
    files_.clear();
    const std::vector<std::string> ids = {"a", "b", "c", "d"};
    for (const std::string& id : ids) ASSERT_THAT(Create(id), IsOk());
    for (int round = 0; round < 3; ++round) {
      for (size_t i = 0; i < ids.size(); ++i) {
        const auto trained =
            Train(ids[i], 0, static_cast<int32_t>(3 * i)).value();
        seen_.emplace_back(ids[i], trained.result.data[0].logprobs);
      }
      for (const std::string& id : ids) {
        const auto stepped = Optim(id).value();
        seen_.emplace_back(
            id,
            std::vector<float>{static_cast<float>(stepped.result.grad_norm)});
        Note(id, Sample(id));
      }
      ASSERT_THAT(Publish(ids[round], "s"), IsOk());
    }
    // Leaves a gradient in the accumulator of each adapter.
    for (const std::string& id : ids) ASSERT_THAT(Train(id), IsOk());
    for (const char* id : {"a", "b", "c"}) {
      Note(id, Sample(id, "s"));
      files_[absl::StrCat(id, " snapshot")] = Exported(id, "s");
    }
    for (const std::string& id : ids) {
      ASSERT_THAT(Save(id), IsOk());
      for (const char* file :
           {"adapter_model.safetensors", "optimizer.safetensors"}) {
        files_[id + file] = Contents(folder_ / "checkpoints" / id / "c" / file);
      }
    }
    ASSERT_THAT(Load("a", "a"), IsOk());
    ASSERT_THAT(Release("b", "s"), IsOk());
    Learn("a", 1);
    Learn("b", 1);
    for (const std::string& id : ids) files_[id] = Exported(id);
  }

  std::vector<std::pair<std::string, std::vector<float>>> seen_;
  std::map<std::string, std::string> files_;
};

class EveryResidencyTest
    : public ResidencyFixture,
      public ::testing::WithParamInterface<std::tuple<int, int, Dtype>> {};

TEST_P(EveryResidencyTest, TheSameStepsGiveTheSameBits) {
  const auto [slots, host_adapters, dtype] = GetParam();
  Restart(/*slots=*/8, /*host_bytes=*/-1, dtype);
  RunScript();
  const auto expected_seen = seen_;
  const auto expected_files = files_;
  // An adapter with one snapshot takes this many bytes of the host buffers.
  const int64_t bytes = 20 * static_cast<int64_t>(Info("a").num_parameters);
  Restart(slots, host_adapters == 0 ? -1 : host_adapters * bytes, dtype);
  RunScript();
  EXPECT_EQ(seen_.size(), 48u + 6u);
  EXPECT_TRUE(seen_ == expected_seen);
  EXPECT_EQ(files_.size(), 3u + 8u + 4u);
  EXPECT_TRUE(files_ == expected_files);
  for (const auto& [name, contents] : files_) EXPECT_NE(contents, "") << name;
}

std::string CaseName(
    const ::testing::TestParamInfo<EveryResidencyTest::ParamType>& test) {
  const auto& [slots, host_adapters, dtype] = test.param;
  return absl::StrCat("Slots", slots, "_HostAdapters", host_adapters,
                      dtype == Dtype::kF32 ? "_F32" : "_Bf16");
}

INSTANTIATE_TEST_SUITE_P(
    SlotsHostBuffers, EveryResidencyTest,
    ::testing::Combine(::testing::Values(1, 2), ::testing::Values(0, 1, 9),
                       ::testing::Values(Dtype::kF32, Dtype::kBf16)),
    CaseName);

class EngineResidencyTest : public ResidencyFixture {};

TEST_F(EngineResidencyTest, TellsWhereAdaptersAre) {
  Restart(/*slots=*/1, /*host_bytes=*/-1);
  ASSERT_THAT(Create("a"), IsOk());
  EXPECT_EQ(Info("a").location, AdapterLocation::kDevice);
  EXPECT_GT(Info("a").resident_bytes, 0u);
  Learn("a", 2);
  ASSERT_THAT(Create("b"), IsOk());
  const AdapterInfo away = Info("a");
  EXPECT_EQ(away.location, AdapterLocation::kDisk);
  EXPECT_EQ(away.resident_bytes, 0u);
  EXPECT_EQ(away.version, 3u);
  EXPECT_EQ(away.optim_steps, 2u);
  EXPECT_EQ(away.last_step, 4u);
  EXPECT_EQ(fs::file_size(Spill() / "1"), 16 * away.num_parameters);
  ASSERT_THAT(Sample("a"), IsOk());
  EXPECT_EQ(Info("a").location, AdapterLocation::kDevice);
  EXPECT_EQ(Info("b").location, AdapterLocation::kDisk);
  Settle();
  EXPECT_EQ(NumSpilled(), 1) << "the file of who came back is gone";
  Restart(/*slots=*/1, /*host_bytes=*/1 << 20);
  ASSERT_THAT(Create("a"), IsOk());
  ASSERT_THAT(Create("b"), IsOk());
  EXPECT_EQ(Info("a").location, AdapterLocation::kHost);
  Settle();
  EXPECT_EQ(NumSpilled(), 0);
}

TEST_F(EngineResidencyTest, OldFilesGoAtTheStartAndAllAtTheEnd) {
  engine_.reset();
  EXPECT_TRUE(fs::is_empty(Spill().parent_path()));
  fs::create_directories(Spill());
  std::ofstream(Spill() / "1") << "of a crashed process";
  Start(Options());
  EXPECT_EQ(NumSpilled(), 0);
}

TEST_F(EngineResidencyTest, ADecodingSequenceKeepsItsWeights) {
  Restart(/*slots=*/1, /*host_bytes=*/-1);
  const SampleRequest request{
      .adapter_id = "a",
      .prompt = {1, 2, 3},
      .config = {.max_tokens = 50, .seed = 9, .stop = {.ignore_eos = true}}};
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 2);
  const absl::StatusOr<SampleResult> expected = Wait<SampleResult>(
      [&](auto done) { engine_->Sample(request, {}, done); });
  auto begun = std::make_shared<std::promise<void>>();
  auto first = std::make_shared<bool>(true);
  auto finished = std::make_shared<std::promise<SampleResult>>();
  engine_->Sample(
      request,
      [begun, first](const SampleDelta& /*delta*/) {
        if (std::exchange(*first, false)) begun->set_value();
      },
      [finished](absl::StatusOr<SampleResult> result) {
        finished->set_value(*std::move(result));
      });
  begun->get_future().wait();
  ASSERT_THAT(Create("b"), IsOk());
  ASSERT_THAT(Train("a"), IsOk());
  ASSERT_THAT(Optim("a"), IsOk());
  const SampleResult result = finished->get_future().get();
  EXPECT_EQ(result.samples[0].tokens, expected->samples[0].tokens);
  EXPECT_EQ(result.samples[0].logprobs, expected->samples[0].logprobs);
  EXPECT_EQ(result.version, 3u);
}

TEST_F(EngineResidencyTest, AnAdapterCanBeDeletedWhereverItIs) {
  Restart(/*slots=*/1, /*host_bytes=*/-1);
  for (int round = 0; round < 20; ++round) {
    ASSERT_THAT(Create("a"), IsOk());
    const std::string fresh = Exported("a");
    ASSERT_THAT(Create("b"), IsOk());
    // At the deletion, the adapter may be on disk, on its way in, or in use.
    auto promise = std::make_shared<std::promise<absl::Status>>();
    engine_->OptimStep(
        {.adapter_id = "a", .adamw = {.learning_rate = 1}},
        [promise](const auto& reply) { promise->set_value(reply.status()); });
    if (round % 2 == 1) {
      ASSERT_THAT(Train("b"), IsOk());
    }
    EXPECT_THAT(Delete("a"), IsOkAndHolds(true));
    const absl::Status status = promise->get_future().get();
    EXPECT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
    EXPECT_THAT(Delete("a"), IsStatus(kNotFound, "'a'"));
    ASSERT_THAT(Create("a"), IsOk());
    EXPECT_EQ(Exported("a"), fresh);
    EXPECT_THAT(Delete("a"), IsOk());
    EXPECT_THAT(Delete("b"), IsOk());
  }
  Settle();
  EXPECT_EQ(NumSpilled(), 0);
}

TEST_F(EngineResidencyTest, WhoCannotBeSpilledStaysAndOthersAreTold) {
  Restart(/*slots=*/1, /*host_bytes=*/-1);
  ASSERT_THAT(Create("a"), IsOk());
  ASSERT_THAT(Create("b"), IsOk());
  Learn("b", 1);
  const std::string expected = Exported("b");
  BlockSpills();
  EXPECT_THAT(Create("c"),
              IsStatus(kInternal, "another adapter could not be moved out"));
  EXPECT_THAT(Sample("a"), IsStatus(kInternal, "could not be moved out"));
  EXPECT_THAT(Train("a"), IsStatus(kInternal, "could not be moved out"));
  EXPECT_EQ(Info("a").location, AdapterLocation::kDisk);
  EXPECT_EQ(Info("b").location, AdapterLocation::kDevice);
  EXPECT_EQ(Exported("b"), expected);
  UnblockSpills();
  EXPECT_THAT(Create("c"), IsOk());
  // The failed step has used its number.
  EXPECT_THAT(Train("a", 2), IsOk());
  EXPECT_EQ(Exported("b"), expected);
}

TEST_F(EngineResidencyTest, AnAdapterThatCannotBeReadBackIsTriedAgain) {
  Restart(/*slots=*/1, /*host_bytes=*/-1);
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 1);
  const std::string expected = Exported("a");
  ASSERT_THAT(Create("b"), IsOk());
  const std::string file = Contents(Spill() / "1");
  fs::resize_file(Spill() / "1", file.size() - 1);
  EXPECT_THAT(Sample("a"), IsStatus(kInternal, "1 was cut short"));
  EXPECT_THAT(Optim("a"), IsStatus(kInternal, "'a' could not be moved in"));
  EXPECT_EQ(Info("a").location, AdapterLocation::kDisk);
  EXPECT_THAT(Train("b"), IsOk());
  std::ofstream(Spill() / "1", std::ios::binary) << file;
  EXPECT_EQ(Exported("a"), expected);
}

TEST_F(EngineResidencyTest, ReleasedSnapshotsTakeNoRoomOnceMovedAgain) {
  for (const int64_t host_bytes : {-1, 1 << 20}) {
    Restart(/*slots=*/1, host_bytes);
    ASSERT_THAT(Create("a"), IsOk());
    Learn("a", 1);
    ASSERT_THAT(Publish("a", "s"), IsOk());
    ASSERT_THAT(Publish("a", "t"), IsOk());
    Learn("a", 1);
    ASSERT_THAT(Create("b"), IsOk());
    EXPECT_NE(Info("a").location, AdapterLocation::kDevice);
    EXPECT_THAT(Release("a", "s"), IsOkAndHolds(true));
    EXPECT_THAT(Release("a", "s"), IsStatus(kNotFound, "'s'"));
    EXPECT_THAT(Info("a").snapshots, ::testing::ElementsAre("t"));
    EXPECT_EQ(Sample("a", "t")->version, 2u);
    ASSERT_THAT(Sample("b"), IsOk());
    EXPECT_THAT(Release("a", "t"), IsOkAndHolds(true));
    EXPECT_THAT(Sample("a", "t"), IsStatus(kNotFound, "'t'"));
    EXPECT_EQ(Sample("a")->version, 3u);
  }
}

TEST_F(EngineResidencyTest, ImportsAndLoadsFindRoom) {
  Restart(/*slots=*/1, /*host_bytes=*/-1);
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 1);
  ASSERT_THAT(Save("a"), IsOk());
  const auto files = Wait<PeftFiles>([&](auto done) {
    engine_->ExportAdapter({.adapter_id = "a", .snapshot = ""}, done);
  });
  ASSERT_THAT(Wait<AdapterInfo>([&](auto done) {
                engine_->ImportAdapter({.adapter_id = "b", .files = *files},
                                       done);
              }),
              IsOk());
  ASSERT_THAT(Load("c", "a"), IsOk());
  EXPECT_EQ(Exported("b"), Exported("a"));
  EXPECT_EQ(Exported("c"), Exported("a"));
}

TEST_F(EngineResidencyTest, EveryCallIsAnsweredWhenTheEngineStops) {
  Restart(/*slots=*/1, /*host_bytes=*/-1);
  std::vector<std::string> ids;
  for (int i = 0; i < 5; ++i) {
    ids.push_back(absl::StrCat("a", i));
    ASSERT_THAT(Create(ids.back()), IsOk());
  }
  std::vector<std::future<absl::Status>> answers;
  for (int i = 0; i < 20; ++i) {
    auto promise = std::make_shared<std::promise<absl::Status>>();
    answers.push_back(promise->get_future());
    engine_->Train(
        {.adapter_id = ids[i % 5],
         .data = {{.tokens = {1, 2, 3}, .targets = {2, 3, 4}}}},
        [promise](const auto& reply) { promise->set_value(reply.status()); });
  }
  engine_.reset();
  for (std::future<absl::Status>& answer : answers) {
    const absl::Status status = answer.get();
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
  }
}

}  // namespace
}  // namespace weft::engine
