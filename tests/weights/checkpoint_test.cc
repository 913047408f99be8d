#include "src/weights/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/weights/shard_index.h"
#include "tests/weights/files.h"

namespace weft::weights {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A file whose tensors have one byte each: their place in the list.
std::string FileWith(const std::vector<std::string>& names) {
  std::vector<std::byte> values;
  for (size_t i = 0; i < names.size(); ++i) values.push_back(std::byte(i));
  std::vector<NamedTensor> tensors;
  for (size_t i = 0; i < names.size(); ++i) {
    tensors.push_back({names[i],
                       {.dtype = ScalarType::kU8,
                        .shape = {1},
                        .bytes = absl::MakeConstSpan(values).subspan(i, 1)}});
  }
  return WriteSafetensors(tensors);
}

std::string IndexOf(const std::string& map) {
  return absl::StrCat(R"({"metadata":{"total_size":1},"weight_map":{)", map,
                      "}}");
}

TEST(ParseShardIndex, RefusesNamesThatLeaveTheFolder) {
  for (const char* file : {"/etc/passwd", "../m.safetensors", "a/b", "..", ".",
                           "", "a\\\\b", "a\\u0000b", "a\\nb"}) {
    const auto index =
        ParseShardIndex(IndexOf(absl::StrCat(R"("t":")", file, "\"")));
    EXPECT_EQ(index.status().code(), absl::StatusCode::kInvalidArgument)
        << file;
    EXPECT_THAT(std::string(index.status().message()),
                HasSubstr("bare file name"))
        << file;
  }
}

TEST(ParseShardIndex, RefusesDamagedFiles) {
  for (const char* json :
       {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})",
        R"({"weight_map":{"t":1}})", R"({"weight_map":{"t":"a","t":"b"}})",
        R"({"weight_map":{"t":{"u":{"v":{}}}}})"}) {
    EXPECT_EQ(ParseShardIndex(json).status().code(),
              absl::StatusCode::kInvalidArgument)
        << json;
  }
}

TEST(Checkpoint, OpensASingleFile) {
  const TempFolder folder;
  (void)folder.Write("model.safetensors", FileWith({"b", "a"}));
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->Names(), ElementsAre("a", "b"));
}

TEST(Checkpoint, OpensShardsAndTakesOnlyWhatIsMapped) {
  const TempFolder folder;
  (void)folder.Write("one.safetensors", FileWith({"a", "extra"}));
  (void)folder.Write("two.safetensors", FileWith({"x", "b"}));
  (void)folder.Write("model.safetensors.index.json",
                     IndexOf(R"("a":"one.safetensors","b":"two.safetensors")"));
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->Names(), ElementsAre("a", "b"));
  EXPECT_EQ((*checkpoint)->Find("b")->bytes[0], std::byte{1});
}

TEST(Checkpoint, NamesWhatIsMissing) {
  const TempFolder folder;
  EXPECT_EQ(Checkpoint::Open(folder.path()).status().code(),
            absl::StatusCode::kNotFound);
  (void)folder.Write("model.safetensors.index.json",
                     IndexOf(R"("a":"one.safetensors")"));
  const auto no_shard = Checkpoint::Open(folder.path());
  EXPECT_EQ(no_shard.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(no_shard.status().message()),
              HasSubstr("one.safetensors"));
  (void)folder.Write("one.safetensors", FileWith({"b"}));
  const auto no_tensor = Checkpoint::Open(folder.path());
  EXPECT_EQ(no_tensor.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(no_tensor.status().message()),
              HasSubstr("lacks tensor 'a'"));
}

TEST(Checkpoint, DoesNotFallBackFromADamagedSingleFile) {
  const TempFolder folder;
  (void)folder.Write("model.safetensors", "short");
  EXPECT_EQ(Checkpoint::Open(folder.path()).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST(Checkpoint, FindsTensorsUnderEveryPrefix) {
  for (const char* prefix : {"", "model.", "language_model.model.",
                             "model.language_model.", "transformer."}) {
    const TempFolder folder;
    (void)folder.Write(
        "model.safetensors",
        FileWith({absl::StrCat(prefix, "norm.weight"), "lm_head.weight"}));
    const auto checkpoint = Checkpoint::Open(folder.path());
    ASSERT_TRUE(checkpoint.ok());
    EXPECT_TRUE((*checkpoint)->Find("model.norm.weight").ok()) << prefix;
    EXPECT_TRUE((*checkpoint)->Find("lm_head.weight").ok()) << prefix;
  }
}

TEST(Checkpoint, RefusesTwoCandidatesAndReportsNone) {
  const TempFolder folder;
  (void)folder.Write(
      "model.safetensors",
      FileWith({"model.norm.weight", "language_model.model.norm.weight",
                "vision.model.embed_tokens.weight"}));
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok());
  const auto twice = (*checkpoint)->Find("model.norm.weight");
  EXPECT_EQ(twice.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(twice.status().message()),
              HasSubstr("language_model.model.norm.weight"));
  EXPECT_EQ((*checkpoint)->Find("model.embed_tokens.weight").status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace weft::weights
