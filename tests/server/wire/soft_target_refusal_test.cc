// Tests every refusal of soft targets: K targets per token, or ragged targets.
#include <cstdint>
#include <string>

#include "tests/server/wire/refusals.h"

namespace weft::server {
namespace {

using Train = v1::ForwardBackwardRequest;

TEST(RefusalTest, SoftTargets) {
  ExpectRefusals<Train>(
      Edited(GoodTrain(),
             "loss.function = LOSS_FUNCTION_CROSS_ENTROPY; "
             "clear data[0].weights; data[0].targets_per_token = 2; "
             "data[0].targets = 5 * 6"),
      {{"pop data[0].targets",
        "data[0].targets has 5 values, must have 6 (3 tokens, 2 targets"},
       {"data[0].weights = 1 * 3", "data[0].weights has 3 values, must have 6"},
       {"data[0].targets_per_token = 101",
        "data[0].targets_per_token is 101, must be in [0, 100]"},
       {"data[0].targets[4] = 100",
        "data[0].targets[4] is 100, must be in [0, 100)"}});
}

// 3 tokens with 2, 0 and 1 targets.
Train GoodRagged() {
  return Edited(GoodTrain(),
                "loss.function = LOSS_FUNCTION_CROSS_ENTROPY; "
                "data[0].target_offsets = [0, 2, 2, 3]");
}

TEST(RefusalTest, RaggedTargets) {
  ExpectRefusals<Train>(
      GoodRagged(),
      {{"loss.function = LOSS_FUNCTION_PPO",
        "data[0].target_offsets has 4 values, must be empty for every loss but "
        "cross_entropy"},
       {"data[0].targets_per_token = 2",
        "data[0].targets_per_token is 2, must be 0 or 1 with target_offsets"},
       {"pop data[0].target_offsets",
        "data[0].target_offsets has 3 values, must have 4 (3 tokens, and the "
        "end)"},
       {"data[0].target_offsets += 3",
        "data[0].target_offsets has 5 values, must have 4"},
       {"data[0].target_offsets[0] = 1",
        "data[0].target_offsets[0] is 1, must be 0"},
       {"data[0].target_offsets[2] = 1",
        "data[0].target_offsets[2] is 1, must be in [2, 102]"},
       {"data[0].target_offsets[3] = 103",
        "data[0].target_offsets[3] is 103, must be in [2, 102] (a token has 0 "
        "to 100 targets)"},
       {"pop data[0].targets",
        "data[0].targets has 2 values, must have 3 (3 tokens, the last of "
        "target_offsets)"},
       {"data[0].targets += 1", "data[0].targets has 4 values, must have 3"},
       {"data[0].targets[2] = 100",
        "data[0].targets[2] is 100, must be in [0, 100)"},
       {"data[0].weights += 1", "data[0].weights has 4 values, must have 3"},
       {"data[0].target_offsets_le = '\\0' * 16",
        "data[0].target_offsets and data[0].target_offsets_le are both set"},
       {"clear data[0].target_offsets; data[0].target_offsets_le = 'abcde'",
        "data[0].target_offsets_le has 5 bytes, must be a multiple of 4"},
       {"clear data[0].target_offsets; data[0].target_offsets_le = "
        "'\\0\\0\\0\\0\\2\\0\\0\\0\\1\\0\\0\\0\\3\\0\\0\\0'",
        "data[0].target_offsets[2] is 1, must be in [2, 102]"}});
}

TEST(RefusalTest, ATokenHasAtMost1024Targets) {
  RequestLimits limits = Limits();
  limits.vocab_size = 5000;
  const auto refusal = [&](const v1::Datum& datum) {
    Train request = GoodRagged();
    *request.mutable_data(0) = datum;
    return std::string(Validate(request, limits).status().message());
  };
  for (const uint32_t count : {1024u, 1025u}) {
    SCOPED_TRACE(count);
    auto dense = Make<v1::Datum>("tokens += 1");
    dense.mutable_targets()->Resize(static_cast<int>(count), 1);
    v1::Datum ragged = dense;
    dense.set_targets_per_token(count);
    ragged.add_target_offsets(0);
    ragged.add_target_offsets(count);
    const bool is_good = count == 1024;
    EXPECT_EQ(refusal(dense),
              is_good ? ""
                      : "data[0].targets_per_token is 1025, must be in [0, "
                        "1024]");
    EXPECT_EQ(refusal(ragged),
              is_good ? ""
                      : "data[0].target_offsets[1] is 1025, must be in [0, "
                        "1024] (a token has 0 to 1024 targets)");
  }
}

// The message has the index of the invalid datum, for Forward as well.
TEST(RefusalTest, NamesTheDatumAtFault) {
  auto good =
      Make<v1::ForwardRequest>("loss.function = LOSS_FUNCTION_CROSS_ENTROPY");
  *good.add_data() = GoodTrain().data(0);
  *good.add_data() = GoodRagged().data(0);
  *good.add_data() = GoodTrain().data(0);
  using Request = v1::ForwardRequest;
  ExpectRefusals<Request>(
      good,
      {{"data[2].tokens = 1 * 33",
        "data[2].tokens has 33 values, must be in [1, context length 32]"},
       {"data[2].targets[0] = 100",
        "data[2].targets[0] is 100, must be in [0, 100)"},
       {"clear data[2].targets; data[2].targets_le = "
        "'\\0\\0\\0\\0\\x64\\0\\0\\0\\0\\0\\0\\0'",
        "data[2].targets[1] is 100, must be in [0, 100)"},
       {"data[2].targets_per_token = 2",
        "data[2].targets has 3 values, must have 6 (3 tokens, 2 targets per "
        "token)"},
       {"data[1].weights += 1", "data[1].weights has 4 values, must have 3"},
       {"data[1].target_offsets[0] = 2",
        "data[1].target_offsets[0] is 2, must be 0"}});
}

}  // namespace
}  // namespace weft::server
