// Samples from checkpoints, through the engine's public interface.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/request/field_names.h"
#include "tests/engine/engine_fixture.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

using ::weft::testing::Wait;
using enum absl::StatusCode;

using Result = absl::StatusOr<SampleResult>;

class SamplersTest : public weft::testing::EngineFixture {
 protected:
  // Saves the adapter, and returns what it draws.
  SampleResult Save(const std::string& id, const std::string& name,
                    CheckpointKind kind = CheckpointKind::kSampler) {
    const auto saved = Wait<StepReply<CheckpointInfo>>([&](auto done) {
      engine_->SaveCheckpoint(
          {.adapter_id = id, .name = name, .overwrite = true, .kind = kind},
          done);
    });
    EXPECT_THAT(saved, IsOk());
    return Sample(id).value();
  }

  // Returns what an adapter draws after `steps` steps. Its checkpoint `name`
  // stays, and the adapter is deleted.
  SampleResult SaveAndDelete(const std::string& id, const std::string& name,
                             int steps) {
    EXPECT_THAT(Create(id), IsOk());
    Learn(id, steps);
    SampleResult drawn = Save(id, name);
    EXPECT_THAT(Delete(id), IsOk());
    return drawn;
  }

  absl::StatusOr<bool> Delete(const std::string& id) {
    return Wait<bool>([&](auto done) { engine_->DeleteAdapter(id, done); });
  }

  static SampleRequest RequestOf(const std::string& id,
                                 const std::string& name) {
    return {
        .adapter_id = id,
        .checkpoint = name,
        .prompt = {1, 2, 3},
        .config = {.max_tokens = 12, .seed = 9, .stop = {.ignore_eos = true}}};
  }

  std::future<Result> Begin(SampleRequest request,
                            std::function<void(SampleDelta)> on_delta = {},
                            CancelHandle* handle = nullptr) {
    auto promise = std::make_shared<std::promise<Result>>();
    const CancelHandle cancel = engine_->Sample(
        std::move(request), std::move(on_delta),
        [promise](Result result) { promise->set_value(std::move(result)); });
    if (handle != nullptr) *handle = cancel;
    return promise->get_future();
  }

  Result From(const std::string& id, const std::string& name) {
    return Begin(RequestOf(id, name)).get();
  }
  // Samples from the checkpoint of this time, for a client who has another name
  // for the field.
  Result FromThatOf(absl::Time created_at, const std::string& id,
                    const std::string& name) {
    constexpr FieldName kNames[] = {{"checkpoint", "model_path"}};
    const FieldNameScope scope(kNames);
    SampleRequest request = RequestOf(id, name);
    request.checkpoint_created_at =
        absl::FromUnixNanos(absl::ToUnixNanos(created_at));
    return Begin(std::move(request)).get();
  }

  // Returns when the only checkpoint of an adapter was created.
  absl::Time CreationOf(const std::string& id) {
    const auto found = Wait<std::vector<CheckpointInfo>>(
        [&](auto done) { engine_->ListCheckpoints(id, done); });
    EXPECT_THAT(found, IsOk());
    EXPECT_EQ(found->size(), 1);
    return found->front().created_at;
  }

