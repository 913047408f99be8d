#include "src/weights/tensor_copy.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "src/weights/checkpoint.h"
#include "src/weights/safetensors.h"
#include "tests/support/status_matchers.h"
#include "tests/weights/files.h"

namespace weft::weights {
namespace {

constexpr int64_t kRows = 3001;  // Enough rows for several blocks.
constexpr int64_t kColumns = 1001;

// Has a checkpoint of four tensors: a large tensor, its copy that may differ in
// the last byte, a scalar, and an empty tensor.
class CopyTensorsTest : public ::testing::Test {
 protected:
  void Store(bool same) {
    large_.resize(kRows * kColumns * 2);
    for (size_t i = 0; i < large_.size(); ++i) {
      large_[i] = static_cast<std::byte>(i * 31 + i / 1000);
    }
    std::vector<std::byte> twin = large_;
    if (!same) twin.back() ^= std::byte{1};
    const std::vector<std::byte> scalar(4, std::byte{7});
    (void)folder_.Write(
        "model.safetensors",
        WriteSafetensors(
            {{"large", {ScalarType::kBf16, {kRows, kColumns}, large_}},
             {"twin", {ScalarType::kBf16, {kRows, kColumns}, twin}},
             {"scalar", {ScalarType::kF32, {}, scalar}},
             {"none", {ScalarType::kF32, {0, 3}, {}}}}));
    checkpoint_ = *Checkpoint::Open(folder_.path());
  }

  DiskTensor Find(const std::string& name) { return *checkpoint_->Find(name); }

  std::string Path() { return folder_.path() + "/out.safetensors"; }

  absl::Status Copy(const std::vector<CopiedTensor>& tensors) {
    return CopyTensors(tensors, Path(),
                       [this](int64_t bytes) { copied_ += bytes; });
  }

  TempFolder folder_;
  std::vector<std::byte> large_;
  std::unique_ptr<Checkpoint> checkpoint_;
  int64_t copied_ = 0;
};

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(CopyTensorsTest, WritesBytesNamesAndShapes) {
  Store(/*same=*/true);
  ASSERT_THAT(Copy({{"s", Find("scalar"), {}},
                    {"w", Find("large"), Find("twin")},
                    {"n", Find("none"), {}}}),
              IsOk());
  const std::string file = Contents(Path());
  const auto tensors = ParseSafetensors(file).value();
  ASSERT_EQ(tensors.size(), 3);
  EXPECT_EQ(tensors.at("w").bytes, large_);
  EXPECT_EQ(tensors.at("w").dtype, ScalarType::kBf16);
  EXPECT_EQ(tensors.at("w").shape, (std::vector<int64_t>{kRows, kColumns}));
  EXPECT_TRUE(tensors.at("s").shape.empty());
  EXPECT_EQ(tensors.at("n").shape, (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(copied_, static_cast<int64_t>(large_.size()) + 4);
  EXPECT_EQ(
      std::distance(std::filesystem::directory_iterator(folder_.path()), {}),
      2);
}

TEST_F(CopyTensorsTest, RefusesATwinThatDiffersAndLeavesWhatWasThere) {
  Store(/*same=*/false);
  (void)folder_.Write("out.safetensors", "old");
  EXPECT_THAT(Copy({{"w", Find("large"), Find("twin")}}),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "tensor 'large' differs from tensor 'twin'"));
  EXPECT_THAT(Copy({{"w", Find("large"), Find("scalar")}}),
              IsStatus(absl::StatusCode::kInvalidArgument, "differs"));
  EXPECT_EQ(Contents(Path()), "old");
  EXPECT_EQ(
      std::distance(std::filesystem::directory_iterator(folder_.path()), {}),
      2);
}

TEST_F(CopyTensorsTest, NamesAPathThatCannotBeWritten) {
  Store(/*same=*/true);
  EXPECT_THAT(CopyTensors({}, folder_.path() + "/none/x", [](int64_t) {}),
              IsStatus(absl::StatusCode::kNotFound, "/none/x.partial."));
  EXPECT_THAT(ReplaceFile("/proc/x", "text"), testing::Not(IsOk()));
}

TEST_F(CopyTensorsTest, ReplacesASmallFile) {
  const std::string path = folder_.Write("config.json", "old and long");
  ASSERT_THAT(ReplaceFile(path, "new"), IsOk());
  EXPECT_EQ(Contents(path), "new");
}

}  // namespace
}  // namespace weft::weights
