// Tests checkpoint folders whose entries are not what their names promise.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/weights/checkpoint.h"
#include "tests/support/processor_time.h"
#include "tests/weights/files.h"
#include "tests/weights/torch_files.h"

namespace weft::weights::hostile_folder_test {
namespace {

using ::testing::HasSubstr;

constexpr char kSingle[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr char kShard[] = "shard.safetensors";

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kLost = absl::StatusCode::kDataLoss;
constexpr auto kMissing = absl::StatusCode::kNotFound;
constexpr auto kDenied = absl::StatusCode::kPermissionDenied;

struct BadFolder {
  std::string name;
  std::function<void(const TempFolder&)> fill;
  absl::StatusCode code;
  std::string message;
};

void PrintTo(const BadFolder& bad, std::ostream* stream) {
  *stream << bad.name;
}

// Runs without root's rights, because root may read everything.
class AsNobody {
 public:
  AsNobody() : was_root_(geteuid() == 0) {
    constexpr uid_t kNobody = 65534;
    dropped_ = !was_root_ || seteuid(kNobody) == 0;
  }
  AsNobody(const AsNobody&) = delete;
  AsNobody& operator=(const AsNobody&) = delete;
  ~AsNobody() {
    if (was_root_ && dropped_ && seteuid(0) != 0) std::abort();
  }
  bool dropped() const { return dropped_; }

 private:
  const bool was_root_;
  bool dropped_;
};

std::string In(const TempFolder& folder, const std::string& name) {
  return absl::StrCat(folder.path(), "/", name);
}

std::string GoodFile() {
  return RawFile(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
}

std::string IndexOf(const std::string& file) {
  return absl::StrCat(R"({"weight_map":{"t":")", file, "\"}}");
}

// Each function below makes something other than a readable regular file.
void MakeFolder(const TempFolder& folder, const std::string& name) {
  std::filesystem::create_directory(In(folder, name));
}
void MakeFifo(const TempFolder& folder, const std::string& name) {
  ASSERT_EQ(mkfifo(In(folder, name).c_str(), 0600), 0);
}
void MakeLinkTo(const std::string& target, const TempFolder& folder,
                const std::string& name) {
  std::filesystem::create_symlink(target, In(folder, name));
}
void MakeUnreadable(const TempFolder& folder, const std::string& name) {
  ASSERT_EQ(chmod(folder.Write(name, GoodFile()).c_str(), 0), 0);
}

std::vector<BadFolder> BadFiles() {
  const auto file = [](auto make) {
    return [make](const TempFolder& folder) { make(folder, kSingle); };
  };
  const auto link = [&](const std::string& target) {
    return [target](const TempFolder& folder) {
      MakeLinkTo(target, folder, kSingle);
    };
  };
  const auto contents = [](const char* name, const std::string& text) {
    return [=](const TempFolder& folder) { (void)folder.Write(name, text); };
  };
  return {
      {"Nothing", [](const TempFolder&) {}, kMissing, "none of "},
      {"Folder", file(MakeFolder), kInvalid, "not a regular file"},
      {"Fifo", file(MakeFifo), kInvalid, "not a regular file"},
      {"BinFifo",
       [](const TempFolder& folder) { MakeFifo(folder, "pytorch_model.bin"); },
       kInvalid, "pytorch_model.bin is not a regular file"},
      {"LinkToFolder", link("/"), kInvalid, "not a regular file"},
      {"LinkToEndlessDevice", link("/dev/zero"), kInvalid,
       "not a regular file"},
      {"LinkToEmptyDevice", link("/dev/null"), kInvalid, "not a regular file"},
      {"LinkToItself", link(kSingle), kInvalid,
       "model.safetensors is a link that leads to no file"},
      {"LinkToNothing", link("nothing"), kMissing, "none of "},
      {"Empty", contents(kSingle, ""), kLost, "model.safetensors is empty"},
      {"BinNamedSafetensors", contents(kSingle, TorchFile("\x80\x02}.", {})),
       kInvalid, "model.safetensors: safetensors header has "},
      {"SafetensorsNamedBin", contents("pytorch_model.bin", GoodFile()),
       kInvalid, "pytorch_model.bin: is not a zip archive"}};
}

std::vector<BadFolder> BadShards() {
  const auto index = [](const std::string& text) {
    return
        [text](const TempFolder& folder) { (void)folder.Write(kIndex, text); };
  };
  const auto shard = [](auto make) {
    return [make](const TempFolder& folder) {
      (void)folder.Write(kIndex, IndexOf(kShard));
      make(folder, kShard);
    };
  };
  std::string many = R"({"weight_map":{"0":"a")";
  for (int i = 1; i <= 100'000; ++i)
    absl::StrAppend(&many, ",\"", i, "\":\"\"");
  return {
      {"IndexIsAFolder",
       [](const TempFolder& folder) { MakeFolder(folder, kIndex); }, kInvalid,
       "index.json is not a regular file"},
      {"IndexIsAFifo",
       [](const TempFolder& folder) { MakeFifo(folder, kIndex); }, kInvalid,
       "index.json is not a regular file"},
      {"IndexIsAnEndlessDevice",
       [](const TempFolder& folder) {
         MakeLinkTo("/dev/zero", folder, kIndex);
       },
       kInvalid, "index.json is not a regular file"},
      {"IndexTooLong",
       [](const TempFolder& folder) {
         std::filesystem::resize_file(folder.Write(kIndex, "{"),
                                      (size_t{64} << 20) + 1);
       },
       kInvalid, "67108865 bytes > limit 67108864"},
      {"IndexOfTooManyTensors", index(many + "}}"), kInvalid,
       "weight_map has 100001 tensors > limit 100000"},
      {"IndexNestedDeeply",
       index("{\"weight_map\":" + std::string(1'000'000, '[')), kInvalid,
       "nested deeper than 4"},
      {"IndexIsEmpty", index(""), kInvalid,
       "index.json: shard index is not a JSON object"},
      {"ShardAbove", index(IndexOf("../shard.safetensors")), kInvalid,
       "'../shard.safetensors'; a bare file name is expected"},
      {"ShardBelow", index(IndexOf("a/shard.safetensors")), kInvalid,
       "a bare file name is expected"},
      {"ShardAbsolute", index(IndexOf("/etc/passwd")), kInvalid,
       "'/etc/passwd'; a bare file name is expected"},
      {"ShardMissing", index(IndexOf(kShard)), kMissing, "shard.safetensors"},
      {"ShardIsAFolder", shard(MakeFolder), kInvalid, "not a regular file"},
      {"ShardIsAFifo", shard(MakeFifo), kInvalid, "not a regular file"},
      {"ShardIsTheIndex", index(IndexOf(kIndex)), kInvalid,
       "index.json: safetensors header has "},
      {"ShardIsCut",
       [](const TempFolder& folder) {
         (void)folder.Write(kIndex, IndexOf(kShard));
         std::string cut = GoodFile();
         cut.pop_back();
         (void)folder.Write(kShard, cut);
       },
       kLost, "shard.safetensors: tensor 't' ends at byte 1 of 0"}};
}

std::vector<BadFolder> UnreadableFolders() {
  return {{"File",
           [](const TempFolder& folder) { MakeUnreadable(folder, kSingle); },
           kDenied, "model.safetensors"},
          {"Shard",
           [](const TempFolder& folder) {
             (void)folder.Write(kIndex, IndexOf(kShard));
             MakeUnreadable(folder, kShard);
           },
           kDenied, "shard.safetensors"},
          {"Index",
           [](const TempFolder& folder) { MakeUnreadable(folder, kIndex); },
           kDenied, "index.json"},
          {"Folder",
           [](const TempFolder& folder) {
             (void)folder.Write(kSingle, GoodFile());
             ASSERT_EQ(chmod(folder.path().c_str(), 0), 0);
           },
           kDenied, "model.safetensors"}};
}

void ExpectRefused(const TempFolder& folder, const BadFolder& bad) {
  const ProcessorTime time;
  const auto checkpoint = Checkpoint::Open(folder.path());
  EXPECT_LT(time.Seconds(), 1);
  EXPECT_EQ(checkpoint.status().code(), bad.code) << checkpoint.status();
  EXPECT_THAT(std::string(checkpoint.status().message()),
              HasSubstr(bad.message));
}

class HostileFolder : public ::testing::TestWithParam<BadFolder> {};

TEST_P(HostileFolder, IsRefusedByNameWithinASecond) {
  const TempFolder folder;
  ASSERT_NO_FATAL_FAILURE(GetParam().fill(folder));
  ExpectRefused(folder, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Files, HostileFolder, ::testing::ValuesIn(BadFiles()),
                         [](const auto& bad) { return bad.param.name; });
INSTANTIATE_TEST_SUITE_P(Shards, HostileFolder,
                         ::testing::ValuesIn(BadShards()),
                         [](const auto& bad) { return bad.param.name; });

class UnreadableFolder : public ::testing::TestWithParam<BadFolder> {};

TEST_P(UnreadableFolder, IsRefusedByName) {
  const TempFolder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  ASSERT_NO_FATAL_FAILURE(GetParam().fill(folder));
  const AsNobody nobody;
  if (!nobody.dropped()) GTEST_SKIP() << "root cannot become another user";
  ExpectRefused(folder, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Folders, UnreadableFolder,
                         ::testing::ValuesIn(UnreadableFolders()),
                         [](const auto& bad) { return bad.param.name; });

}  // namespace
}  // namespace weft::weights::hostile_folder_test
