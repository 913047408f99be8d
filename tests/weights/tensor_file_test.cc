#include "src/weights/tensor_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "src/weights/safetensors.h"
#include "src/weights/torch_bin.h"
#include "tests/weights/files.h"
#include "tests/weights/torch_files.h"

namespace weft::weights::tensor_file_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A format, and a file of that format with one tensor "w" of U8: 3 rows of 2,
// with the values 012345.
struct Format {
  std::string name;
  DirectoryReader read_directory;
  std::string file;
};

const TestTensor kTensor = {.shape = {3, 2},
                            .strides = {2, 1},
                            .storage_elements = 6,
                            .type = "ByteStorage"};

std::string BinOf(const TestTensor& tensor) {
  return TorchFile(Pickle(DictOf({{"w", Tensor(tensor)}})), {{"0", "012345"}});
}

std::vector<Format> Formats() {
  return {{"Safetensors", ReadSafetensorsDirectory,
           RawFile(R"({"w":{"dtype":"U8","shape":[3,2],"data_offsets":[0,6]}})",
                   0) +
               "012345"},
          {"Bin", ReadTorchDirectory, BinOf(kTensor)}};
}

absl::StatusOr<std::string> Rows(const TensorFile& file, int64_t begin,
                                 int64_t end) {
  std::string rows(static_cast<size_t>(2 * (end - begin)), ' ');
  const absl::Status read =
      DiskTensor(file, *file.tensors().begin())
          .Read({.first_row = begin, .num_rows = end - begin, .num_bytes = 2},
                absl::MakeSpan(reinterpret_cast<std::byte*>(rows.data()),
                               rows.size()));
  if (!read.ok()) return read;
  return rows;
}

class TensorFileOf : public ::testing::TestWithParam<Format> {
 protected:
  absl::StatusOr<std::unique_ptr<TensorFile>> Open() {
    return TensorFile::Open(folder_.Write("file", GetParam().file),
                            GetParam().read_directory);
  }
  TempFolder folder_;
};

TEST_P(TensorFileOf, ReadsRowsWhereTheyLie) {
  const auto file = Open().value();
  EXPECT_EQ(*Rows(*file, 0, 3), "012345");
  EXPECT_EQ(*Rows(*file, 1, 2), "23");
  EXPECT_EQ(*Rows(*file, 2, 3), "45");
  EXPECT_EQ(*Rows(*file, 3, 3), "");
}

TEST_P(TensorFileOf, DescribesItsTensors) {
  const auto file = Open().value();
  const DiskTensor tensor(*file, *file->tensors().begin());
  EXPECT_EQ(tensor.name(), "w");
  EXPECT_EQ(tensor.dtype(), ScalarType::kU8);
  EXPECT_THAT(tensor.shape(), ElementsAre(3, 2));
  EXPECT_EQ(tensor.num_rows(), 3);
  EXPECT_EQ(tensor.row_bytes(), 2u);
}

TEST_P(TensorFileOf, SaysSoWhenItWasCutShortSince) {
  const auto file = Open().value();
  std::filesystem::resize_file(file->path(), 40);
  const auto rows = Rows(*file, 0, 3);
  EXPECT_EQ(rows.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(rows.status().message()),
              HasSubstr(file->path() + ": tensor 'w': ended at byte "));
}

TEST_P(TensorFileOf, RefusesRowsThatItLacks) {
  const auto file = Open().value();
  EXPECT_EQ(Rows(*file, 1, 4).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Rows(*file, -1, 0).status().code(), absl::StatusCode::kInternal);
}

TEST_P(TensorFileOf, NamesTheFileItRefuses) {
  const auto missing =
      TensorFile::Open(folder_.path() + "/none", GetParam().read_directory);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  for (const char* contents : {"", "short"}) {
    const std::string path = folder_.Write("bad", contents);
    const auto bad = TensorFile::Open(path, GetParam().read_directory);
    EXPECT_FALSE(bad.ok());
    EXPECT_THAT(std::string(bad.status().message()), HasSubstr(path));
  }
}

TEST_P(TensorFileOf, RefusesFoldersAndFifosWithoutWaiting) {
  const std::string fifo = folder_.path() + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {folder_.path(), fifo}) {
    EXPECT_EQ(TensorFile::Open(path, GetParam().read_directory).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, TensorFileOf, ::testing::ValuesIn(Formats()),
                         [](const auto& format) { return format.param.name; });

TEST(TensorFile, ListsTransposedTensorsAndRefusesToReadThem) {
  TestTensor transposed = kTensor;
  transposed.strides = {1, 3};
  const TempFolder folder;
  const auto file = TensorFile::Open(folder.Write("m.bin", BinOf(transposed)),
                                     ReadTorchDirectory)
                        .value();
  const auto rows = Rows(*file, 0, 1);
  EXPECT_EQ(rows.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(rows.status().message()),
              HasSubstr("m.bin: tensor 'w' is not stored row by row"));
}

TEST(TensorFile, ReadsScalarsAndEmptyTensors) {
  const TempFolder folder;
  const auto file =
      TensorFile::Open(
          folder.Write("t",
                       RawFile(R"({"e":{"dtype":"U8","shape":[0,2],)"
                               R"("data_offsets":[0,0]},"s":{"dtype":"U8",)"
                               R"("shape":[],"data_offsets":[0,1]}})",
                               1)),
          ReadSafetensorsDirectory)
          .value();
  const DiskTensor empty(*file, *file->tensors().find("e"));
  EXPECT_EQ(empty.row_bytes(), 0u);
  EXPECT_THAT(empty.Read({}, {}), absl::OkStatus());
  const DiskTensor scalar(*file, *file->tensors().find("s"));
  std::byte value{1};
  EXPECT_TRUE(
      scalar.Read({.num_rows = 1, .num_bytes = 1}, absl::MakeSpan(&value, 1))
          .ok());
  EXPECT_EQ(value, std::byte{0});
}

}  // namespace
}  // namespace weft::weights::tensor_file_test