  // A sample that uses its checkpoint until it is released. Until then no
  // callback runs.
  struct Held {
    std::promise<void> release;
    std::future<Result> result;
  };
  Held Hold(const std::string& id, const std::string& name) {
    Held held;
    auto begun = std::make_shared<std::promise<void>>();
    auto is_first = std::make_shared<bool>(true);
    held.result =
        Begin(RequestOf(id, name),
              [begun, is_first, released = held.release.get_future().share()](
                  const SampleDelta&) {
                if (!std::exchange(*is_first, false)) return;
                begun->set_value();
                released.wait();
              });
    begun->get_future().wait();
    return held;
  }
  // Waits until all looks at checkpoints of `id` have ended that were asked for
  // before. There is no adapter; then there is `id`, of the checkpoint `name`.
  void WaitForLooks(const std::string& id, const std::string& name) {
    engine_->LoadCheckpoint({.adapter_id = id,
                             .source_adapter_id = id,
                             .name = name,
                             .weights_only = true},
                            [](auto) {});
    while (engine_->num_adapters() == 0) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  // Returns the metric whose label, if it has one, has this value.
  double Metric(const std::string& name, const std::string& label = "") const {
    for (const auto& family : registry_->Collect()) {
      if (family.name != name) continue;
      for (const auto& metric : family.metric) {
        const bool is_it = metric.label.empty()
                               ? label.empty()
                               : metric.label.front().value == label;
        if (is_it) return metric.counter.value + metric.gauge.value;
      }
    }
    ADD_FAILURE() << "no metric " << name;
    return -1;
  }
  // Returns how many adapters have tensors, with those that clients do not see.
  double WithTensors() const {
    double all = 0;
    for (const char* place : {"device", "host", "disk"}) {
      all += Metric("weft_adapters", place);
    }
    return all;
  }
  double Loads() const { return Metric("weft_sampler_cache_loads_total"); }
  double Kept() const { return Metric("weft_sampler_cache_checkpoints"); }

  void Restart(EngineOptions options) {
    engine_.reset();
    Start(options);
  }

  static void ExpectSame(const Result& result, const SampleResult& expected) {
    ASSERT_THAT(result, IsOk());
    EXPECT_EQ(result->samples[0].tokens, expected.samples[0].tokens);
    EXPECT_EQ(result->samples[0].logprobs, expected.samples[0].logprobs);
  }
};

TEST_F(SamplersTest, ACheckpointDrawsWhatItsAdapterDrew) {
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 2);
  const SampleResult expected = Save("a", "sampler");
  Save("a", "train", CheckpointKind::kTrain);
  ASSERT_THAT(Wait<StepReply<AdapterInfo>>([&](auto done) {
                engine_->LoadCheckpoint({.adapter_id = "loaded",
                                         .source_adapter_id = "a",
                                         .name = "sampler",
                                         .weights_only = true},
                                        done);
              }),
              IsOk());
  ExpectSame(Sample("loaded"), expected);
  for (const char* name : {"sampler", "train"}) {
    const Result drawn = From("a", name);
    ExpectSame(drawn, expected);
    EXPECT_EQ(drawn->version, 3);  // Two steps made the weights.
  }
  EXPECT_EQ(expected.version, 3);
  ASSERT_THAT(Delete("a"), IsOk());
  ExpectSame(From("a", "sampler"), expected);
  Restart(Options());
  EXPECT_EQ(Kept(), 0);
  ExpectSame(From("a", "sampler"), expected);
}

TEST_F(SamplersTest, SamplesOfOneCheckpointShareALoad) {
  const SampleResult expected = SaveAndDelete("a", "c", 1);
  std::vector<std::future<Result>> drawn;
  for (int i = 0; i < 20; ++i) drawn.push_back(Begin(RequestOf("a", "c")));
  for (std::future<Result>& result : drawn) ExpectSame(result.get(), expected);
  EXPECT_EQ(Loads(), 1);
  EXPECT_EQ(Kept(), 1);
  EXPECT_EQ(Metric("weft_checkpoints_total", "load_ok"), 1);
  ExpectSame(From("a", "c"), expected);
  EXPECT_GE(Metric("weft_sampler_cache_hits_total"), 1);
}

TEST_F(SamplersTest, NoClientSeesTheAdapterOfACheckpoint) {
  EngineOptions options = Options();
  options.max_adapters = 1;
  Restart(options);
  const SampleResult first = SaveAndDelete("a", "c", 1);
  const SampleResult second = SaveAndDelete("b", "c", 2);
  ExpectSame(From("a", "c"), first);
  ExpectSame(From("b", "c"), second);
  EXPECT_EQ(engine_->num_adapters(), 0);
  for (const char* id : {"a", "a@c"}) {
    EXPECT_THAT(
        Wait<AdapterInfo>([&](auto done) { engine_->GetAdapter(id, done); }),
        IsStatus(kNotFound, ""));
    EXPECT_THAT(Delete(id), IsStatus(kNotFound, ""));
    EXPECT_THAT(Train(id), IsStatus(kNotFound, ""));
  }
  // They take no adapter's place.
  ASSERT_THAT(Create("a"), IsOk());
  EXPECT_THAT(Create("x"), IsStatus(kResourceExhausted, ""));
  const Activity activity = engine_->activity({.tenants = {"", "a", "b"}});
  EXPECT_EQ(activity.tenants[0].num_adapters + activity.tenants[1].num_adapters,
            1);
  EXPECT_EQ(activity.tenants[2].adapter_bytes, 0);
  ExpectSame(From("b", "c"), second);
}

