#include "src/log/image.h"

#include <cmath>
#include <cstring>

#include "tests/log/journal_folder.h"
#include "tests/support/failpoints.h"

namespace weft::log {
namespace {

using Blocks = std::vector<std::vector<float>>;

class ImageFileTest : public testing::Test {
 protected:
  absl::Status Write(const std::string& name, const Blocks& blocks) const {
    return WriteImage(*folder_, name, {blocks.begin(), blocks.end()});
  }
  // Reads into blocks with the sizes of `like`.
  absl::StatusOr<Blocks> Read(const std::string& name,
                              const Blocks& like) const {
    Blocks blocks = like;
    for (std::vector<float>& block : blocks) {
      std::fill(block.begin(), block.end(), 42.0F);
    }
    const absl::Status status =
        ReadImage(*folder_, name, {blocks.begin(), blocks.end()});
    if (!status.ok()) return status;
    return blocks;
  }
  std::filesystem::path File(const std::string& name) const {
    return std::filesystem::path(files_.path()) / "images" / name;
  }

  TestFolder files_;
  std::unique_ptr<StateFolder> folder_ = files_.Open();
  const Blocks blocks_ = {{1, -2.5F, 3e30F}, {}, std::vector<float>(1000), {7}};
};

TEST_F(ImageFileTest, ReadsWhatWasWritten) {
  ASSERT_THAT(Write("a", blocks_), IsOk());
  EXPECT_THAT(Read("a", blocks_), IsOkAndHolds(blocks_));
  ASSERT_THAT(Write("none", {}), IsOk());
  EXPECT_THAT(Read("none", {}), IsOk());
}

TEST_F(ImageFileTest, KeepsEveryBit) {
  const Blocks odd = {{std::nanf("1"), -0.0F, INFINITY, 1e-45F}, {-0.0F}};
  ASSERT_THAT(Write("odd", odd), IsOk());
  const auto read = Read("odd", odd).value();
  for (size_t i = 0; i < odd.size(); ++i) {
    EXPECT_EQ(std::memcmp(read[i].data(), odd[i].data(),
                          odd[i].size() * sizeof(float)),
              0);
  }
}

TEST_F(ImageFileTest, BlocksOfZerosTakeNoRoom) {
  ASSERT_THAT(Write("zeros", {std::vector<float>(1 << 20)}), IsOk());
  EXPECT_LT(std::filesystem::file_size(File("zeros")), 100);
  std::vector<float> almost(1000);
  almost.back() = 1;
  ASSERT_THAT(Write("almost", {almost}), IsOk());
  EXPECT_THAT(Read("almost", {almost}), IsOkAndHolds(Blocks{almost}));
}

TEST_F(ImageFileTest, IsWrittenOnce) {
  ASSERT_THAT(Write("a", blocks_), IsOk());
  EXPECT_THAT(Write("a", {{9}}),
              IsStatus(absl::StatusCode::kAlreadyExists, "a"));
  EXPECT_THAT(Read("a", blocks_), IsOkAndHolds(blocks_));
}

TEST_F(ImageFileTest, SaysWhatDoesNotFit) {
  ASSERT_THAT(Write("a", blocks_), IsOk());
  EXPECT_THAT(Read("b", blocks_),
              IsStatus(absl::StatusCode::kDataLoss, "\"b\" is missing"));
  EXPECT_THAT(Read("a", {{1}}), IsStatus(absl::StatusCode::kDataLoss,
                                         "\"a\" does not have 1 blocks"));
  Blocks other = blocks_;
  other[2].resize(999);
  EXPECT_THAT(Read("a", other), IsStatus(absl::StatusCode::kDataLoss,
                                         "block of 1000 floats, not 999"));
}

TEST_F(ImageFileTest, EveryFlippedBitAndEveryPrefixIsDamage) {
  const Blocks small = {{1, 2}, {0, 0, 0}, {3}};
  ASSERT_THAT(Write("a", small), IsOk());
  const std::string whole = ReadBytes(File("a"));
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    WriteBytes(File("a"), flipped);
    EXPECT_THAT(Read("a", small),
                IsStatus(absl::StatusCode::kDataLoss, "image \"a\""))
        << i;
    WriteBytes(File("a"), whole.substr(0, i));
    EXPECT_THAT(Read("a", small),
                IsStatus(absl::StatusCode::kDataLoss, "image \"a\""))
        << i;
  }
  WriteBytes(File("a"), whole + "x");
  EXPECT_THAT(Read("a", small),
              IsStatus(absl::StatusCode::kDataLoss, "longer"));
}

TEST_F(ImageFileTest, RefusesNamesThatAreNotOnePartOfAPath) {
  for (const char* name : {"", ".", "..", "a/b", "../FORMAT"}) {
    EXPECT_THAT(Write(name, {}),
                IsStatus(absl::StatusCode::kInvalidArgument, ""));
    EXPECT_THAT(Read(name, {}),
                IsStatus(absl::StatusCode::kInvalidArgument, ""));
  }
  EXPECT_THAT(Write(".tmp-a", {}),
              IsStatus(absl::StatusCode::kInvalidArgument, "reserved"));
}

TEST_F(ImageFileTest, NothingStaysOfOneThatFailed) {
  for (const char* failpoint : {"files.create", "files.write", "files.sync",
                                "files.close", "files.rename"}) {
    {
      ScopedFailpoints fail(absl::StrCat(failpoint, "=err(ENOSPC)"));
      EXPECT_THAT(Write("a", blocks_),
                  IsStatus(absl::StatusCode::kResourceExhausted, "a"));
    }
    EXPECT_TRUE(std::filesystem::is_empty(File("a").parent_path()))
        << failpoint;
  }
  EXPECT_THAT(Write("a", blocks_), IsOk());
}

}  // namespace
}  // namespace weft::log
