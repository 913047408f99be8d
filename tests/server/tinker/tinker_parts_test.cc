// Tests the parts of the Tinker front that read what clients send. Needs no
// server.
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/http/url.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/errors.h"
#include "server/tinker/wire.pb.h"
#include "server/tinker/wire/body.h"
#include "server/tinker/wire/sample_wire.h"
#include "server/tinker/wire/tensor.h"
#include "server/tinker/wire/train_wire.h"
#include "server/wire/request_validation.h"
#include "tests/support/status_matchers.h"
#include "weft/v1/adapters.pb.h"
#include "weft/v1/sampling.pb.h"
#include "weft/v1/training.pb.h"

namespace weft::server::tinker {
namespace {

using ::testing::ElementsAre;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

std::string Zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(
      ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

constexpr char kRoot[] = "/api/v1/";

TEST(TinkerUrlTest, TakesPathsAndQueriesApart) {
  const auto url =
      ParseUrl("/api/v1/models/a%20b/checkpoints?limit=5&x=%2e", kRoot).value();
  EXPECT_THAT(url.parts, ElementsAre("models", "a b", "checkpoints"));
  EXPECT_EQ(url.query.at("limit"), "5");
  EXPECT_EQ(url.query.at("x"), ".");
}

TEST(TinkerUrlTest, RefusesEscapesThatHideASeparator) {
  for (const char* target :
       {"/api/v1/a%2fb", "/api/v1/a%00b", "/api/v1/a%2", "/api/v1/a%zz"}) {
    EXPECT_THAT(ParseUrl(target, kRoot), IsStatus(kInvalid, "escape"))
        << target;
  }
  EXPECT_THAT(ParseUrl(absl::string_view("/api/v1/a\00041", 12), kRoot),
              IsStatus(kInvalid, "escape"));
  EXPECT_THAT(ParseUrl("/api/v2/a", kRoot),
              IsStatus(absl::StatusCode::kNotFound, "no such path"));
  EXPECT_FALSE(ParseUrl("", kRoot).ok());
}

// Returns whether the message has a field at the path.
bool HasField(const google::protobuf::Descriptor* message,
              absl::string_view path) {
  const google::protobuf::FieldDescriptor* field = nullptr;
  for (const absl::string_view name : absl::StrSplit(path, '.')) {
    if (message == nullptr) return false;
    field = message->FindFieldByName(std::string(name));
    if (field == nullptr) return false;
    message = field->message_type();
  }
  return field != nullptr;
}

TEST(TinkerErrorsTest, EachNameIsThatOfAFieldOfWeft) {
  const google::protobuf::Descriptor* const messages[] = {
      v1::ForwardBackwardRequest::descriptor(),
      v1::OptimStepRequest::descriptor(), v1::SampleRequest::descriptor(),
      v1::CreateAdapterRequest::descriptor(),
      v1::LoadCheckpointRequest::descriptor()};
  ASSERT_FALSE(ClientsNames().empty());
  for (const FieldName& row : ClientsNames()) {
    EXPECT_TRUE(std::ranges::any_of(messages, [&](const auto* message) {
      return HasField(message, row.path);
    })) << row.path;
    EXPECT_EQ(absl::StrContains(row.shown, "[]"),
              absl::StartsWith(row.path, "data."))
        << row.path;
  }
}

TEST(TinkerBodyTest, InflatesZstdUpToTheLimit) {
  const std::string text(100000, 'a');
  std::string body = Zstd(text);
  ASSERT_LT(body.size(), 1000u);
  ASSERT_TRUE(Decode("zstd", text.size(), &body).ok());
  EXPECT_EQ(body, text);
  body = Zstd(text);
  EXPECT_THAT(
      Decode("zstd", text.size() - 1, &body),
      IsStatus(absl::StatusCode::kResourceExhausted, "more than 99999 bytes"));
}

TEST(TinkerBodyTest, RefusesWhatIsNoWholeFrame) {
  const std::string frame = Zstd("hello");
  for (std::string body : {std::string("hello"), std::string(),
                           frame.substr(0, frame.size() - 1), frame + "x"}) {
    EXPECT_THAT(Decode("zstd", 1000, &body), IsStatus(kInvalid, "zstd"));
  }
  std::string plain = "hello";
  EXPECT_TRUE(Decode("", 1000, &plain).ok());
  EXPECT_THAT(Decode("gzip", 1000, &plain),
              IsStatus(kInvalid, "zstd or absent"));
}

TEST(TinkerBodyTest, ReadsOnlyObjects) {
  EXPECT_TRUE(ParseObject("")->empty());
  EXPECT_EQ((*ParseObject(R"({"a": 1})"))["a"], 1);
  for (const char* text : {"[]", "1", "{", "{\"a\":}", "\xff"}) {
    EXPECT_THAT(ParseObject(text), IsStatus(kInvalid, "JSON object")) << text;
  }
  // The JSON library copies and prints recursively, so the depth has a limit.
  const auto nested = [](size_t depth) {
    return ParseObject("{\"a\":" + std::string(depth, '[') +
                       std::string(depth, ']') + "}");
  };
  EXPECT_TRUE(nested(63).ok());
  EXPECT_THAT(nested(64), IsStatus(kInvalid, "nested deeper than 64"));
  EXPECT_THAT(nested(1000000), IsStatus(kInvalid, "nested deeper than 64"));
  EXPECT_TRUE(
      ParseObject("{\"a\":\"\\\"" + std::string(100, '[') + "\"}").ok());
}

Json Sparse(const char* rows, const char* columns) {
  return Json::parse(std::string(R"({"data": [1, 2], "dtype": "float32",
      "shape": [2, 3], "sparse_crow_indices": )") +
                     rows + R"(, "sparse_col_indices": )" + columns + "}");
}

TEST(TinkerTensorTest, MakesSparseTensorsDense) {
  const auto tensor =
      TensorFromJson("t", Sparse("[0, 1, 2]", "[2, 0]")).value();
  EXPECT_THAT(*ReadFloats("t", tensor), ElementsAre(0, 0, 1, 2, 0, 0));
  EXPECT_EQ(*TargetsPerToken("t", tensor), 3);
}

TEST(TinkerTensorTest, RefusesIndicesOutOfItsShape) {
  for (const auto& [rows, columns] :
       std::vector<std::pair<const char*, const char*>>{
           {"[0, 1, 2]", "[3, 0]"},
           {"[0, 1, 2]", "[-1, 0]"},
           {"[0, 2]", "[0, 1]"},
           {"[0, 3, 2]", "[0, 1]"},
           {"[0, 9223372036854775807, 2]", "[0, 1]"},
           {"[0, -1, 2]", "[0, 1]"},
           {"[1, 1, 2]", "[0, 1]"},
           {"[0, 1, 2]", "[0]"}}) {
    const auto tensor = TensorFromJson("t", Sparse(rows, columns)).value();
    EXPECT_THAT(ReadFloats("t", tensor), IsStatus(kInvalid, "t"))
        << rows << columns;
  }
}

TEST(TinkerTensorTest, RefusesShapesThatAFewBytesClaim) {
  Json huge = Sparse("[0, 1, 2]", "[2, 0]");
  huge["shape"] = {2000000000, 2000000000};
  const auto tensor = TensorFromJson("t", huge).value();
  EXPECT_THAT(ReadFloats("t", tensor), IsStatus(kInvalid, "values"));
}

TEST(TinkerTensorTest, AnIdThatIsNotAUint32BecomesOneBeyondEveryVocabulary) {
  const auto tensor =
      TensorFromJson(
          "t",
          Json::parse(R"({"data": [5, -1, 4294967296], "dtype": "int64"})"))
          .value();
  const std::string raw = *ReadIds("t", tensor);
  std::vector<uint32_t> ids(3);
  ASSERT_EQ(raw.size(), ids.size() * sizeof(uint32_t));
  std::memcpy(ids.data(), raw.data(), raw.size());
  EXPECT_THAT(ids, ElementsAre(5, 0xffffffff, 0xffffffff));
  for (const char* text :
       {R"({"data": [0.5], "dtype": "int64"})", R"({"data": ["a"]})",
        R"({"data": 3})", R"({"data": [], "dtype": "bool"})", "[]"}) {
    EXPECT_THAT(TensorFromJson("t", Json::parse(text)), IsStatus(kInvalid, "t"))
        << text;
  }
}

template <typename T>
std::vector<T> Values(const std::string& raw) {
  std::vector<T> values(raw.size() / sizeof(T));
  if (!raw.empty()) std::memcpy(values.data(), raw.data(), raw.size());
  return values;
}

// Expects that the JSON rows have the values of the table's cells: null for a
// row of empty cells, and pairs up to the first empty cell otherwise.
void ExpectSame(const TopkLogprobs& table, const Json& rows) {
  const auto ids = Values<int32_t>(table.token_ids());
  const auto logprobs = Values<float>(table.logprobs());
  ASSERT_EQ(rows.size(), table.length());
  ASSERT_EQ(ids.size(), table.length() * table.k());
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t column = 0; column < table.k(); ++column) {
      const size_t cell = row * table.k() + column;
      if (column >= rows[row].size()) {
        EXPECT_EQ(ids[cell], 0);
        EXPECT_EQ(logprobs[cell], -99999.0F);
      } else {
        EXPECT_EQ(rows[row][column][0], ids[cell]);
        EXPECT_EQ(rows[row][column][1].get<float>(), logprobs[cell]);
      }
    }
  }
}

// A datum of five targets. `spans` are pairs: whether a model has sampled the
// tokens, and their number.
ForwardBackwardRequest StableReinforce(
    const std::vector<std::pair<bool, int64_t>>& spans) {
  const std::vector<int32_t> ids = {1, 2, 3, 4, 5};
  const std::string raw(reinterpret_cast<const char*>(ids.data()),
                        ids.size() * sizeof(int32_t));
  ForwardBackwardRequest request;
  request.set_loss_fn("stable_reinforce");
  Datum* const datum = request.add_data();
  datum->add_model_input()->mutable_encoded_text()->set_tokens(raw);
  Tensor& targets = (*datum->mutable_loss_fn_inputs())["target_tokens"];
  targets.set_dense(raw);
  targets.set_dtype(DTYPE_INT32);
  targets.add_shape(static_cast<int64_t>(ids.size()));
  for (const auto& [sampled, length] : spans) {
    ProvenanceSpan* const span = datum->add_loss_fn_input_spans();
    Span* const tokens = sampled ? span->mutable_sampled_tokens()
                                 : span->mutable_prompt_tokens();
    tokens->set_length(length);
    tokens->set_sequence_id("s:0");
    tokens->set_offset(sampled ? 6 : 1);
  }
  return request;
}

TEST(TinkerTrainTest, SampledSpansNameTheirTargets) {
  const std::vector<std::pair<bool, int64_t>> spans = {
      {false, 2}, {true, 1}, {true, 0}, {false, 1}, {true, 1}};
  for (const char* loss :
       {"stable_reinforce", "importance_sampling", "gspo", "cross_entropy"}) {
    ForwardBackwardRequest request = StableReinforce(spans);
    request.set_loss_fn(loss);
    const auto train = TranslateTrain(request).value();
    EXPECT_TRUE(train.loss().replay_logprobs());
    EXPECT_TRUE(train.loss().replay_support());
    ASSERT_EQ(train.data(0).sampled_spans_size(), 2);
    const v1::SampledSpan& last = train.data(0).sampled_spans(1);
    EXPECT_EQ(last.sequence_id(), "s:0");
    EXPECT_EQ(last.offset(), 6);
    EXPECT_EQ(last.start(), 4);
    EXPECT_EQ(last.length(), 1);
    request.mutable_data(0)->clear_loss_fn_input_spans();
    request.set_loss_fn("importance_sampling");
    EXPECT_FALSE(TranslateTrain(request)->loss().replay_logprobs());
    // Spans that continue each other are one.
    request = StableReinforce({{true, 2}, {true, 2}, {true, 1}});
    request.set_loss_fn(loss);
    const auto at = [&](int i) {
      return request.mutable_data(0)
          ->mutable_loss_fn_input_spans(i)
          ->mutable_sampled_tokens();
    };
    at(1)->set_offset(8);
    at(2)->set_offset(11);
    const auto joined = TranslateTrain(request).value();
    ASSERT_EQ(joined.data(0).sampled_spans_size(), 2);
    EXPECT_EQ(joined.data(0).sampled_spans(0).offset(), 6);
    EXPECT_EQ(joined.data(0).sampled_spans(0).length(), 4);
    EXPECT_EQ(joined.data(0).sampled_spans(1).start(), 4);
    request = StableReinforce({{true, 5}});
    request.set_loss_fn(loss);
    request.mutable_data(0)
        ->mutable_loss_fn_input_spans(0)
        ->mutable_sampled_tokens()
        ->set_offset(-1);
    EXPECT_THAT(TranslateTrain(request).status(),
                IsStatus(kInvalid, "data[0]: loss_fn_input_spans.offset"));
  }
}

TEST(TinkerTrainTest, StableReinforceWeighsTheSampledTokens) {
  auto request = StableReinforce(
      {{false, 2}, {true, 1}, {false, 0}, {false, 1}, {true, 1}});
  auto train = TranslateTrain(request);
  ASSERT_TRUE(train.ok()) << train.status();
  EXPECT_EQ(train->loss().function(), v1::LOSS_FUNCTION_STABLE_REINFORCE);
  EXPECT_THAT(Values<float>(train->data(0).weights_le()),
              ElementsAre(0, 0, 1, 0, 1));

  Tensor& weights =
      (*request.mutable_data(0)->mutable_loss_fn_inputs())["weights"];
  const std::vector<float> given = {1, 1, 0.5, 1, 0.25};
  weights.set_dense(given.data(), given.size() * sizeof(float));
  weights.set_dtype(DTYPE_FLOAT32);
  weights.add_shape(static_cast<int64_t>(given.size()));
  train = TranslateTrain(request);
  ASSERT_TRUE(train.ok()) << train.status();
  EXPECT_THAT(Values<float>(train->data(0).weights_le()),
              ElementsAre(0, 0, 0.5, 0, 0.25));
}

TEST(TinkerTrainTest, StableReinforceNeedsSpansOfAllTargets) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  for (const auto& spans : std::vector<std::vector<std::pair<bool, int64_t>>>{
           {},
           {{true, 4}},
           {{true, 5}, {true, 1}},
           {{true, 3}, {false, kHuge}},
           {{true, -1}}}) {
    EXPECT_THAT(TranslateTrain(StableReinforce(spans)).status(),
                IsStatus(kInvalid, "data[0]: loss_fn_input_spans"));
  }
}

