// Tests what training takes from the records of samples.
#include "src/request/sample_record.h"

#include <map>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace weft {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr AdapterKey kOwn{1}, kOther{2};
constexpr uint16_t kFree = kRouterChooses;

SampleRequest Asked() {
  SampleRequest request;
  request.tenant = "t";
  request.record = "r";
  request.prompt = {5, 6, 7};
  return request;
}

// Two samples of three and two tokens. Row i of the experts [rows, 1, 2] has
// 10 i and 10 i + 1; the rows after the prompt have 100 more in the second
// sample.
SampleResult Drawn() {
  Sample first{.tokens = {8, 9, 3}, .logprobs = {-1, -2, -3}};
  Sample second{.tokens = {4, 2}, .logprobs = {-4, -5}};
  for (uint16_t row = 0; row < 5; ++row) {
    for (const uint16_t k : {0, 1}) {
      first.routing.push_back(10 * row + k);
      if (row < 4) {
        second.routing.push_back((row < 3 ? 0 : 100) + 10 * row + k);
      }
    }
  }
  for (const std::vector<int32_t>& ids :
       std::vector<std::vector<int32_t>>{{8, 9}, {}, {3}}) {
    first.support.Add(ids);
  }
  return {.samples = {first, second},
          .prompt_logprobs = {},
          .prompt_top_logprobs = {},
          .version = 4};
}

// Returns the datum of the prompt and a sample, and the span of all that was
// drawn.
std::pair<Datum, SampledSpan> DatumOf(size_t index) {
  std::vector<int32_t> tokens = Asked().prompt;
  const std::vector<int32_t> drawn = Drawn().samples[index].tokens;
  tokens.insert(tokens.end(), drawn.begin(), drawn.end());
  Datum datum{.tokens = {tokens.begin(), tokens.end() - 1},
              .targets = {tokens.begin() + 1, tokens.end()},
              .weights = {0, 0},
              .logprobs = {},
              .advantages = {}};
  datum.weights.resize(datum.tokens.size(), 1);
  datum.advantages.assign(datum.tokens.size(), 1);
  return {datum,
          {.sequence_id = SequenceId("r", index),
           .start = 2,
           .length = static_cast<uint32_t>(drawn.size())}};
}

TrainRequest RequestOf(
    const std::vector<std::pair<Datum, SampledSpan>>& parts) {
  TrainRequest request;
  request.tenant = "t";
  request.loss.function = LossFunction::kPpo;
  request.replay = {.routing = true, .support = true, .logprobs = true};
  for (const auto& [datum, span] : parts) {
    request.data.push_back(datum);
    request.replay.spans.push_back({span});
  }
  return request;
}

class SampleRecordTest : public testing::Test {
 protected:
  absl::Status Run(TrainRequest* request, AdapterKey adapter = kOwn) {
    return ReplaySamples(
        [this](const std::string& tenant,
               const std::string& id) -> std::shared_ptr<const SampleRecord> {
          ++num_finds_;
          const auto found = records_.find({tenant, id});
          if (found == records_.end()) return nullptr;
          return std::make_shared<const SampleRecord>(found->second);
        },
        adapter, request);
  }

  std::map<std::pair<std::string, std::string>, SampleRecord> records_ = {
      {{"t", "r"}, RecordOf(Asked(), kOwn, Drawn())}};
  int num_finds_ = 0;
};

TEST_F(SampleRecordTest, ARecordHasThePromptsExpertsOnce) {
  const SampleRecord& record = records_.begin()->second;
  EXPECT_EQ(record.num_prompt, 3);
  EXPECT_THAT(record.prompt_routing, ElementsAre(0, 1, 10, 11, 20, 21));
  EXPECT_THAT(record.sequences[0].routing, ElementsAre(30, 31, 40, 41));
  EXPECT_THAT(record.sequences[1].routing, ElementsAre(130, 131));
  EXPECT_THAT(record.sequences[1].versions,
              ElementsAre(VersionSpan{.version = 4, .tokens = 2}));
}

TEST_F(SampleRecordTest, ASequencesIdNamesRecordAndIndex) {
  using Pair = std::pair<std::string, size_t>;
  EXPECT_EQ(ParseSequenceId(SequenceId("a:b", 3)), Pair("a:b", 3));
  EXPECT_EQ(ParseSequenceId("no colon"), std::nullopt);
  EXPECT_EQ(ParseSequenceId("a:-1"), std::nullopt);
  EXPECT_EQ(ParseSequenceId("a:x"), std::nullopt);
}

