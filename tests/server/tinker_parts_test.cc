// The parts of the Tinker front that read what clients send, without a server.
#include <zstd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/body.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/futures.h"
#include "server/tinker/ledger.h"
#include "server/tinker/tensor.h"
#include "server/tinker/url.h"
#include "tests/support/status_matchers.h"

namespace weft::tinker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

std::string Zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(
      ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

TEST(TinkerUrlTest, TakesPathsAndQueriesApart) {
  const auto url = ParseUrl("/api/v1/models/a%20b/checkpoints?limit=5&x=%2e");
  ASSERT_TRUE(url.ok()) << url.status();
  EXPECT_THAT(url->parts, ElementsAre("models", "a b", "checkpoints"));
  EXPECT_EQ(url->query.at("limit"), "5");
  EXPECT_EQ(url->query.at("x"), ".");
}

TEST(TinkerUrlTest, RefusesEscapesThatHideASeparator) {
  for (const char* target :
       {"/api/v1/a%2fb", "/api/v1/a%00b", "/api/v1/a%2", "/api/v1/a%zz"}) {
    EXPECT_THAT(ParseUrl(target), IsStatus(kInvalid, "escape")) << target;
  }
  EXPECT_THAT(ParseUrl("/api/v2/a"),
              IsStatus(absl::StatusCode::kNotFound, "no such path"));
  EXPECT_FALSE(ParseUrl("").ok());
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
  // The library recurses where it copies and prints, so depth has a limit.
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
  const auto tensor = TensorFromJson("t", Sparse("[0, 1, 2]", "[2, 0]"));
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_THAT(*ReadFloats("t", *tensor), ElementsAre(0, 0, 1, 2, 0, 0));
  EXPECT_EQ(*TargetsPerToken("t", *tensor), 3);
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
    const auto tensor = TensorFromJson("t", Sparse(rows, columns));
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_THAT(ReadFloats("t", *tensor), IsStatus(kInvalid, "t"))
        << rows << columns;
  }
}

TEST(TinkerTensorTest, RefusesShapesThatAFewBytesClaim) {
  Json huge = Sparse("[0, 1, 2]", "[2, 0]");
  huge["shape"] = {2000000000, 2000000000};
  const auto tensor = TensorFromJson("t", huge);
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_THAT(ReadFloats("t", *tensor), IsStatus(kInvalid, "values"));
}