TEST(TinkerSampleOutputTest, BothFormsHaveTheSameValues) {
  SampleResult result;
  result.samples = {{.tokens = {5, 0},
                     .logprobs = {-0.1F, -1e-7F},
                     .top_logprobs = {{{5, -0.1F}, {0, -3.25F}}, {{0, -1e-7F}}},
                     .finish_reason = FinishReason::kStop},
                    {.tokens = {7}, .logprobs = {-2.5F}}};
  result.prompt_logprobs = {0, -1, -2};
  result.prompt_top_logprobs = {
      {}, {{0, -0.5F}, {9, -1.0F / 3}}, {{1, -0.25F}}};
  const std::string bytes =
      SampleOutput(result, {.last_n = 3, .prompt_top = 3});
  SampleResponse proto;
  ASSERT_TRUE(proto.ParseFromString(bytes));
  const Json json = Json::parse(SampleOutputJson(bytes));
  ASSERT_EQ(json["sequences"].size(), 2u);
  const Json& first = json["sequences"][0];
  EXPECT_EQ(first["stop_reason"], "stop");
  EXPECT_EQ(first["tokens"], Json({5, 0}));
  EXPECT_EQ(first["logprobs"][0].get<float>(), -0.1F);
  ExpectSame(proto.sequences(0).topk_sampled_logprobs(),
             first["topk_logprobs"]);
  EXPECT_EQ(json["sequences"][1]["stop_reason"], "length");
  EXPECT_FALSE(json["sequences"][1].contains("topk_logprobs"));
  EXPECT_EQ(json["prompt_logprobs"], Json({nullptr, -1, -2}));
  ExpectSame(proto.topk_prompt_logprobs(), json["topk_prompt_logprobs"]);
  EXPECT_TRUE(json["topk_prompt_logprobs"][0].is_null());
  EXPECT_EQ(json["topk_prompt_logprobs"][1].size(), 2u);
}

