#include "client/peft_folder.h"

#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "client/weft_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/canned_server.h"
#include "tests/support/temp_folder.h"

namespace weft::client {
namespace {

namespace fs = std::filesystem;

using ::testing::ElementsAre;
using ::testing::Pair;

class PeftFolderTest : public ::testing::Test {
 protected:
  static void Write(const fs::path& path, const std::string& data) {
    std::ofstream(path, std::ios::binary) << data;
  }

  static std::string Read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  static v1::FileChunk Chunk(const std::string& name, const std::string& data) {
    v1::FileChunk chunk;
    chunk.set_name(name);
    chunk.set_data(data);
    return chunk;
  }

  const TempFolder folder_;
  const fs::path root_ = folder_.path();
};

TEST_F(PeftFolderTest, MovesAFolderThroughTheServer) {
  CannedServer server;
  const auto client = Client::Connect({.target = server.target()}).value();
  const fs::path source = root_ / "in";
  fs::create_directories(source);
  std::string weights((size_t{5} << 18) + 3, 'w');
  weights[1000] = '\0';
  Write(source / "adapter_config.json", "{}");
  Write(source / "adapter_model.safetensors", weights);
  const auto adapter = client->ImportAdapter("a", source.string());
  ASSERT_TRUE(adapter.ok()) << adapter.status();
  const fs::path target = root_ / "new" / "out";
  const absl::Status moved = client->ExportAdapter("a", "", target.string());
  ASSERT_TRUE(moved.ok()) << moved;
  EXPECT_EQ(Read(target / "adapter_model.safetensors"), weights);
  EXPECT_EQ(Read(target / "adapter_config.json"), "{}");
}

TEST_F(PeftFolderTest, RefusesAFolderWithoutItsFiles) {
  CannedServer server;
  const auto client = Client::Connect({.target = server.target()}).value();
  const auto adapter = client->ImportAdapter("a", root_.string());
  EXPECT_TRUE(absl::IsNotFound(adapter.status())) << adapter.status();
  Write(root_ / "adapter_config.json", "{}");
  Write(root_ / "adapter_model.bin", "");
  const absl::Status pickled =
      client->ImportAdapter("a", root_.string()).status();
  EXPECT_TRUE(absl::IsNotFound(pickled)) << pickled;
  EXPECT_NE(pickled.message().find("safe_serialization=True"),
            std::string::npos)
      << pickled;
}

TEST_F(PeftFolderTest, SendsAnEmptyFileAsOneEmptyChunk) {
  Write(root_ / "adapter_config.json", "");
  Write(root_ / "adapter_model.safetensors", std::string(2 << 20, 'w'));
  std::vector<std::pair<std::string, size_t>> sent;
  const absl::Status read =
      ReadPeftFolder(root_, [&](const v1::FileChunk& chunk) {
        sent.emplace_back(chunk.name(), chunk.data().size());
        return true;
      });
  ASSERT_TRUE(read.ok()) << read;
  EXPECT_THAT(sent, ElementsAre(Pair("adapter_config.json", 0),
                                Pair("adapter_model.safetensors", 1 << 20),
                                Pair("adapter_model.safetensors", 1 << 20)));
}

TEST_F(PeftFolderTest, SaysThatAFileIsGone) {
  Write(root_ / "adapter_config.json", "{}");
  Write(root_ / "adapter_model.safetensors", "w");
  const absl::Status read = ReadPeftFolder(root_, [&](const v1::FileChunk&) {
    fs::remove(root_ / "adapter_model.safetensors");
    return true;
  });
  EXPECT_EQ(read.code(), absl::StatusCode::kInternal) << read;
}

TEST_F(PeftFolderTest, NeverWritesOutsideItsFolder) {
  for (const char* name : {"", ".", "..", "../evil", "/etc/evil", "a/b"}) {
    PeftFolderWriter writer(root_ / "out");
    EXPECT_TRUE(absl::IsDataLoss(writer.Add(Chunk(name, "x")))) << name;
  }
  EXPECT_TRUE(fs::is_empty(root_));
}

TEST_F(PeftFolderTest, LeavesNothingOfAnExportThatBrokeOff) {
  {
    PeftFolderWriter writer(root_ / "out");
    ASSERT_TRUE(writer.Add(Chunk("adapter_config.json", "{}")).ok());
    EXPECT_TRUE(absl::IsDataLoss(writer.Commit()));
  }
  EXPECT_TRUE(fs::is_empty(root_));
}

TEST_F(PeftFolderTest, SaysThatAnExportWithoutFilesLacksThem) {
  PeftFolderWriter writer(root_ / "out");
  EXPECT_TRUE(absl::IsDataLoss(writer.Commit()));
}

TEST_F(PeftFolderTest, SaysThatTheDiskRefuses) {
  Write(root_ / "file", "");
  PeftFolderWriter writer(root_ / "file" / "out");
  EXPECT_EQ(writer.Add(Chunk("adapter_config.json", "{}")).code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace weft::client
