#include "src/weights/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/processor_time.h"
#include "tests/support/sanitizer_slowdown.h"
#include "tests/weights/files.h"
#include "tests/weights/torch_files.h"

namespace weft::weights::safetensors_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string ManyMetadataKeys(int count) {
  std::string header = "{\"__metadata__\":{";
  for (int i = 0; i < count; ++i) {
    header += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"\"";
  }
  return header + "}}";
}

struct BadFile {
  std::string name;
  std::string file;
  absl::StatusCode code;
  std::string message;
};

void PrintTo(const BadFile& bad, std::ostream* stream) { *stream << bad.name; }

std::string OneTensor(const std::string& fields) {
  return absl::StrCat(R"({"t":{)", fields, "}}");
}

std::string ManyTensors(int count) {
  std::string header = "{";
  for (int i = 0; i < count; ++i) {
    absl::StrAppend(&header, i == 0 ? "" : ",", "\"", i,
                    R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})");
  }
  return header + "}";
}

std::vector<BadFile> BadFiles() {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  constexpr auto kLost = absl::StatusCode::kDataLoss;
  const std::string two =
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
      R"("b":{"dtype":"F32","shape":[1],"data_offsets":)";
  return {
      {"Empty", "", kLost, "0 bytes"},
      {"SevenBytes", "1234567", kLost, "7 bytes"},
      {"HeaderOverLimit", RawFile("{}", 0).replace(0, 8, 8, '\xff'), kBad,
       "limit 100000000"},
      {"HeaderBeyondFile", RawFile("{}", 0).substr(0, 9), kLost,
       "the file only 1"},
      {"HeaderOneOverLimit",
       RawFile("{}", 0).replace(0, 8, Le(kMaxHeaderBytes + 1, 8)), kBad,
       "100000001 bytes > limit 100000000"},
      {"HeaderAtLimit", RawFile("{}", 0).replace(0, 8, Le(kMaxHeaderBytes, 8)),
       kLost, "100000000 bytes, the file only 2"},
      {"HeaderOneBeyondFile", RawFile("{}", 0).replace(0, 8, Le(3, 8)), kLost,
       "3 bytes, the file only 2"},
      {"EmptyHeader", RawFile("", 0), kBad, "start with '{'"},
      {"LeadingSpace", RawFile(" {}", 0), kBad, "start with '{'"},
      {"NotAnObject", RawFile("[]", 0), kBad, "start with '{'"},
      {"CutOffJson", RawFile("{\"t\":", 0), kBad, "not JSON"},
      {"TwoObjects", RawFile("{}{}", 0), kBad, "not JSON"},
      {"NulByte", RawFile(std::string("{}\0x", 4), 0), kBad, "NUL"},
      {"BadUtf8Name", RawFile("{\"\xff\":{}}", 0), kBad, "not JSON in UTF-8"},
      {"NotAscii", RawFile("{\"\xc3\xa9\":{}}", 0), kBad, "not ASCII"},
      {"LoneSurrogate", RawFile(R"({"\ud800":{}})", 0), kBad, "not JSON"},
      {"NumberForTensor", RawFile(R"({"t":1})", 0), kBad, "'t' has the number"},
      {"ListForTensor", RawFile(R"({"t":[]})", 0), kBad, "'t' has an array"},
      {"NullForTensor", RawFile(R"({"t":null})", 0), kBad, "'t' has null"},
      {"NoName", RawFile(R"({"":{}})", 0), kBad, "without a name"},
      {"ControlCharacter", RawFile(R"({"a\nb":{}})", 0), kBad,
       "'a\\nb' has a control character"},
      {"LongName", RawFile("{\"" + std::string(513, 'n') + "\":{}}", 0), kBad,
       "513 bytes > limit 512"},
      {"NoFields", RawFile(OneTensor(""), 0), kBad, "needs dtype, shape"},
      {"NoOffsets", RawFile(OneTensor(R"("dtype":"U8","shape":[])"), 0), kBad,
       "needs dtype, shape"},
      {"UnknownField", RawFile(OneTensor(R"("stride":[1])"), 0), kBad,
       "unknown field 'stride'"},
      {"UnsupportedDtype", RawFile(OneTensor(R"("dtype":"F8_E4M3")"), 0), kBad,
       "unsupported dtype 'F8_E4M3'"},
      {"DtypeNumber", RawFile(OneTensor(R"("dtype":4)"), 0), kBad,
       "out of place"},
      {"DtypeTwice", RawFile(OneTensor(R"("dtype":"U8","dtype":"U8")"), 0),
       kBad, "dtype twice"},
      {"ShapeTwice", RawFile(OneTensor(R"("shape":[],"shape":[])"), 0), kBad,
       "shape twice"},
      {"OffsetsTwice",
       RawFile(OneTensor(R"("data_offsets":[0,0],"data_offsets":[0,0])"), 0),
       kBad, "data_offsets twice"},
      {"NegativeSize", RawFile(OneTensor(R"("shape":[-1])"), 0), kBad, "< 0"},
      {"FractionalSize", RawFile(OneTensor(R"("shape":[1.5])"), 0), kBad,
       "not an integer"},
      {"SizeBeyond64Bits",
       RawFile(OneTensor(R"("shape":[18446744073709551616])"), 0), kBad,
       "not an integer"},
      {"NestedShape", RawFile(OneTensor(R"("shape":[[1]])"), 0), kBad,
       "array out of place"},
      {"DeepNesting",
       RawFile(R"({"t":{"shape":)" + std::string(100'000, '['), 0), kBad,
       "array out of place"},
      {"RankNine", RawFile(OneTensor(R"("shape":[1,1,1,1,1,1,1,1,1])"), 0),
       kBad, "more than 8 dimensions"},
      {"OneOffset", RawFile(OneTensor(R"("data_offsets":[0])"), 0), kBad,
       "two data_offsets"},
      {"ThreeOffsets", RawFile(OneTensor(R"("data_offsets":[0,0,0])"), 0), kBad,
       "out of place"},
      {"BackwardsOffsets",
       RawFile(OneTensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])"),
               1),
       kBad, "backwards"},
      {"OffsetBeyond64Bits",
       RawFile(OneTensor(R"("data_offsets":[0,18446744073709551616])"), 0),
       kBad, "not an integer"},
      {"NegativeOffset", RawFile(OneTensor(R"("data_offsets":[-1,0])"), 0),
       kBad, "the number -1 < 0"},
      {"OffsetsWrapAround",
       RawFile(OneTensor(R"("dtype":"U8","shape":[2],)"
                         R"("data_offsets":[18446744073709551615,1])"),
               2),
       kBad, "backwards"},
      {"LargestOffsets",
       RawFile(OneTensor(R"("dtype":"U8","shape":[1],"data_offsets":)"
                         R"([18446744073709551614,18446744073709551615])"),
               1),
       kBad, "hole that starts at 0"},
      {"EndBeyondFile",
       RawFile(OneTensor(R"("dtype":"U8","shape":[9223372036854775807],)"
                         R"("data_offsets":[0,9223372036854775807])"),
               1),
       kLost, "byte 9223372036854775807 of 1"},
      {"BytesOverflowByDtype",
       RawFile(OneTensor(R"("dtype":"F64","shape":[2305843009213693952],)"
                         R"("data_offsets":[0,0])"),
               0),
       kBad, "2^63"},
      {"EmptyTensorWithBytes",
       RawFile(OneTensor(R"("dtype":"U8","shape":[0],"data_offsets":[0,1])"),
               1),
       kBad, "1 bytes by its data_offsets and 0"},
      {"EmptyTensorInAHole",
       RawFile(OneTensor(R"("dtype":"U8","shape":[0],"data_offsets":[1,1])"),
               1),
       kBad, "hole that starts at 0"},
      {"ShapeDisagrees",
       RawFile(OneTensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"),
               4),
       kBad, "4 bytes by its data_offsets and 8"},
      {"ShapeOverflows",
       RawFile(OneTensor(R"("dtype":"F32","shape":[4294967296,4294967296],)"
                         R"("data_offsets":[0,0])"),
               0),
       kBad, "2^63"},
      {"ZeroHidesOverflow",
       RawFile(OneTensor(R"("dtype":"U8","shape":[0,9223372036854775808],)"
                         R"("data_offsets":[0,0])"),
               0),
       kBad, "2^63"},
      {"KeyTwice",
       RawFile(R"({"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
               R"("t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
               0),
       kBad, "'t' is there twice"},
      {"Overlap", RawFile(two + "[2,6]}}", 6), kBad, "inside the tensor"},
      {"SameBytesTwice", RawFile(two + "[0,4]}}", 4), kBad,
       "inside the tensor"},
      {"Hole", RawFile(two + "[8,12]}}", 12), kBad, "hole that starts at 4"},
      {"HoleAtStart",
       RawFile(OneTensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])"),
               2),
       kBad, "hole that starts at 0"},
      {"Truncated", RawFile(two + "[4,8]}}", 7), kLost, "byte 8 of 7"},
      {"TrailingByte", RawFile(two + "[4,8]}}", 9), kBad,
       "1 bytes after the last tensor"},
      {"DataWithoutTensors", RawFile("{}", 1), kBad, "after the last tensor"},
      {"MetadataNumber", RawFile(R"({"__metadata__":{"a":1}})", 0), kBad,
       "'__metadata__' has the number"},
      {"MetadataObject", RawFile(R"({"__metadata__":{"a":{}}})", 0), kBad,
       "object inside a value"},
      {"MetadataKeyTwice", RawFile(R"({"__metadata__":{"a":"","a":""}})", 0),
       kBad, "metadata key twice"},
      {"MetadataTwice", RawFile(R"({"__metadata__":{},"__metadata__":{}})", 0),
       kBad, "twice"},
      {"MetadataList", RawFile(R"({"__metadata__":{"a":[]}})", 0), kBad,
       "'__metadata__' has an array"},
      {"MetadataNull", RawFile(R"({"__metadata__":{"a":null}})", 0), kBad,
       "'__metadata__' has null"},
      {"ManyMetadataKeys", RawFile(ManyMetadataKeys(10'001), 0), kBad,
       "more than 10000 metadata keys"},
      {"BadUtf8Metadata", RawFile("{\"__metadata__\":{\"a\":\"\xc3(\"}}", 0),
       kBad, "not JSON in UTF-8"}};
}

void ExpectRefused(const BadFile& bad) {
  const ProcessorTime time;
  const auto tensors = ParseSafetensors(bad.file);
  EXPECT_LT(time.Seconds(), 1);
  EXPECT_EQ(tensors.status().code(), bad.code);
  EXPECT_THAT(std::string(tensors.status().message()), HasSubstr(bad.message));
  // A file on disk gives the same result.
  const TempFolder folder;
  const auto file = RegularFile::Open(folder.Write("t", bad.file)).value();
  EXPECT_EQ(ReadSafetensorsDirectory(file).status(), tensors.status());
}

class HostileSafetensors : public ::testing::TestWithParam<BadFile> {};

TEST_P(HostileSafetensors, IsRefusedByNameWithinASecond) {
  ExpectRefused(GetParam());
}

// These large files are not test parameters, because parameters are made again
// for each test.
TEST(HostileLargeSafetensors, IsRefusedByNameWithinASecond) {
  constexpr int kTooMany = static_cast<int>(kMaxTensors) + 1;
  for (const int count :
       {kTooMany, std::max(kTooMany, 1'000'000 / kSanitizerSlowdown)}) {
    ExpectRefused({"ManyTensors", RawFile(ManyTensors(count), 0),
                   absl::StatusCode::kInvalidArgument, "limit of 100000"});
  }
}

INSTANTIATE_TEST_SUITE_P(Files, HostileSafetensors,
                         ::testing::ValuesIn(BadFiles()),
                         [](const auto& file) { return file.param.name; });

TEST(ParseSafetensors, RefusesEveryTruncationOfAGoodFile) {
  const std::string file = RawFile(
      OneTensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 8);
  ASSERT_TRUE(ParseSafetensors(file).ok());
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_FALSE(ParseSafetensors(file.substr(0, size)).ok()) << size;
  }
}