TEST_F(SampleRecordTest, ADatumGetsAllThatItsSampleHad) {
  TrainRequest request = RequestOf({DatumOf(0), DatumOf(1)});
  ASSERT_THAT(Run(&request), IsOk());
  EXPECT_EQ(num_finds_, 1);  // Both data are of one record.
  const Datum& first = request.data[0];
  EXPECT_THAT(first.logprobs, ElementsAre(0, 0, -1, -2, -3));
  EXPECT_EQ(first.routing, Drawn().samples[0].routing);
  EXPECT_THAT(first.support.offsets, ElementsAre(0, 0, 0, 2, 2, 3));
  EXPECT_THAT(first.support.tokens, ElementsAre(8, 9, 3));
  const Datum& second = request.data[1];
  EXPECT_THAT(second.logprobs, ElementsAre(0, 0, -4, -5));
  EXPECT_EQ(second.routing, Drawn().samples[1].routing);
  EXPECT_THAT(second.support.offsets, IsEmpty());
  EXPECT_TRUE(request.replay.spans.empty());
  EXPECT_EQ(request.replayed,
            (Replayed{.tokens = 5, .own_tokens = 5, .versions = 20}));
}

TEST_F(SampleRecordTest, ASwitchThatIsOffChangesNothing) {
  for (bool Replay::*on :
       {&Replay::routing, &Replay::support, &Replay::logprobs}) {
    TrainRequest request = RequestOf({DatumOf(0)});
    request.data[0].logprobs.assign(5, -9);
    request.replay.routing = request.replay.support = false;
    request.replay.logprobs = false;
    request.replay.*on = true;
    request.replay.optional = true;  // Takes logprobs without supports.
    ASSERT_THAT(Run(&request), IsOk());
    const Datum& datum = request.data[0];
    EXPECT_EQ(datum.routing.empty(), on != &Replay::routing);
    EXPECT_EQ(datum.support.offsets.empty(), on != &Replay::support);
    EXPECT_EQ(datum.logprobs[2] == -9, on != &Replay::logprobs);
    EXPECT_EQ(datum.logprobs[0], -9);
  }
}

TEST_F(SampleRecordTest, SpansThatAlternateReadEachRecordOnce) {
  SampleRequest asked = Asked();
  asked.record = "s";
  SampleResult drawn = Drawn();
  for (uint16_t& expert : drawn.samples[0].routing) expert += 200;
  records_[{"t", "s"}] = RecordOf(asked, kOwn, drawn);
  auto [datum, span] = DatumOf(0);
  TrainRequest request = RequestOf({{datum, span}, {datum, span}});
  for (std::vector<SampledSpan>& spans : request.replay.spans) {
    spans.clear();
    for (const uint32_t i : {0, 1, 2}) {
      spans.push_back({.sequence_id = i == 1 ? "r:0" : "s:0",
                       .offset = i,
                       .start = 2 + i,
                       .length = 1});
    }
  }
  ASSERT_THAT(Run(&request), IsOk());
  EXPECT_EQ(num_finds_, 2);
  for (const Datum& filled : request.data) {
    EXPECT_THAT(filled.logprobs, ElementsAre(0, 0, -1, -2, -3));
    EXPECT_THAT(filled.support.offsets, ElementsAre(0, 0, 0, 2, 2, 3));
    EXPECT_THAT(filled.support.tokens, ElementsAre(8, 9, 3));
    // The prompt's rows are those of the nearest span, which is of "s".
    EXPECT_THAT(filled.routing,
                ElementsAre(200, 201, 210, 211, 220, 221, 30, 31, 240, 241));
  }
}

