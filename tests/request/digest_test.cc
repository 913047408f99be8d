#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"
#include "src/base/sha256.h"
#include "src/request/step.h"

namespace weft {
namespace {

TrainRequest SomeTrainRequest() {
  TrainRequest request;
  request.adapter_id = "a";
  request.data = {{.tokens = {1, 2},
                   .targets = {2, 3},
                   .weights = {0.5f, 1.0f},
                   .logprobs = {-1.0f, -2.0f},
                   .advantages = {1.0f, -1.0f}},
                  {.tokens = {7},
                   .targets = {8},
                   .weights = {},
                   .logprobs = {},
                   .advantages = {}}};
  return request;
}

TEST(DigestTest, Sha256MatchesThePublishedVector) {
  // The vector of FIPS 180-2, appendix B.1.
  EXPECT_EQ(absl::BytesToHexString(Sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(DigestTest, IgnoresStepAndDeadlineAlone) {
  const TrainRequest request = SomeTrainRequest();
  TrainRequest other = request;
  other.step = 9;
  other.deadline = absl::UnixEpoch();
  EXPECT_EQ(PayloadDigest(request), PayloadDigest(other));
  EXPECT_EQ(PayloadDigest(request).size(), 32u);
}

TEST(DigestTest, EveryFieldOfATrainRequestCounts) {
  using Change = std::function<void(TrainRequest&)>;
  std::vector<Change> changes = {
      [](TrainRequest&) {},
      [](TrainRequest& r) { r.adapter_id = "b"; },
      [](TrainRequest& r) { r.backward = false; },
      [](TrainRequest& r) { r.loss.function = LossFunction::kPpo; },
      [](TrainRequest& r) { r.loss.clip_low = 0.7; },
      [](TrainRequest& r) { r.loss.clip_high = 1.3; },
      [](TrainRequest& r) { r.loss.beta = 0.1; },
      [](TrainRequest& r) { r.loss.temperature = 0.9; },
      [](TrainRequest& r) { r.loss.return_entropy = true; },
      [](TrainRequest& r) { r.loss.return_routing = true; },
      [](TrainRequest& r) { r.data[0].routing = {1}; },
      [](TrainRequest& r) { r.data[0].routing = {2}; },
      [](TrainRequest& r) {
        r.data[0].support = {.offsets = {0, 1, 1}, .tokens = {2}};
      },
      // The ids are the same but belong to another token.
      [](TrainRequest& r) {
        r.data[0].support = {.offsets = {0, 0, 1}, .tokens = {2}};
      },
      [](TrainRequest& r) {
        r.data[0].support = {.offsets = {0, 1, 1}, .tokens = {3}};
      },
      [](TrainRequest& r) { r.loss.gradient_filter = 0.5; },
      [](TrainRequest& r) { r.data[0].tokens[1] = 3; },
      [](TrainRequest& r) { r.data[0].targets[1] = 4; },
      [](TrainRequest& r) { r.data[0].weights[1] = 0.9f; },
      [](TrainRequest& r) { r.data[0].logprobs[0] = -3.0f; },
      [](TrainRequest& r) { r.data[0].advantages[0] = 0.0f; },
      [](TrainRequest& r) { r.data[0].targets_per_token = 2; },
      [](TrainRequest& r) {
        r.data[0].target_offsets = {0, 1, 2};
      },
      // The targets are the same but belong to other tokens.
      [](TrainRequest& r) {
        r.data[0].target_offsets = {0, 2, 2};
      },
      [](TrainRequest& r) {
        r.replay.spans = {{{.sequence_id = "s:0", .length = 1}}, {}};
      },
      [](TrainRequest& r) {
        r.replay.spans = {{{.sequence_id = "s:1", .length = 1}}, {}};
      },
      [](TrainRequest& r) {
        r.replay.spans = {{{.sequence_id = "s:0", .length = 2}}, {}};
      },
      [](TrainRequest& r) {
        r.replay.spans = {{{.sequence_id = "s:0", .offset = 1, .length = 1}},
                          {}};
      },
      [](TrainRequest& r) {
        r.replay.spans = {{{.sequence_id = "s:0", .start = 1, .length = 1}},
                          {}};
      },
      // The span is the same but belongs to another datum.
      [](TrainRequest& r) {
        r.replay.spans = {{}, {{.sequence_id = "s:0", .length = 1}}};
      },
      [](TrainRequest& r) {
        r.replay.routing = true;
        r.replay.spans = {{{.sequence_id = "s:0", .length = 1}}, {}};
      },
      [](TrainRequest& r) {
        r.replay.support = true;
        r.replay.spans = {{{.sequence_id = "s:0", .length = 1}}, {}};
      },
      [](TrainRequest& r) {
        r.replay.logprobs = true;
        r.replay.spans = {{{.sequence_id = "s:0", .length = 1}}, {}};
      },
      [](TrainRequest& r) {
        r.replay.optional = true;
        r.replay.spans = {{{.sequence_id = "s:0", .length = 1}}, {}};
      },
      [](TrainRequest& r) { r.data.pop_back(); },
      // The tokens are the same but are divided differently.
      [](TrainRequest& r) {
        r.data[0].tokens = {1};
        r.data[1].tokens = {2, 7};
      },
      [](TrainRequest& r) { std::swap(r.data[0], r.data[1]); },
      [](TrainRequest& r) { r.loss.function = LossFunction::kCustom; },
  };
  // Custom losses and inputs count if the loss is custom. No other has them.
  std::vector<Change> custom = {
      [](TrainRequest& r) { r.loss.custom.graph = "{}"; },
      [](TrainRequest& r) {
        r.loss.custom.inputs = {{"a", 1}};
      },
      [](TrainRequest& r) {
        r.loss.custom.inputs = {{"a", 2}};
      },
      [](TrainRequest& r) {
        r.loss.custom.inputs = {{"b", 1}};
      },
      [](TrainRequest& r) { r.data[0].custom_inputs["a"] = {}; },
      [](TrainRequest& r) { r.data[1].custom_inputs["a"] = {}; },
      [](TrainRequest& r) { r.data[0].custom_inputs["b"] = {}; },
      [](TrainRequest& r) { r.data[0].custom_inputs["a"].shape = {0}; },
      [](TrainRequest& r) { r.data[0].custom_inputs["a"].floats = {1}; },
      [](TrainRequest& r) { r.data[0].custom_inputs["a"].ints = {1}; },
      [](TrainRequest& r) { r.data[0].custom_inputs["a"].is_int = true; },
  };
  for (const Change& change : custom) {
    changes.push_back([change](TrainRequest& r) {
      r.loss.function = LossFunction::kCustom;
      change(r);
    });
  }
  std::set<std::string> digests;
  for (const Change& change : changes) {
    TrainRequest request = SomeTrainRequest();
    change(request);
    EXPECT_TRUE(digests.insert(PayloadDigest(request)).second)
        << "change " << digests.size();
  }
}

TEST(DigestTest, ARequestThatHasChangedKeepsTheDigestOfTheClients) {
  TrainRequest request = SomeTrainRequest();
  request.digest = "the client's";
  request.data[0].logprobs[0] = -3;
  EXPECT_EQ(PayloadDigest(request), "the client's");
}

TEST(DigestTest, EveryFieldOfATeacherCounts) {
  using Change = std::function<void(TrainRequest&)>;
  const std::vector<Change> changes = {
      [](TrainRequest&) {},
      [](TrainRequest& r) { r.loss.function = LossFunction::kReverseKl; },
      [](TrainRequest& r) { r.loss.teacher.base_model = true; },
      [](TrainRequest& r) { r.loss.teacher.adapter_id = "b"; },
      [](TrainRequest& r) { r.loss.teacher.snapshot = "b"; },
      [](TrainRequest& r) { r.data[0].teacher_tokens = {1}; },
      [](TrainRequest& r) { r.data[0].teacher_tokens = {2}; },
      [](TrainRequest& r) { r.data[1].teacher_tokens = {1}; },
      [](TrainRequest& r) { r.data[0].teacher_offset = -1; },
  };
  std::set<std::string> digests;
  for (const Change& change : changes) {
    TrainRequest request = SomeTrainRequest();
    request.loss.function = LossFunction::kForwardKl;
    change(request);
    EXPECT_TRUE(digests.insert(PayloadDigest(request)).second)
        << "change " << digests.size();
  }
}

TEST(DigestTest, EveryFieldOfTheOtherRequestsCounts) {
  std::set<std::string> digests;
  const auto is_new = [&digests](const auto& request) {
    return digests.insert(PayloadDigest(request)).second;
  };
  OptimStepRequest optim;
  EXPECT_TRUE(is_new(optim));
  for (double AdamWConfig::*field :
       {&AdamWConfig::learning_rate, &AdamWConfig::beta1, &AdamWConfig::beta2,
        &AdamWConfig::eps, &AdamWConfig::weight_decay,
        &AdamWConfig::max_grad_norm}) {
    OptimStepRequest other = optim;
    other.adamw.*field += 0.25;
    EXPECT_TRUE(is_new(other));
  }
  const MuonConfig muons[] = {{},
                              {.learning_rate = 0.25},
                              {.momentum = 0.25},
                              {.nesterov = false},
                              {.weight_decay = 0.25},
                              {.ns_steps = 6},
                              {.max_grad_norm = 0.25}};
  for (const MuonConfig& muon : muons) {
    OptimStepRequest other = optim;
    other.muon = muon;
    EXPECT_TRUE(is_new(other));
  }
  // Requests with the same fields and different types have different digests.
  EXPECT_TRUE(is_new(SaveCheckpointRequest{.adapter_id = "a", .name = "n"}));
  EXPECT_TRUE(is_new(SaveCheckpointRequest{
      .adapter_id = "a", .name = "n", .overwrite = true}));
  EXPECT_TRUE(is_new(SaveCheckpointRequest{.adapter_id = "an", .name = ""}));
  EXPECT_TRUE(is_new(SaveCheckpointRequest{
      .adapter_id = "a", .name = "n", .kind = CheckpointKind::kSampler}));
  EXPECT_TRUE(is_new(SaveCheckpointRequest{
      .adapter_id = "a", .name = "n", .metadata = {{"k", "v"}}}));
  EXPECT_TRUE(is_new(SaveCheckpointRequest{
      .adapter_id = "a", .name = "n", .metadata = {{"kv", ""}}}));
  EXPECT_TRUE(is_new(
      SaveCheckpointRequest{.adapter_id = "a", .name = "n", .ttl_seconds = 7}));
  EXPECT_TRUE(is_new(
      SaveCheckpointRequest{.adapter_id = "a", .name = "n", .keep_newest = 7}));
  EXPECT_TRUE(is_new(PublishSnapshotRequest{.adapter_id = "a", .name = "n"}));
  EXPECT_TRUE(is_new(PublishSnapshotRequest{.adapter_id = "a", .name = "m"}));
  LoadCheckpointRequest load{
      .adapter_id = "a", .source_adapter_id = "b", .name = "n"};
  EXPECT_TRUE(is_new(load));
  load.weights_only = true;
  EXPECT_TRUE(is_new(load));
  load.source_adapter_id = "c";
  EXPECT_TRUE(is_new(load));
}

// Logs hold digests, so they must not change within a format of the log.
TEST(DigestTest, ASaveKeepsItsDigest) {
  // Python's hashlib made this digest. Its input is three texts, one byte each
  // for `overwrite` and `kind`, and two numbers of 8 bytes. Before each text
  // comes its length in 8 bytes.
  EXPECT_EQ(absl::BytesToHexString(PayloadDigest(
                SaveCheckpointRequest{.adapter_id = "a", .name = "n"})),
            "e81f2ad79743571c0d8b3f7d507489c5c08343552a24e26529b291c5e5b6683a");
}

}  // namespace
}  // namespace weft