TEST(ParseSafetensors, AcceptsScalarsEmptyTensorsAndPadding) {
  const auto tensors =
      ParseSafetensors(
          RawFile(
              R"({"scalar":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
              R"("empty":{"dtype":"F16","shape":[0,3],"data_offsets":[8,8]}}    )",
              8))
          .value();
  EXPECT_EQ(tensors.at("scalar").num_elements(), 1u);
  EXPECT_THAT(tensors.at("empty").shape, ElementsAre(0, 3));
}

TEST(WriteSafetensors, ComesBackAsItWas) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<uint8_t> b = {7};
  const auto bytes_of = [](const auto& values) {
    return absl::MakeConstSpan(
        reinterpret_cast<const std::byte*>(values.data()),
        values.size() * sizeof(values[0]));
  };
  const std::vector<NamedTensor> tensors = {
      {"z \"quoted\" \\",
       {.dtype = ScalarType::kF32, .shape = {2, 3}, .bytes = bytes_of(a)}},
      {"a", {.dtype = ScalarType::kU8, .shape = {1}, .bytes = bytes_of(b)}}};
  const std::string file = WriteSafetensors(tensors);
  EXPECT_EQ(file, WriteSafetensors(tensors));
  EXPECT_THAT(file, HasSubstr(R"("__metadata__":{"format":"pt"})"));
  const auto read = ParseSafetensors(file).value();
  ASSERT_EQ(read.size(), 2u);
  const TensorView& view = read.at("z \"quoted\" \\");
  EXPECT_THAT(view.shape, ElementsAre(2, 3));
  EXPECT_EQ(view.bytes, bytes_of(a));
  EXPECT_EQ(read.at("a").bytes, bytes_of(b));
}

}  // namespace
}  // namespace weft::weights::safetensors_test