TEST_F(SamplersTest, AnOverwrittenCheckpointIsAnother) {
  ASSERT_THAT(Create("a"), IsOk());
  const SampleResult old = Save("a", "c");
  ExpectSame(From("a", "c"), old);
  Learn("a", 3);
  const SampleResult expected = Save("a", "c");
  ASSERT_NE(expected.samples[0].logprobs, old.samples[0].logprobs);
  ExpectSame(From("a", "c"), expected);
  EXPECT_EQ(Loads(), 2);
  EXPECT_EQ(Kept(), 1);
}

TEST_F(SamplersTest, ASampleThatWantsWhatWasOverwrittenIsRefused) {
  ASSERT_THAT(Create("a"), IsOk());
  const SampleResult old = Save("a", "c");
  const absl::Time before = CreationOf("a");
  ExpectSame(FromThatOf(before, "a", "c"), old);
  Learn("a", 3);
  const SampleResult expected = Save("a", "c");
  const absl::Time now = CreationOf("a");
  ASSERT_LT(before, now);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(FromThatOf(before, "a", "c"),
                IsStatus(kFailedPrecondition,
                         "model_path: the checkpoint was overwritten at"));
    ExpectSame(FromThatOf(now, "a", "c"), expected);
    ExpectSame(From("a", "c"), expected);
  }
  EXPECT_EQ(Loads(), 2);
}

TEST_F(SamplersTest, ARunningSampleKeepsACheckpointThatIsDeleted) {
  SaveAndDelete("a", "other", 1);
  const SampleResult expected = SaveAndDelete("a", "c", 2);
  Held held = Hold("a", "c");
  auto deleted = std::make_shared<std::promise<absl::Status>>();
  engine_->DeleteCheckpoint("a", "c", [deleted](absl::StatusOr<bool> done) {
    deleted->set_value(done.status());
  });
  while (std::filesystem::exists(folder_ / "checkpoints" / "a" / "c")) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  std::future<Result> gone = Begin(RequestOf("a", "c"));
  WaitForLooks("a", "other");
  EXPECT_EQ(Kept(), 1);
  held.release.set_value();
  EXPECT_THAT(deleted->get_future().get(), IsOk());
  EXPECT_THAT(gone.get(), IsStatus(kNotFound, "checkpoint: \"c\""));
  ExpectSame(held.result.get(), expected);
  EXPECT_EQ(Kept(), 0);  // It goes with its last sample.
  ASSERT_THAT(Wait<bool>([&](auto done) { engine_->Drain(done); }), IsOk());
  EXPECT_EQ(WithTensors(), 1);  // The adapter's.
}

TEST_F(SamplersTest, WhatIsThereNoMoreIsRefused) {
  const Result absent = From("a", "c");
  EXPECT_THAT(absent, IsStatus(kNotFound, "checkpoint: \"c\""));
  SaveAndDelete("a", "c", 1);
  EXPECT_THAT(From("a", "other"), IsStatus(kNotFound, "'c'"));
  ASSERT_THAT(From("a", "c"), IsOk());
  ASSERT_THAT(Wait<CheckpointInfo>([&](auto done) {
                engine_->SetCheckpointTtl(
                    {.adapter_id = "a", .name = "c", .ttl_seconds = 1}, done);
              }),
              IsOk());
  // The time of expiry is in whole seconds from the creation.
  absl::SleepFor(absl::Milliseconds(2100));
  EXPECT_THAT(From("a", "c"), IsStatus(kNotFound, ""));
  EXPECT_EQ(Kept(), 0);
}

TEST_F(SamplersTest, ARankAboveTheServersIsRefused) {
  SaveAndDelete("a", "c", 1);
  EngineOptions options = Options();
  options.max_rank = 1;
  Restart(options);
  EXPECT_THAT(From("a", "c"),
              IsStatus(kFailedPrecondition, "checkpoint 'c': rank"));
  EXPECT_EQ(Loads(), 0);
}

TEST_F(SamplersTest, ADamagedCheckpointFailsItsSamplesAlone) {
  SaveAndDelete("a", "c", 1);
  const SampleResult expected = SaveAndDelete("b", "c", 1);
  const auto file =
      folder_ / "checkpoints" / "a" / "c" / "adapter_model.safetensors";
  std::ofstream(file, std::ios::in | std::ios::out | std::ios::ate) << "x";
  EXPECT_THAT(From("a", "c"), IsStatus(kDataLoss, ""));
  ExpectSame(From("b", "c"), expected);
}

