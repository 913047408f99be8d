// Tests the engine through its public interface.
#include "src/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <numeric>
#include <string>
#include <vector>

#include "src/lora/peft_format.h"
#include "tests/engine/engine_fixture.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

using ::testing::SizeIs;
using ::weft::testing::Wait;
using enum absl::StatusCode;

class EngineTest : public weft::testing::EngineFixture {};

TEST_F(EngineTest, TellsWhatItLoaded) {
  EXPECT_EQ(engine_->info().architecture, "llama");
  EXPECT_EQ(engine_->info().dtype, "f32");
  EXPECT_EQ(engine_->info().vocab_size, 40);
  EXPECT_EQ(engine_->info().context_length, 64);
  EXPECT_EQ(engine_->info().eos_token_ids, std::vector<int32_t>{39});
}

TEST_F(EngineTest, LearnsWhatItIsTaught) {
  ASSERT_THAT(Create("a"), IsOk());
  const double before = Train("a")->result.metrics.at("loss:sum");
  ASSERT_THAT(Optim("a"), IsOk());
  Learn("a", 10);
  const double after = Train("a")->result.metrics.at("loss:sum");
  EXPECT_LT(after, before);
  const auto info =
      Wait<AdapterInfo>([&](auto done) { engine_->GetAdapter("a", done); });
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->optim_steps, 11u);
  EXPECT_EQ(info->version, 12u);
  EXPECT_EQ(info->last_step, 23u);
}

TEST_F(EngineTest, AReplayedStepTrainsOnce) {
  ASSERT_THAT(Create("a"), IsOk());
  ASSERT_THAT(Create("b"), IsOk());
  const auto first = Train("a", 1), again = Train("a", 1);
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(again, IsOk());
  EXPECT_FALSE(first->replayed);
  EXPECT_TRUE(again->replayed);
  EXPECT_EQ(first->result.data[0].logprobs, again->result.data[0].logprobs);
  ASSERT_THAT(Train("b", 1), IsOk());
  EXPECT_EQ(Optim("a")->result.grad_norm, Optim("b")->result.grad_norm);
  EXPECT_THAT(Train("a", 1, /*first_token=*/7),
              IsStatus(kAlreadyExists, "step"));
}

TEST_F(EngineTest, ListingsOfATenantLetOthersPass) {
  constexpr int kListings = 5000;
  int listed = 0;  // Only the reply thread uses the two.
  int listed_before = -1;
  std::promise<void> last;
  for (int i = 1; i <= kListings; ++i) {
    engine_->ListCheckpoints("alice~", [&, i](const auto& /*infos*/) {
      ++listed;
      if (i == kListings) last.set_value();
    });
  }
  engine_->DeleteCheckpoint("bob~a", "none", [&](const auto& /*deleted*/) {
    listed_before = listed;
  });
  last.get_future().wait();
  EXPECT_LT(listed_before, kListings);
}

TEST_F(EngineTest, RefusesAdaptersThatAreNotThere) {
  EXPECT_THAT(Train("a"), IsStatus(kNotFound, "does not exist"));
  EXPECT_THAT(Optim("a"), IsStatus(kNotFound, "does not exist"));
  EXPECT_THAT(Sample("a"), IsStatus(kNotFound, "'a' does not exist"));
  ASSERT_THAT(Create("a"), IsOk());
  EXPECT_THAT(Sample("a", "s"), IsStatus(kNotFound, "'s' does not exist"));
}

TEST_F(EngineTest, ARepeatedCreationIsAnsweredUntilTheFirstStep) {
  ASSERT_THAT(Create("a"), IsOk());
  EXPECT_THAT(Create("a"), IsOk());
  ASSERT_THAT(Train("a"), IsOk());
  EXPECT_THAT(Create("a"), IsStatus(kAlreadyExists, "'a'"));
}

TEST_F(EngineTest, AdaptersDoNotTouchEachOther) {
  for (const char* id : {"a", "b", "c"}) ASSERT_THAT(Create(id), IsOk());
  Learn("a", 2);
  // b takes the same steps as a, with steps and samples of c in between.
  for (int step = 0; step < 2; ++step) {
    ASSERT_THAT(Train("b"), IsOk());
    ASSERT_THAT(Train("c", 0, /*first_token=*/20), IsOk());
    ASSERT_THAT(Sample("c"), IsOk());
    ASSERT_THAT(Optim("b"), IsOk());
    ASSERT_THAT(Optim("c"), IsOk());
  }
  EXPECT_EQ(Exported("a"), Exported("b"));
  EXPECT_NE(Exported("a"), Exported("c"));
}