TEST_F(SampleRecordTest, ALossOfAnotherDistributionIsRefused) {
  const auto error = [this](auto change) {
    TrainRequest request = RequestOf({DatumOf(0)});
    change(request, records_.begin()->second);
    TrainRequest optional = request;
    optional.replay.optional = true;
    EXPECT_THAT(Run(&optional), IsOk());
    const absl::Status status = Run(&request);
    records_.begin()->second = RecordOf(Asked(), kOwn, Drawn());
    return status;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  using Request = TrainRequest;
  using Record = SampleRecord;
  EXPECT_THAT(error([](Request& r, Record&) { r.replay.support = false; }),
              IsStatus(kInvalid,
                       "data[0].sampled_spans[0].sequence_id is 'r:0', which "
                       "was drawn from a truncated distribution"));
  EXPECT_THAT(error([](Request& r, Record&) { r.loss.temperature = 0.5; }),
              IsStatus(kInvalid,
                       "data[0].sampled_spans[0].sequence_id is 'r:0', which "
                       "was drawn at temperature 1, but loss.temperature is "
                       "0.5"));
  EXPECT_THAT(error([](Request&, Record& r) { r.edited = true; }),
              IsStatus(kInvalid,
                       "data[0].sampled_spans[0].sequence_id is 'r:0', which "
                       "was drawn with penalties or logit_bias"));
  EXPECT_THAT(error([](Request& r, Record& record) {
                record.edited = true;
                r.data[0].logprobs.assign(5, -9);
                r.replay.logprobs = false;
              }),
              IsStatus(kInvalid, "data[0].sampled_spans[0].sequence_id"));
  // The client's own support serves, and so does the sample's temperature.
  TrainRequest own = RequestOf({DatumOf(0)});
  own.replay.support = false;
  own.data[0].support = {.offsets = {0, 0, 0, 2, 2, 3}, .tokens = {8, 9, 3}};
  EXPECT_THAT(Run(&own), IsOk());
  records_.begin()->second.temperature = 0.5;
  own = RequestOf({DatumOf(0)});
  own.loss.temperature = 0.5;
  EXPECT_THAT(Run(&own), IsOk());
}

TEST_F(SampleRecordTest, ARecordKnowsHowItsLogprobsCame) {
  SampleRequest asked = Asked();
  EXPECT_FALSE(RecordOf(asked, kOwn, Drawn()).edited);
  asked.config.temperature = 0.25;
  EXPECT_EQ(RecordOf(asked, kOwn, Drawn()).temperature, 0.25);
  asked.config.temperature = 0;  // Its logprobs are those of temperature 1.
  EXPECT_EQ(RecordOf(asked, kOwn, Drawn()).temperature, 1);
  asked.config.logit_bias = {{3, 1.0F}};
  EXPECT_TRUE(RecordOf(asked, kOwn, Drawn()).edited);
  asked.config.logit_bias.clear();
  asked.config.presence_penalty = 1;
  EXPECT_TRUE(RecordOf(asked, kOwn, Drawn()).edited);
}

TEST_F(SampleRecordTest, TokensOfAnotherAdapterHaveNoStaleness) {
  TrainRequest request = RequestOf({DatumOf(0)});
  ASSERT_THAT(Run(&request, kOther), IsOk());
  EXPECT_EQ(request.replayed, (Replayed{.tokens = 3}));
}

TEST_F(SampleRecordTest, EachTokenCountsWithTheVersionThatDrewIt) {
  records_.begin()->second.sequences[0].versions = {
      {.version = 4, .tokens = 2}, {.version = 9, .tokens = 1}};
  auto [datum, span] = DatumOf(0);
  span.offset = 1;
  span.start = 3;
  span.length = 2;
  datum.weights = {0, 0, 0, 1, 1};
  TrainRequest request = RequestOf({{datum, span}});
  ASSERT_THAT(Run(&request), IsOk());
  EXPECT_EQ(request.replayed,
            (Replayed{.tokens = 2, .own_tokens = 2, .versions = 13}));
  // The rows before the span are the record's prompt and first token.
  EXPECT_EQ(request.data[0].routing, Drawn().samples[0].routing);
}

// A second turn: its prompt is the first turn and two tokens of a tool.
TEST_F(SampleRecordTest, EachTurnUsesItsOwnExpertsAndRowsBetweenTheNextTurns) {
  SampleRequest asked = Asked();
  asked.record = "later";
  asked.prompt = {5, 6, 7, 8, 9, 3, 50, 51};
  Sample drawn{.tokens = {60}, .logprobs = {-6}};
  for (uint16_t row = 0; row < 8; ++row) {
    drawn.routing.insert(drawn.routing.end(), {uint16_t(500 + row), row});
  }
  records_[{"t", "later"}] =
      RecordOf(asked, kOwn, {.samples = {drawn}, .version = 6});
  auto [datum, span] = DatumOf(0);
  datum.tokens = asked.prompt;
  datum.targets = {6, 7, 8, 9, 3, 50, 51, 60};
  datum.weights = {0, 0, 1, 1, 1, 0, 0, 1};
  datum.advantages.assign(8, 1);
  TrainRequest request = RequestOf({{datum, span}});
  request.replay.spans[0].push_back(
      {.sequence_id = "later:0", .start = 7, .length = 1});
  ASSERT_THAT(Run(&request), IsOk());
  EXPECT_THAT(request.data[0].routing,
              ElementsAre(0, 1, 10, 11, 20, 21, 30, 31, 40, 41, 505, 5, 506, 6,
                          507, 7));
  EXPECT_THAT(request.data[0].logprobs,
              ElementsAre(0, 0, -1, -2, -3, 0, 0, -6));
  EXPECT_EQ(request.replayed.versions, 3 * 4 + 6);
}

TEST_F(SampleRecordTest, TheRouterChoosesWhereThePromptIsAnother) {
  auto [datum, span] = DatumOf(0);
  datum.tokens[0] = 1;
  TrainRequest request = RequestOf({{datum, span}});
  ASSERT_THAT(Run(&request), IsOk());
  EXPECT_THAT(request.data[0].routing,
              ElementsAre(kFree, kFree, kFree, kFree, 20, 21, 30, 31, 40, 41));
}

TEST_F(SampleRecordTest, CrossEntropyTakesNoLogprobs) {
  TrainRequest request = RequestOf({DatumOf(0)});
  request.loss.function = LossFunction::kCrossEntropy;
  request.data[0].weights = {};
  ASSERT_THAT(Run(&request), IsOk());
  EXPECT_THAT(request.data[0].logprobs, IsEmpty());
}

TEST_F(SampleRecordTest, ATargetOutsideOfSpansNeedsALogprobOrWeightZero) {
  TrainRequest request = RequestOf({DatumOf(0)});
  request.data[0].weights[1] = 1;
  EXPECT_THAT(Run(&request),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "data[0].logprobs is empty, but targets[1]"));
  request = RequestOf({DatumOf(0)});
  request.data[0].weights = {};
  request.data[0].logprobs.assign(5, -9);
  EXPECT_THAT(Run(&request), IsOk());
  EXPECT_THAT(request.data[0].logprobs, ElementsAre(-9, -9, -1, -2, -3));
}