TEST(TinkerTensorTest, AnIdThatIsNoneBecomesOneThatNoVocabularyHas) {
  const auto tensor = TensorFromJson(
      "t", Json::parse(R"({"data": [5, -1, 4294967296], "dtype": "int64"})"));
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  const std::string raw = *ReadIds("t", *tensor);
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

TEST(TinkerCheckpointPathTest, NamesAndWeftNamesAreOneToOne) {
  for (const char* text :
       {"tinker://run/weights/a", "tinker://run/sampler_weights/a",
        "tinker://run/external_weights/a.b"}) {
    const auto path = ParseCheckpointPath(text);
    ASSERT_TRUE(path.ok()) << path.status();
    EXPECT_EQ(path->ToString(), text);
    EXPECT_EQ(PathOfWeft("run", path->WeftName()).ToString(), text);
  }
}

TEST(TinkerCheckpointPathTest, RefusesPathsThatLeaveTheirFolder) {
  for (const char* text :
       {"tinker://run/weights/..", "tinker://run/weights/a/b", "run/weights/a",
        "tinker:///weights/a", "tinker://run/other/a", "tinker://run/weights/",
        "tinker://run/weights/sampler_weights.a", "tinker://run", ""}) {
    EXPECT_THAT(ParseCheckpointPath(text), IsStatus(kInvalid, "path")) << text;
  }
}

class TinkerFuturesTest : public ::testing::Test {
 protected:
  Respond Take() {
    return [this](HttpReply reply) { replies_.push_back(std::move(reply)); };
  }
  // Retrieves a JSON answer without an announcement.
  void Retrieve(const std::string& id, const std::string& owner = "me") {
    futures_.Retrieve(id, owner, false, false, Take());
  }

  std::vector<std::function<void()>> later_;
  Futures futures_{2000, [this](absl::Duration, std::function<void()> run) {
                     later_.push_back(std::move(run));
                   }};
  std::vector<HttpReply> replies_;
};

TEST_F(TinkerFuturesTest, AnswersAllWhoWaitAndAllWhoComeLater) {
  EXPECT_TRUE(futures_.Open("f", "me"));
  EXPECT_FALSE(futures_.Open("f", "me"));
  Retrieve("f");
  Retrieve("f");
  EXPECT_TRUE(replies_.empty());
  futures_.Finish("f", FutureResult::Of({{"a", 1}}));
  futures_.Finish("f", FutureResult::Of({{"a", 2}}));
  Retrieve("f");
  ASSERT_EQ(replies_.size(), 3u);
  for (const HttpReply& reply : replies_) EXPECT_EQ(reply.body, R"({"a":1})");
  // Their long polls have ended already.
  for (const auto& give_up : later_) give_up();
  EXPECT_EQ(replies_.size(), 3u);
}

TEST_F(TinkerFuturesTest, ALongPollEndsAndMayBeMadeAgain) {
  ASSERT_TRUE(futures_.Open("f", "me"));
  Retrieve("f");
  later_.at(0)();
  ASSERT_EQ(replies_.size(), 1u);
  EXPECT_THAT(replies_[0].body, HasSubstr("try_again"));
  Retrieve("f");
  futures_.Finish("f", FutureResult::Of({{"a", 1}}));
  EXPECT_EQ(replies_.back().body, R"({"a":1})");
}

TEST_F(TinkerFuturesTest, AnotherOwnersFutureIsNotThere) {
  ASSERT_TRUE(futures_.Open("f", "me"));
  futures_.Finish("f", FutureResult::Of({{"secret", 1}}));
  Retrieve("f", "you");
  Retrieve("unknown");
  ASSERT_EQ(replies_.size(), 2u);
  EXPECT_EQ(replies_[0].status, 410);
  EXPECT_EQ(replies_[0].body, replies_[1].body);
}

TEST_F(TinkerFuturesTest, ForgetsTheOldestResultsBeyondItsBytes) {
  for (const char* id : {"a", "b", "c", "d", "e"}) {
    ASSERT_TRUE(futures_.Open(id, "me"));
    futures_.Finish(id, FutureResult::Of({{"id", id}}));
  }
  EXPECT_FALSE(futures_.Has("a"));
  EXPECT_TRUE(futures_.Has("e"));
}

TEST(TinkerLedgerTest, EntriesAreThereAgainAfterARestart) {
  const std::string folder = ::testing::TempDir() + "tinker_ledger_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  {
    auto ledger = Ledger::Open(folder);
    ASSERT_TRUE(ledger.ok()) << ledger.status();
    const std::string bytes("\0\xff\n", 3);
    ASSERT_TRUE(ledger->Put(EntryKind::kStep, {"a:1", {{"n", 1}}, bytes}).ok());
    ASSERT_TRUE(ledger->Put(EntryKind::kStep, {"a:2", {{"n", 2}}, ""}).ok());
    ASSERT_TRUE(ledger->Put(EntryKind::kStep, {"a:2", {{"n", 3}}, ""}).ok());
    ASSERT_TRUE(ledger->Put(EntryKind::kModel, {"../a", {{"n", 4}}, ""}).ok());
    ledger->Erase(EntryKind::kStep, "unknown");
  }
  auto ledger = Ledger::Open(folder);
  ASSERT_TRUE(ledger.ok()) << ledger.status();
  std::vector<int> steps;
  for (const LedgerEntry& entry : ledger->ReadAll(EntryKind::kStep)) {
    steps.push_back(entry.fields["n"].get<int>());
    EXPECT_EQ(entry.bytes, entry.id == "a:1" ? std::string("\0\xff\n", 3) : "");
  }
  EXPECT_THAT(steps, UnorderedElementsAre(1, 3));
  const auto models = ledger->ReadAll(EntryKind::kModel);
  ASSERT_EQ(models.size(), 1u);
  EXPECT_EQ(models[0].id, "../a");
  std::filesystem::remove_all(folder);
}

TEST(TinkerLedgerTest, WithoutAFolderNothingIsKept) {
  auto ledger = Ledger::Open("");
  ASSERT_TRUE(ledger.ok()) << ledger.status();
  EXPECT_FALSE(ledger->keeps());
  EXPECT_TRUE(ledger->Put(EntryKind::kStep, {"a", {}, ""}).ok());
  EXPECT_TRUE(ledger->ReadAll(EntryKind::kStep).empty());
}

}  // namespace
}  // namespace weft::tinker
