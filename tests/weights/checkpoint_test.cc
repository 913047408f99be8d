#include "src/weights/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/weights/safetensors.h"
#include "tests/weights/files.h"
#include "tests/weights/torch_files.h"

namespace weft::weights::checkpoint_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns the names of the tensors.
std::vector<std::string> NamesOf(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const DiskTensor& tensor : checkpoint.Tensors()) {
    names.push_back(tensor.name());
  }
  return names;
}

// Makes a file of one-byte tensors. Each byte is the tensor's index.
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

// Like FileWith, but makes a .bin. The bytes count up from `first`.
std::string BinWith(const std::vector<std::string>& names, char first = 0) {
  std::vector<std::pair<std::string, std::string>> entries;
  ZipItems storages;
  for (size_t i = 0; i < names.size(); ++i) {
    const TestTensor tensor = {.shape = {1},
                               .strides = {1},
                               .storage = absl::StrCat(i),
                               .storage_elements = 1,
                               .type = "ByteStorage"};
    entries.emplace_back(names[i], Tensor(tensor));
    storages.emplace_back(absl::StrCat(i),
                          std::string(1, static_cast<char>(first + i)));
  }
  return TorchFile(Pickle(DictOf(entries)), storages);
}

// Returns the only byte of a tensor.
int ByteOf(const Checkpoint& checkpoint, std::string_view name) {
  const auto tensor = checkpoint.Find(name).value();
  std::byte value{};
  EXPECT_TRUE(tensor.ReadBytes(0, absl::MakeSpan(&value, 1)).ok());
  return static_cast<int>(value);
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
  const std::pair<const char*, const char*> cases[] = {
      {"", "not a JSON object"},
      {"[]", "not a JSON object"},
      {"{", "not a JSON object"},
      {"{}", "no weight_map"},
      {R"({"weight_map":[]})", "no weight_map"},
      {R"({"weight_map":{}})", "no weight_map"},
      {R"({"weight_map":{"t":1}})", "'t' into something that is not a string"},
      {R"({"weight_map":{"t":null}})", "not a string"},
      {R"({"weight_map":{"t":"a","t":"b"}})", "key 't' twice"},
      {R"({"weight_map":{"t":{"u":{"v":{}}}}})", "nested deeper than 4"},
      {"{\"weight_map\":{\"\xff\":\"a\"}}", "not a JSON object in UTF-8"}};
  for (const auto& [json, message] : cases) {
    const auto index = ParseShardIndex(json);
    EXPECT_EQ(index.status().code(), absl::StatusCode::kInvalidArgument)
        << json;
    EXPECT_THAT(std::string(index.status().message()), HasSubstr(message));
  }
}

TEST(Checkpoint, OpensASingleFile) {
  const TempFolder folder;
  (void)folder.Write("model.safetensors", FileWith({"b", "a"}));
  const auto checkpoint = Checkpoint::Open(folder.path()).value();
  EXPECT_THAT(NamesOf(*checkpoint), ElementsAre("a", "b"));
}

TEST(Checkpoint, OpensShardsAndTakesOnlyWhatIsMapped) {
  const TempFolder folder;
  (void)folder.Write("one.safetensors", FileWith({"a", "extra"}));
  (void)folder.Write("two.safetensors", FileWith({"x", "b"}));
  (void)folder.Write("model.safetensors.index.json",
                     IndexOf(R"("a":"one.safetensors","b":"two.safetensors")"));
  const auto checkpoint = Checkpoint::Open(folder.path()).value();
  EXPECT_THAT(NamesOf(*checkpoint), ElementsAre("a", "b"));
  EXPECT_EQ(ByteOf(*checkpoint, "b"), 1);
}

TEST(Checkpoint, OpensBinFilesAndTheirShards) {
  const TempFolder folder;
  (void)folder.Write("pytorch_model-00001-of-00002.bin", BinWith({"a", "x"}));
  (void)folder.Write("pytorch_model-00002-of-00002.bin", BinWith({"b"}, 7));
  (void)folder.Write("pytorch_model.bin.index.json",
                     IndexOf(R"("a":"pytorch_model-00001-of-00002.bin",)"
                             R"("b":"pytorch_model-00002-of-00002.bin")"));
  const auto shards = Checkpoint::Open(folder.path()).value();
  EXPECT_THAT(NamesOf(*shards), ElementsAre("a", "b"));
  EXPECT_EQ(ByteOf(*shards, "b"), 7);
  (void)folder.Write("pytorch_model.bin", BinWith({"c"}, 9));
  const auto single = Checkpoint::Open(folder.path()).value();
  EXPECT_THAT(NamesOf(*single), ElementsAre("c"));
}