TEST_F(SampleRecordTest, SpansMustBeWhatWasDrawn) {
  const auto error = [this](auto change) {
    auto [datum, span] = DatumOf(0);
    change(datum, span);
    TrainRequest request = RequestOf({{datum, span}});
    return Run(&request);
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(error([](Datum& d, SampledSpan&) { d.targets[3] = 1; }),
              IsStatus(kInvalid,
                       "data[0].sampled_spans[0].start covers "
                       "targets[3] = 1, but token 1 of 'r:0' is 9"));
  EXPECT_THAT(error([](Datum& d, SampledSpan&) { d.tokens[3] = 1; }),
              IsStatus(kInvalid,
                       "data[0].sampled_spans[0].start covers "
                       "tokens[3]"));
  EXPECT_THAT(error([](Datum&, SampledSpan& s) { s.offset = 1; }),
              IsStatus(kInvalid,
                       "data[0].sampled_spans[0].length is 3 at "
                       "offset 1, but 'r:0' has 3 drawn tokens"));
  EXPECT_THAT(
      error([](Datum&, SampledSpan& s) { s.offset = UINT32_MAX; }),
      IsStatus(kInvalid, "data[0].sampled_spans[0].length is 3 at offset"));
  EXPECT_THAT(error([](Datum&, SampledSpan& s) { s.sequence_id = "r:2"; }),
              IsStatus(kInvalid,
                       "data[0].sampled_spans[0].sequence_id is "
                       "'r:2', but the record has 2 sequences"));
}

TEST_F(SampleRecordTest, AMissingRecordIsAnErrorUnlessItIsOptional) {
  for (const char* id : {"gone:0", "no colon", "r:x"}) {
    auto part = DatumOf(0);
    part.second.sequence_id = id;
    TrainRequest request = RequestOf({DatumOf(1), part});
    request.data[1].logprobs.assign(5, -9);
    TrainRequest optional = request;
    EXPECT_THAT(Run(&request),
                IsStatus(absl::StatusCode::kFailedPrecondition,
                         "data[1].sampled_spans[0].sequence_id: there is no "
                         "record of '"));
    optional.replay.optional = true;
    ASSERT_THAT(Run(&optional), IsOk());
    EXPECT_THAT(optional.data[1].logprobs, Each(-9));
    EXPECT_THAT(optional.data[1].routing, IsEmpty());
    EXPECT_EQ(
        optional.replayed,
        (Replayed{.tokens = 2, .missing = 1, .own_tokens = 2, .versions = 8}));
  }
}

TEST_F(SampleRecordTest, AnotherTenantFindsNoRecord) {
  TrainRequest request = RequestOf({DatumOf(0)});
  request.tenant = "stranger";
  EXPECT_THAT(Run(&request),
              IsStatus(absl::StatusCode::kFailedPrecondition, ""));
}

}  // namespace
}  // namespace weft