TEST_F(EngineTest, ASnapshotSamplesTheSameAfterMoreSteps) {
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 3);
  ASSERT_THAT(Wait<StepReply<PublishedSnapshot>>([&](auto done) {
                engine_->PublishSnapshot({.adapter_id = "a", .name = "s"},
                                         done);
              }),
              IsOk());
  const SampleResult before = Sample("a", "s").value();
  EXPECT_THAT(before.samples[0].tokens, SizeIs(12));
  Learn("a", 3);
  const SampleResult after = Sample("a", "s").value();
  EXPECT_EQ(before.version, 4u);
  EXPECT_EQ(after.version, 4u);
  EXPECT_EQ(after.samples[0].tokens, before.samples[0].tokens);
  EXPECT_EQ(after.samples[0].logprobs, before.samples[0].logprobs);
  EXPECT_NE(Sample("a")->samples[0].logprobs, before.samples[0].logprobs);
}

// The requests share a micro-batch if the engine is busy when they come.
TEST_F(EngineTest, OnlyARequestThatDoesNotFitAloneFails) {
  TrainRequest request{.adapter_id = "long"};
  Datum& datum = request.data.emplace_back();
  for (int32_t i = 0; i < 60; ++i) {
    datum.tokens.push_back(i % 40);
    datum.targets.push_back((i + 1) % 40);
  }
  const auto train = [&](auto done) { engine_->Train(request, done); };
  EngineOptions options = Options();
  options.memory_budget_bytes = 1;
  Start(options);
  ASSERT_THAT(Create("long"), IsOk());
  // A Forward has the same budget, though it needs less of it.
  request.backward = false;
  EXPECT_THAT(Wait<StepReply<TrainResult>>(train),
              IsStatus(absl::StatusCode::kResourceExhausted, "needs "));
  request.backward = true;
  const absl::Status alone = Wait<StepReply<TrainResult>>(train).status();
  ASSERT_THAT(alone, IsStatus(absl::StatusCode::kResourceExhausted, "needs "));
  const std::string text(alone.message());
  const std::string bytes = text.substr(text.find("needs ") + 6);
  options.memory_budget_bytes = std::stoll(bytes) - 1;
  Start(options);
  for (const char* id : {"long", "short", "alone", "busy"}) {
    ASSERT_THAT(Create(id), IsOk());
  }
  const auto expected = Train("alone").value();
  TrainRequest busy{.adapter_id = "busy", .data = request.data};
  busy.data[0].tokens.resize(8);
  busy.data[0].targets.resize(8);
  for (int round = 0; round < 20; ++round) {
    std::promise<absl::Status> refused;
    std::promise<absl::Status> done;
    engine_->Train(busy,
                   [&](const auto& reply) { done.set_value(reply.status()); });
    engine_->Train(
        request, [&](const auto& reply) { refused.set_value(reply.status()); });
    const auto trained = Train("short").value();
    EXPECT_EQ(trained.result.data[1].logprobs,
              expected.result.data[1].logprobs);
    EXPECT_THAT(done.get_future().get(), IsOk());
    EXPECT_THAT(refused.get_future().get(),
                IsStatus(absl::StatusCode::kResourceExhausted,
                         absl::StrCat("needs ", std::stoll(bytes), " bytes")));
  }
}