TEST_F(SamplersTest, TheLongestUnusedLeavesButNoneThatIsInUse) {
  EngineOptions options = Options();
  options.sampler_cache_adapters = 1;
  Restart(options);
  const SampleResult a = SaveAndDelete("a", "c", 1);
  const SampleResult b = SaveAndDelete("b", "c", 2);
  Held held = Hold("a", "c");
  std::future<Result> refused = Begin(RequestOf("b", "c"));
  WaitForLooks("b", "c");
  held.release.set_value();
  EXPECT_THAT(refused.get(),
              IsStatus(kResourceExhausted, "--sampler-cache-adapters"));
  ExpectSame(held.result.get(), a);
  ExpectSame(From("b", "c"), b);
  EXPECT_EQ(Kept(), 1);
  EXPECT_EQ(Loads(), 2);
  ExpectSame(From("a", "c"), a);
  EXPECT_EQ(Loads(), 3);
  EXPECT_EQ(WithTensors(), 2);  // The checkpoint's and the adapter's.
}

TEST_F(SamplersTest, CheckpointsAndAdaptersTakeTurnsOnTheDevice) {
  EngineOptions options = Options();
  options.max_resident_adapters = 1;
  Restart(options);
  const SampleResult a = SaveAndDelete("a", "c", 1);
  const SampleResult b = SaveAndDelete("b", "c", 2);
  ASSERT_THAT(Create("x"), IsOk());
  const SampleResult x = Sample("x").value();
  for (int round = 0; round < 3; ++round) {
    std::future<Result> of_a = Begin(RequestOf("a", "c"));
    std::future<Result> of_b = Begin(RequestOf("b", "c"));
    ExpectSame(Sample("x"), x);
    ASSERT_THAT(Train("x"), IsOk());
    ExpectSame(of_a.get(), a);
    ExpectSame(of_b.get(), b);
  }
  EXPECT_EQ(Loads(), 2);
}

TEST_F(SamplersTest, ADrainWaitsForSamplesWhoseCheckpointIsRead) {
  const SampleResult expected = SaveAndDelete("a", "c", 1);
  std::future<Result> waiting = Begin(RequestOf("a", "c"));
  ASSERT_THAT(Wait<bool>([&](auto done) { engine_->Drain(done); }), IsOk());
  ASSERT_EQ(waiting.wait_for(std::chrono::seconds(0)),
            std::future_status::ready);
  ExpectSame(waiting.get(), expected);
  EXPECT_THAT(From("a", "c"), IsStatus(kUnavailable, ""));
}

TEST_F(SamplersTest, ASampleEndsWhenItIsCancelledOrTheEngineStops) {
  const SampleResult expected = SaveAndDelete("a", "c", 1);
  CancelHandle handle;
  std::future<Result> cancelled = Begin(RequestOf("a", "c"), {}, &handle);
  handle.Cancel();
  EXPECT_THAT(cancelled.get(), IsStatus(kCancelled, ""));
  ExpectSame(From("a", "c"), expected);
  Restart(Options());
  std::vector<std::future<Result>> waiting;
  for (int i = 0; i < 8; ++i) waiting.push_back(Begin(RequestOf("a", "c")));
  engine_.reset();
  for (std::future<Result>& result : waiting) {
    const Result ended = result.get();
    if (ended.ok()) continue;
    EXPECT_THAT(ended, IsStatus(kUnavailable, ""));
  }
}

TEST_F(SamplersTest, AStateHasNothingOfThem) {
  EngineOptions options = Options();
  options.state_dir = folder_ / "state";
  Restart(options);
  ASSERT_THAT(Create("kept"), IsOk());
  Learn("kept", 1);
  const SampleResult kept = Sample("kept").value();
  const SampleResult expected = SaveAndDelete("a", "c", 2);
  ExpectSame(From("a", "c"), expected);
  ASSERT_THAT(Wait<bool>([&](auto done) { engine_->WriteSnapshot(done); }),
              IsOk());
  Restart(options);
  EXPECT_EQ(engine_->num_adapters(), 1);
  EXPECT_EQ(Kept(), 0);
  // A sample needs no adapter of the state, so it waits for none.
  ExpectSame(From("a", "c"), expected);
  ExpectSame(Sample("kept"), kept);
}

}  // namespace
}  // namespace weft::engine