TEST(Checkpoint, PrefersWhatTransformersPrefers) {
  // The test writes these files in this order. Each file takes precedence over
  // the files before it.
  const std::pair<const char*, std::string> steps[] = {
      {"pytorch_model.bin.index.json", IndexOf(R"("a":"s.bin")")},
      {"pytorch_model.bin", BinWith({"a"}, 11)},
      {"model.safetensors.index.json", IndexOf(R"("a":"s.safetensors")")},
      {"model.safetensors", FileWith({"x", "y", "a"})}};
  const TempFolder folder;
  (void)folder.Write("s.bin", BinWith({"a"}, 10));
  (void)folder.Write("s.safetensors", FileWith({"x", "a"}));
  std::vector<int> bytes;
  for (const auto& [name, contents] : steps) {
    (void)folder.Write(name, contents);
    const auto checkpoint = Checkpoint::Open(folder.path()).value();
    bytes.push_back(ByteOf(*checkpoint, "a"));
  }
  EXPECT_THAT(bytes, ElementsAre(10, 11, 1, 2));
}

TEST(Checkpoint, ReadsOnlyWhatIsAskedFor) {
  constexpr size_t kRows = 1000;
  constexpr size_t kRowBytes = 4096;
  const TestTensor tensor = {.shape = {kRows, kRowBytes},
                             .strides = {kRowBytes, 1},
                             .storage_elements = kRows * kRowBytes,
                             .type = "ByteStorage"};
  std::string values;
  for (size_t row = 0; row < kRows; ++row) {
    values.append(kRowBytes, static_cast<char>(row));
  }
  const std::pair<const char*, std::string> files[] = {
      {"pytorch_model.bin",
       TorchFile(Pickle(DictOf({{"w", Tensor(tensor)}})), {{"0", values}})},
      {"model.safetensors",
       RawFile(absl::StrCat(R"({"w":{"dtype":"U8","shape":[)", kRows, ",",
                            kRowBytes, R"(],"data_offsets":[0,)", values.size(),
                            "]}}"),
               0) +
           values}};
  for (const auto& [name, contents] : files) {
    const TempFolder folder;
    (void)folder.Write(name, contents);
    const auto checkpoint = Checkpoint::Open(folder.path()).value();
    const uint64_t opened = checkpoint->bytes_read();
    EXPECT_LT(opened, 4096u) << name;
    const auto w = checkpoint->Find("w");
    EXPECT_EQ(checkpoint->bytes_read(), opened);
    std::vector<std::byte> rows(2 * kRowBytes);
    ASSERT_TRUE(w->ReadBytes(299 * kRowBytes, absl::MakeSpan(rows)).ok());
    EXPECT_EQ(checkpoint->bytes_read(), opened + rows.size()) << name;
    EXPECT_EQ(rows.front(), std::byte{299 % 256});
    EXPECT_EQ(rows.back(), std::byte{300 % 256});
  }
}

TEST(Checkpoint, NamesWhatIsMissing) {
  const TempFolder folder;
  const auto none = Checkpoint::Open(folder.path());
  EXPECT_EQ(none.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(none.status().message()),
              HasSubstr("pytorch_model.bin.index.json"));
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
  (void)folder.Write("pytorch_model.bin", BinWith({"a"}));
  (void)folder.Write("model.safetensors", "short");
  const auto damaged = Checkpoint::Open(folder.path());
  EXPECT_EQ(damaged.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(damaged.status().message()),
              HasSubstr(folder.path() + "/model.safetensors: "));
}

TEST(Checkpoint, FindsTensorsUnderEveryPrefix) {
  for (const char* prefix :
       {"", "model.", "language_model.", "language_model.model.",
        "model.language_model.", "transformer."}) {
    const TempFolder folder;
    (void)folder.Write(
        "model.safetensors",
        FileWith({absl::StrCat(prefix, "norm.weight"), "lm_head.weight"}));
    const auto checkpoint = Checkpoint::Open(folder.path()).value();
    EXPECT_TRUE(checkpoint->Find("model.norm.weight").ok()) << prefix;
    EXPECT_TRUE(checkpoint->Find("lm_head.weight").ok()) << prefix;
  }
}

TEST(Checkpoint, RefusesTwoCandidatesAndReportsNone) {
  const TempFolder folder;
  (void)folder.Write(
      "model.safetensors",
      FileWith({"model.norm.weight", "language_model.model.norm.weight",
                "vision.model.embed_tokens.weight"}));
  const auto checkpoint = Checkpoint::Open(folder.path()).value();
  const auto twice = checkpoint->Find("model.norm.weight");
  EXPECT_EQ(twice.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(twice.status().message()),
              HasSubstr("language_model.model.norm.weight"));
  EXPECT_EQ(checkpoint->Find("model.embed_tokens.weight").status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace weft::weights::checkpoint_test
