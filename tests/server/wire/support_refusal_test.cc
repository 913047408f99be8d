// Tests every refusal of supports: in a datum, and in a request for samples.
#include <cstdint>
#include <string>
#include <vector>

#include "server/wire/request_fields.h"
#include "tests/server/wire/refusals.h"

namespace weft::server {
namespace {

using Train = v1::ForwardBackwardRequest;
using Ask = v1::SampleRequest;

std::string RawIds(const std::vector<uint32_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

// The targets are 1, 2 and 3. The second one has the whole vocabulary.
Train GoodSupported() {
  Train good = GoodTrain();
  good.mutable_data(0)->set_support_offsets_le(RawIds({0, 2, 2, 5}));
  good.mutable_data(0)->set_support_tokens_le(RawIds({1, 7, 0, 3, 99}));
  return good;
}

auto SetOffsets(const std::vector<uint32_t>& values) {
  return [values](Train& r) {
    r.mutable_data(0)->set_support_offsets_le(RawIds(values));
  };
}

auto SetIds(const std::vector<uint32_t>& values) {
  return [values](Train& r) {
    r.mutable_data(0)->set_support_tokens_le(RawIds(values));
  };
}

TEST(RefusalTest, SupportsOfADatum) {
  ExpectRefusals<Train>(
      GoodSupported(),
      {{"loss.function = LOSS_FUNCTION_CROSS_ENTROPY; "
        "data[0].targets_per_token = 2; clear data[0].weights; "
        "data[0].targets = 5 * 6",
        "data[0].support_offsets_le is set, must be empty unless every token "
        "has one target"},
       {"loss.function = LOSS_FUNCTION_CROSS_ENTROPY; "
        "data[0].target_offsets = [0, 1, 2, 3]",
        "data[0].support_offsets_le is set, must be empty unless"},
       {"no offsets", SetOffsets({}),
        "data[0].support_offsets_le has 0 values, must have 4 (3 tokens, and "
        "the end)"},
       {"late start", SetOffsets({1, 2, 2, 5}),
        "data[0].support_offsets_le[0] is 1, must be 0"},
       {"falling", SetOffsets({0, 2, 1, 5}),
        "data[0].support_offsets_le[2] is 1, must be in [2, 1026] (a token has "
        "0 to 1024 ids)"},
       {"data[0].support_offsets_le = 'abcde'",
        "data[0].support_offsets_le has 5 bytes, must be a multiple of 4"},
       {"few ids", SetIds({1, 7, 0, 3}),
        "data[0].support_tokens_le has 4 values, must have 5 (the last of "
        "support_offsets_le)"},
       {"many ids", SetIds({1, 7, 0, 3, 98, 99}),
        "data[0].support_tokens_le has 6 values, must have 5"},
       {"id = vocabulary", SetIds({1, 7, 0, 3, 100}),
        "data[0].support_tokens_le[4] is 100, must be in [0, 100)"},
       {"falling ids", SetIds({1, 7, 3, 0, 99}),
        "data[0].support_tokens_le[3] is 0 after 3, the ids of a token must "
        "increase"},
       {"an id twice", SetIds({1, 7, 3, 3, 99}),
        "data[0].support_tokens_le[3] is 3 after 3"},
       {"no target", SetIds({1, 7, 0, 4, 99}),
        "data[0].support_tokens_le has no target 3 among the 3 ids of token "
        "2: the target must be one of them"},
       {"data[0].support_tokens_le = 'abcde'",
        "data[0].support_tokens_le has 5 bytes, must be a multiple of 4"}});
}

TEST(RefusalTest, ATokenHasAtMost1024IdsInItsSupport) {
  RequestLimits limits = Limits();
  limits.vocab_size = 5000;
  for (const uint32_t count : {1024u, 1025u}) {
    Train request = GoodTrain();
    std::vector<uint32_t> ids(count);
    for (uint32_t i = 0; i < count; ++i) ids[i] = i;
    request.mutable_data(0)->set_support_offsets_le(
        RawIds({0, count, count, count}));
    request.mutable_data(0)->set_support_tokens_le(RawIds(ids));
    EXPECT_EQ(Validate(request, limits).status().message(),
              count == 1024 ? ""
                            : "data[0].support_offsets_le[1] is 1025, must be "
                              "in [0, 1024] (a token has 0 to 1024 ids)");
  }
}

TEST(SupportTest, OfADatumArrives) {
  const Datum datum = Validate(GoodSupported(), Limits())->data[0];
  EXPECT_EQ(datum.support.offsets, (std::vector<uint32_t>{0, 2, 2, 5}));
  EXPECT_EQ(datum.support.tokens, (std::vector<int32_t>{1, 7, 0, 3, 99}));
  EXPECT_EQ(Validate(GoodTrain(), Limits())->data[0].support, TokenSupport());
}

Ask GoodAsk() {
  return Edited(Ask(),
                "prompt = 1; config.top_p = 0.9; truncated_logprobs = true; "
                "return_support = true");
}

TEST(RefusalTest, SupportsOfSamples) {
  ExpectRefusals<Ask>(
      GoodAsk(),
      {{"truncated_logprobs = false",
        "return_support is set, so truncated_logprobs must be set, too"},
       {"config.temperature = 0; truncated_logprobs = false",
        "return_support is set with config.temperature 0"},
       {"config.temperature = 0",
        "truncated_logprobs is set with config.temperature 0"}});
}

// A draw with supports is from at most 1024 tokens, and their memory counts.
TEST(SupportTest, OfSamplesIsBoundedAndCounts) {
  SampleRequest plain = *Validate(
      Edited(GoodAsk(), "num_samples = 2; config.max_tokens = 5"), Limits());
  EXPECT_TRUE(plain.truncated_logprobs);
  EXPECT_TRUE(plain.has_support());
  EXPECT_EQ(plain.draw_top_k(), 1024);
  EXPECT_EQ(FieldsOf(&plain).list_bytes, 2 * 5 * 1024 * 12);
  plain.config.top_k = 7;
  EXPECT_EQ(plain.draw_top_k(), 7);
  EXPECT_EQ(FieldsOf(&plain).list_bytes, 2 * 5 * 7 * 12);
  plain.record = "r";  // It has the ids again.
  EXPECT_EQ(FieldsOf(&plain).list_bytes, 2 * 5 * 7 * 24);
  plain.config.top_k = 3000;
  EXPECT_EQ(plain.draw_top_k(), 1024);
  plain.return_support = false;
  EXPECT_EQ(plain.draw_top_k(), 3000);
  EXPECT_EQ(FieldsOf(&plain).list_bytes, 0);
  // Nothing leaves tokens out, so there is no support.
  SampleRequest all{.return_support = true};
  EXPECT_FALSE(all.has_support());
  EXPECT_EQ(all.draw_top_k(), 0);
  EXPECT_EQ(FieldsOf(&all).list_bytes, 0);
}

}  // namespace
}  // namespace weft::server