// A custom loss that gives -(logprobs * w).sum(), or fails if w does not have
// one value for each target.
TrainRequest CustomRequest(const std::string& id,
                           const std::vector<float>& weights) {
  TrainRequest request{.adapter_id = id};
  request.loss.function = LossFunction::kCustom;
  request.loss.custom = {.graph = R"({"nodes": [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    {"op": "placeholder", "name": "w", "target": "w"},
    {"op": "call_function", "name": "mul", "target": "operator.mul",
     "args": [{"ref": "logprobs"}, {"ref": "w"}]},
    {"op": "call_method", "name": "sum_1", "target": "sum",
     "args": [{"ref": "mul"}]},
    {"op": "call_function", "name": "neg", "target": "operator.neg",
     "args": [{"ref": "sum_1"}]},
    {"op": "output", "name": "output", "target": "output",
     "args": [[{"ref": "neg"}, {"dict": {"custom/nll:mean": {"ref": "neg"}}}]]}
    ]})",
                         .inputs = {{"logprobs", 1}, {"w", 1}}};
  for (int d = 0; d < 2; ++d) {
    Datum& datum = request.data.emplace_back();
    for (int32_t i = 0; i < 8; ++i) {
      datum.tokens.push_back((3 + i) % 40);
      datum.targets.push_back((4 + i + d) % 40);
    }
    datum.custom_inputs["w"] = {.shape = {static_cast<int64_t>(weights.size())},
                                .floats = weights};
  }
  return request;
}

TEST_F(EngineTest, ACustomLossTrainsLikeTheLossThatItEquals) {
  for (const char* id : {"custom", "built-in"}) ASSERT_THAT(Create(id), IsOk());
  const std::vector<float> weights = {1, 0.5F, -1, 2, 0, 0, 3, 1};
  TrainRequest custom = CustomRequest("custom", weights);
  TrainRequest equal = CustomRequest("built-in", weights);
  equal.loss = {.score_all = true};
  for (Datum& datum : equal.data) {
    datum.weights = datum.custom_inputs["w"].floats;
  }
  const auto train = [&](const TrainRequest& request) {
    return Wait<StepReply<TrainResult>>(
        [&](auto done) { engine_->Train(request, done); });
  };
  const auto first = train(custom);
  const auto second = train(equal);
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(second, IsOk());
  const TrainResult& own = first->result;
  const TrainResult& built_in = second->result;
  // Sums of 16 values in f32 and in f64.
  const double tolerance = 16 * 6e-8 * built_in.metrics.at("loss:sum");
  for (size_t d = 0; d < 2; ++d) {
    EXPECT_EQ(own.data[d].logprobs, built_in.data[d].logprobs);
    EXPECT_THAT(std::accumulate(own.data[d].losses.begin() + 1,
                                own.data[d].losses.end(), 0.0F),
                0.0F);
  }
  EXPECT_NEAR(own.metrics.at("loss:sum"), built_in.metrics.at("loss:sum"),
              tolerance);
  EXPECT_NEAR(own.metrics.at("custom/nll:mean"), own.metrics.at("loss:sum") / 2,
              tolerance);
  EXPECT_NEAR(own.data[0].losses[0] + own.data[1].losses[0],
              own.metrics.at("loss:sum"), tolerance);
  EXPECT_EQ(Optim("custom")->result.grad_norm,
            Optim("built-in")->result.grad_norm);
}

// The requests share a micro-batch if the engine is busy when they come.
TEST_F(EngineTest, OnlyARequestWhoseCustomLossFailsFails) {
  for (const char* id : {"bad", "good", "busy", "short", "alone"}) {
    ASSERT_THAT(Create(id), IsOk());
  }
  const auto expected = Train("alone").value();
  ASSERT_THAT(Train("bad"), IsOk());
  ASSERT_THAT(Train("good"), IsOk());
  const TrainRequest request = CustomRequest("bad", {1, 2, 3});
  const TrainRequest busy = CustomRequest("busy", std::vector<float>(8, 1));
  for (int round = 0; round < 20; ++round) {
    std::promise<absl::Status> failed;
    std::promise<absl::Status> done;
    engine_->Train(busy,
                   [&](const auto& reply) { done.set_value(reply.status()); });
    engine_->Train(
        request, [&](const auto& reply) { failed.set_value(reply.status()); });
    const auto trained = Train("short").value();
    EXPECT_EQ(trained.result.metrics.at("loss:sum"),
              expected.result.metrics.at("loss:sum"));
    EXPECT_THAT(done.get_future().get(), IsOk());
    EXPECT_THAT(
        failed.get_future().get(),
        IsStatus(absl::StatusCode::kInvalidArgument,
                 "data[0]: loss.custom_loss.graph.nodes[2] (mul) The size"));
  }
  ASSERT_THAT(Optim("bad"), IsOk());
  ASSERT_THAT(Optim("good"), IsOk());
  EXPECT_EQ(Exported("bad"), Exported("good"));
}