TEST(TinkerSampleOutputTest, OnlyTheLastTokensOfAPromptHaveScores) {
  SampleResult result;
  result.prompt_logprobs = {0, -1, -2};
  result.prompt_top_logprobs = {{}, {{0, -0.5F}}, {{1, -0.25F}}};
  const Json json = Json::parse(
      SampleOutputJson(SampleOutput(result, {.last_n = 1, .prompt_top = 1})));
  EXPECT_EQ(json["prompt_logprobs"], Json({nullptr, nullptr, -2}));
  EXPECT_EQ(json["topk_prompt_logprobs"],
            Json::parse("[null, null, [[1, -0.25]]]"));
}

TEST(TinkerSampleOutputTest, ScoresHaveThePlacesOfTheirTargets) {
  const Json dense = {
      {"data", {7, -1, -1, 9}}, {"dtype", "int64"}, {"shape", {2, 2}}};
  Json sparse = {{"data", {7, -1, 9}}, {"dtype", "int64"}, {"shape", {2, 5}}};
  sparse["sparse_crow_indices"] = {0, 2, 3};
  sparse["sparse_col_indices"] = {0, 3, 4};
  SampleResult result;
  result.samples.resize(1);
  result.prompt_target_logprobs = {-0.5F, -0.25F};
  result.prompt_alternatives = {{}, {{4, -1}, {5, -2}}, {{6, -3}, {4, -4}}};
  result.prompt_cached_tokens = 16;
  for (const Json& targets : {dense, sparse}) {
    const auto asked =
        TranslateSample({{"prompt", {{"chunks", {{{"tokens", {1, 2, 3}}}}}}},
                         {"prompt_alt_tokens_k", 2},
                         {"target_prompt_logprobs", targets},
                         {"sampling_params", Json::object()}})
            .value();
    EXPECT_EQ(asked.request.config().max_tokens(), kAllThatFit);
    const v1::PromptTargets& read = asked.request.prompt_targets();
    EXPECT_THAT(read.counts(), ElementsAre(1, 1));
    EXPECT_THAT(read.tokens(), ElementsAre(7, 9));
    const Json out =
        Json::parse(SampleOutputJson(SampleOutput(result, asked.format)));
    Json expected = targets;
    expected["dtype"] = "float32";
    expected["data"] = targets["shape"][1] == 2 ? Json({-0.5, 0, 0, -0.25})
                                                : Json({-0.5, 0, -0.25});
    EXPECT_EQ(out["target_prompt_logprobs"], expected);
    EXPECT_EQ(
        out["prompt_alt_tokens"]["tokens"],
        Json({{"data", {4, 5, 6, 4}}, {"dtype", "int64"}, {"shape", {2, 2}}}));
    EXPECT_EQ(out["prompt_alt_tokens"]["logprobs"]["data"],
              Json({-1, -2, -3, -4}));
    EXPECT_EQ(out["prompt_cache_hit_tokens"], 16);
  }
}

TEST(TinkerCheckpointPathTest, NamesAndWeftNamesAreOneToOne) {
  for (const char* text :
       {"tinker://run/weights/a", "tinker://run/sampler_weights/a",
        "tinker://run/external_weights/a.b"}) {
    const auto path = ParseCheckpointPath(text).value();
    EXPECT_EQ(path.ToString(), text);
    EXPECT_EQ(PathOfWeft("run", path.WeftName()).ToString(), text);
  }
}

TEST(TinkerCheckpointPathTest, RefusesPathsThatLeaveTheirFolder) {
  for (const char* text :
       {"tinker://run/weights/..", "tinker://run/weights/a/b", "run/weights/a",
        "tinker:///weights/a", "tinker://run/other/a", "tinker://run/weights/",
        "tinker://run/weights/sampler_weights.a", "tinker://run", ""}) {
    EXPECT_THAT(ParseCheckpointPath(text, "model_path"),
                IsStatus(kInvalid, "model_path"))
        << text;
  }
}

}  // namespace
}  // namespace weft::server::tinker
