#include <functional>
#include <set>
#include <string>
#include <utility>

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
  EXPECT_EQ(PayloadDigest(request).size(), 33u);
}

// records_test has a test that each field of the log counts.
TEST(DigestTest, WhereAValueBelongsCounts) {
  using Change = std::function<void(TrainRequest&)>;
  const Change changes[] = {
      [](TrainRequest&) {},
      [](TrainRequest& r) {
        r.data[0].support = {.offsets = {0, 1, 1}, .tokens = {2}};
      },
      // The ids are the same but belong to another token.
      [](TrainRequest& r) {
        r.data[0].support = {.offsets = {0, 0, 1}, .tokens = {2}};
      },
      [](TrainRequest& r) {
        r.data[0].target_offsets = {0, 1, 2};
      },
      // The targets are the same but belong to other tokens.
      [](TrainRequest& r) {
        r.data[0].target_offsets = {0, 2, 2};
      },
      [](TrainRequest& r) { r.data.pop_back(); },
      // The tokens are the same but are divided differently.
      [](TrainRequest& r) {
        r.data[0].tokens = {1};
        r.data[1].tokens = {2, 7};
      },
      [](TrainRequest& r) { std::swap(r.data[0], r.data[1]); },
      [](TrainRequest& r) { r.data[0].custom_inputs["a"] = {}; },
      [](TrainRequest& r) { r.data[1].custom_inputs["a"] = {}; },
      [](TrainRequest& r) { r.data[0].custom_inputs["a"].is_int = true; }};
  std::set<std::string> digests;
  for (const Change& change : changes) {
    TrainRequest request = SomeTrainRequest();
    change(request);
    EXPECT_TRUE(digests.insert(PayloadDigest(request)).second)
        << "change " << digests.size();
  }
}

TEST(DigestTest, WhatIsTakenFromRecordsCounts) {
  using Change = std::function<void(Replay&)>;
  const Change changes[] = {
      [](Replay& r) { r.spans.clear(); }, [](Replay&) {},
      [](Replay& r) { r.spans[0][0].sequence_id = "s:1"; },
      [](Replay& r) { r.spans[0][0].length = 2; },
      [](Replay& r) { r.spans[0][0].offset = 1; },
      [](Replay& r) { r.spans[0][0].start = 1; },
      // The span is the same but belongs to another datum.
      [](Replay& r) { std::swap(r.spans[0], r.spans[1]); },
      [](Replay& r) { r.routing = true; }, [](Replay& r) { r.support = true; },
      [](Replay& r) { r.logprobs = true; },
      [](Replay& r) { r.optional = true; }};
  std::set<std::string> digests;
  for (const Change& change : changes) {
    TrainRequest request = SomeTrainRequest();
    request.replay.spans = {{{.sequence_id = "s:0", .length = 1}}, {}};
    change(request.replay);
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

TEST(DigestTest, RequestsWithTheSameFieldsAndDifferentTypesDiffer) {
  const StepRequest requests[] = {
      SaveCheckpointRequest{.adapter_id = "a", .name = "n"},
      SaveCheckpointRequest{.adapter_id = "an", .name = ""},
      SaveCheckpointRequest{
          .adapter_id = "a", .name = "n", .metadata = {{"k", "v"}}},
      SaveCheckpointRequest{
          .adapter_id = "a", .name = "n", .metadata = {{"kv", ""}}},
      PublishSnapshotRequest{.adapter_id = "a", .name = "n"},
      LoadCheckpointRequest{.adapter_id = "a", .name = "n"},
      OptimStepRequest{.adapter_id = "a"},
      OptimStepRequest{.adapter_id = "a", .discard = true},
      OptimStepRequest{.adapter_id = "a", .muon = MuonConfig()}};
  std::set<std::string> digests;
  for (const StepRequest& request : requests) {
    EXPECT_TRUE(digests.insert(PayloadDigest(request)).second)
        << "request " << digests.size();
  }
}

// Logs hold digests, so they must not change within a format of the log.
TEST(DigestTest, ASaveKeepsItsDigest) {
  // Python's hashlib made this digest. Its input is one byte that says that
  // there is no Muon, the number of the type, `name`, one byte each for
  // `overwrite` and `kind`, the number of metadata, two numbers, and the
  // adapter. Each number has 8 bytes, and before each text comes its length.
  EXPECT_EQ(absl::BytesToHexString(PayloadDigest(
                SaveCheckpointRequest{.adapter_id = "a", .name = "n"})),
            "02"  // The index of SaveCheckpointRequest.
            "26d4dff0096d48f9d5660a0cee8930de282b53b45ae7bc7772c99fb5de9a64a1");
}

}  // namespace
}  // namespace weft