TEST_F(EngineTest, SnapshotsCountForTheBytesOfTheirTenant) {
  ASSERT_THAT(Create("probe"), IsOk());
  const auto info =
      Wait<AdapterInfo>([&](auto done) { engine_->GetAdapter("probe", done); });
  ASSERT_THAT(info, IsOk());
  EngineOptions options = Options();
  // The image of an adapter has four buffers; there is room for one snapshot.
  options.max_adapter_bytes_per_tenant =
      static_cast<int64_t>(info->num_parameters * 4 * 5);
  Start(options);
  ASSERT_THAT(Create("a"), IsOk());
  const auto publish = [&](const std::string& name) {
    return Wait<StepReply<PublishedSnapshot>>([&](auto done) {
      engine_->PublishSnapshot({.adapter_id = "a", .name = name}, done);
    });
  };
  ASSERT_THAT(publish("one"), IsOk());
  Learn("a", 1);
  EXPECT_THAT(publish("two"), IsStatus(absl::StatusCode::kResourceExhausted,
                                       "ReleaseSnapshot"));
  ASSERT_THAT(Wait<bool>([&](auto done) {
                engine_->ReleaseSnapshot({.adapter_id = "a", .name = "one"},
                                         done);
              }),
              IsOk());
  EXPECT_THAT(publish("two"), IsOk());
}

TEST_F(EngineTest, ACheckpointBringsEveryBitBack) {
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 2);
  ASSERT_THAT(Wait<StepReply<CheckpointInfo>>([&](auto done) {
                engine_->SaveCheckpoint({.adapter_id = "a", .name = "c"}, done);
              }),
              IsOk());
  Learn("a", 2);
  const std::string expected = Exported("a");
  ASSERT_THAT(Wait<StepReply<AdapterInfo>>([&](auto done) {
                engine_->LoadCheckpoint(
                    {.adapter_id = "a", .source_adapter_id = "a", .name = "c"},
                    done);
              }),
              IsOk());
  EXPECT_NE(Exported("a"), expected);
  // The moments are restored too; otherwise the same steps would end elsewhere.
  Learn("a", 2);
  EXPECT_EQ(Exported("a"), expected);
}

TEST_F(EngineTest, AnExportComesBackAsAnImport) {
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 2);
  const absl::StatusOr<PeftFiles> files = Wait<PeftFiles>([&](auto done) {
    engine_->ExportAdapter({.adapter_id = "a", .snapshot = ""}, done);
  });
  ASSERT_THAT(files, IsOk());
  ASSERT_THAT(Wait<AdapterInfo>([&](auto done) {
                engine_->ImportAdapter({.adapter_id = "b", .files = *files},
                                       done);
              }),
              IsOk());
  EXPECT_EQ(Exported("b"), Exported("a"));
  EXPECT_EQ(Sample("b")->samples[0].logprobs, Sample("a")->samples[0].logprobs);
}

TEST_F(EngineTest, RefusesToImportALargeRankOfOneLayer) {
  LoraConfig config{.rank = 2, .alpha = 4};
  config.overrides = {{1, TargetModule::kVProj, {.rank = 129, .alpha = 4}}};
  const model_config::ModelShape shape = {.num_layers = 2,
                                          .hidden = 16,
                                          .q_width = 16,
                                          .kv_width = 8,
                                          .ffn = 24,
                                          .vocab = 40};
  const std::vector<float> weights(
      lora::AdapterLayout(shape, config).num_parameters());
  EXPECT_THAT(Wait<AdapterInfo>([&](auto done) {
                engine_->ImportAdapter(
                    {.adapter_id = "b",
                     .files = lora::WritePeft(config, shape, weights, "base")},
                    done);
              }),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "rank 129 is above the limit 128 (--max-rank)"));
}

TEST_F(EngineTest, RefusesWorkOnceItDrains) {
  ASSERT_THAT(Create("a"), IsOk());
  EXPECT_THAT(Wait<bool>([&](auto done) { engine_->Drain(done); }),
              IsOkAndHolds(true));
  EXPECT_THAT(Train("a"), IsStatus(kUnavailable, ""));
  EXPECT_THAT(Sample("a"), IsStatus(kUnavailable, ""));
}

}  // namespace
}  // namespace weft::engine
