#include "src/weights/torch_bin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "src/weights/zip_directory.h"
#include "tests/support/memory_file.h"
#include "tests/support/processor_time.h"
#include "tests/weights/torch_files.h"

namespace weft::weights::torch_bin_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kLocal[] = "PK\3\4";
constexpr char kCentral[] = "PK\1\2";
constexpr char kEnd64[] = "PK\6\6";
constexpr char kLocator[] = "PK\6\7";
constexpr char kEnd[] = "PK\5\6";

const TestTensor kTensor = {
    .shape = {2, 3}, .strides = {3, 1}, .storage_elements = 6};

absl::StatusOr<TensorDirectory> Directory(const std::string& contents) {
  const MemoryFile memory(contents);
  const auto file = RegularFile::Open(memory.path());
  if (!file.ok()) return file.status();
  return ReadTorchDirectory(*file);
}

// Returns a file with one tensor. Its storage always has 24 bytes, whatever the
// tensor declares.
std::string FileOf(const TestTensor& tensor) {
  return TorchFile(Pickle(DictOf({{"t", Tensor(tensor)}})),
                   {{"0", std::string(24, 'x')}});
}
const std::string& GoodFile() {
  static const std::string file = FileOf(kTensor);
  return file;
}

TEST(ReadTorchDirectory, FindsTensorsInTheirStorages) {
  const TestTensor view = {.shape = {2},
                           .strides = {1},
                           .storage = "half",
                           .storage_elements = 5,
                           .offset = 3,
                           .type = "HalfStorage"};
  const std::string file = TorchFile(
      Pickle(DictOf({{"a", Parameter(kTensor)}, {"b", Tensor(view)}})),
      {{"0", std::string(24, 'a')}, {"half", "0123456789"}});
  const auto tensors = Directory(file).value();
  const StoredTensor& b = tensors.at("b");
  EXPECT_EQ(b.dtype, ScalarType::kF16);
  EXPECT_THAT(b.shape, ElementsAre(2));
  EXPECT_EQ(file.substr(b.offset, b.size_bytes), "6789");
  const StoredTensor& a = tensors.at("a");
  EXPECT_EQ(file.substr(a.offset, a.size_bytes), std::string(24, 'a'));
}

TEST(ReadTorchDirectory, LetsTensorsShareAStorage) {
  const TestTensor part = {
      .shape = {3}, .strides = {1}, .storage_elements = 6, .offset = 3};
  const auto tensors =
      Directory(TorchFile(Pickle(DictOf({{"head", Tensor(kTensor)},
                                         {"embedding", Tensor(kTensor)},
                                         {"part", Tensor(part)}})),
                          {{"0", std::string(24, 'x')}}))
          .value();
  EXPECT_EQ(tensors.at("head").offset, tensors.at("embedding").offset);
  EXPECT_EQ(tensors.at("part").offset, tensors.at("head").offset + 12);
}

TEST(ReadTorchDirectory, TellsRowMajorTensorsFromOthers) {
  const struct {
    std::vector<int64_t> shape, strides;
    bool row_major;
  } cases[] = {{{}, {}, true},
               {{6}, {1}, true},
               {{2, 3}, {3, 1}, true},
               {{1, 6}, {0, 1}, true},
               {{2, 1, 3}, {3, 9, 1}, true},
               {{0, 9}, {1, 7}, true},
               {{3, 2}, {1, 3}, false},
               {{3}, {2}, false},
               {{4}, {0}, false},
               {{2, 2}, {3, 1}, false}};
  for (const auto& [shape, strides, row_major] : cases) {
    TestTensor tensor = kTensor;
    tensor.shape = shape;
    tensor.strides = strides;
    const auto tensors = Directory(FileOf(tensor)).value();
    EXPECT_EQ(tensors.at("t").row_major, row_major)
        << ShapeString(shape) << ShapeString(strides);
  }
}

// Returns a valid file whose storage has its size in a zip64 field of
// `field_bytes` bytes.
std::string Zip64Storage(uint16_t field_bytes) {
  const std::string field = Le(1, 2) + Le(field_bytes, 2) +
                            (Le(24, 8) + Le(24, 8)).substr(0, field_bytes);
  const std::string name = "m/data/0";
  // Zip() writes the field as the end of the name. The lengths that Patch()
  // writes then make it an extra field after the name.
  const std::string lengths = Le(name.size(), 2) + Le(field.size(), 2);
  std::string file =
      Zip({{"m/data.pkl", Pickle(DictOf({{"t", Tensor(kTensor)}}))},
           {name + field, std::string(24, 'x')}});
  file = Patch(file, kLocal, 1, 26, lengths);
  file = Patch(file, kCentral, 1, 28, lengths);
  return Patch(file, kCentral, 1, 20, Le(~0ull, 8));
}

TEST(ReadTorchDirectory, ReadsZip64Sizes) {
  const std::string file = Zip64Storage(16);
  const auto tensors = Directory(file).value();
  EXPECT_EQ(file.substr(tensors.at("t").offset, 24), std::string(24, 'x'));
}

TEST(ReadTorchDirectory, AcceptsArchivesOfOtherWriters) {
  const ZipItems items = {
      {"m/data.pkl", Pickle(DictOf({{"t", Tensor(kTensor)}}))},
      {"m/data/0", std::string(24, 'x')},
      {"m/version", "3\n"}};
  EXPECT_TRUE(Directory(Zip(items, /*zip64=*/false)).ok());
  // torch can be set to leave out the checksum.
  EXPECT_TRUE(Directory(Patch(Zip(items), "PK\1\2", 0, 16, Le(0, 4))).ok());
}

struct BadFile {
  std::string name;
  std::string file;
  std::string message;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

void PrintTo(const BadFile& bad, std::ostream* stream) { *stream << bad.name; }

constexpr auto kLost = absl::StatusCode::kDataLoss;
// Returns files that are not archives, or that have damaged ends.
std::vector<BadFile> BadEnds() {
  const auto old = absl::StatusCode::kUnimplemented;
  const std::string& good = GoodFile();
  const size_t local_bytes = good.find(kCentral);
  return {
      {"Empty", "", "not a zip archive"},
      {"Text", "version https://git-lfs", "not a zip archive"},
      {"OldPickle", "\x80\x02\x8a\x0a" + std::string(300, 'l'),
       "old format (a bare pickle)", old},
      {"OldTar", std::string(257, 'x') + "ustar ", "old format (a tar archive)",
       old},
      {"OnlyASignature", kLocal, "zip archive is cut", kLost},
      {"CutInTheMiddle", good.substr(0, good.size() / 2),
       "does not end with its directory", kLost},
      {"Commented", Patch(good, kEnd, 0, 20, Le(1, 2)) + "x",
       "does not end with its directory", kLost},
      {"BytesAfterTheEnd", good + "x", "does not end with", kLost},
      {"SplitOverDisks", Patch(good, kEnd, 0, 4, Le(1, 2)), "split over disks"},
      {"SplitByEntries", Patch(good, kEnd, 0, 8, Le(1, 2)), "split over disks"},
      {"Zip64Split", Patch(good, kEnd64, 0, 16, Le(1, 4)), "split over disks"},
      {"Zip64SplitByEntries", Patch(good, kEnd64, 0, 24, Le(1, 8)),
       "split over disks"},
      {"LocatorSplit", Patch(good, kLocator, 0, 16, Le(2, 4)),
       "split over disks"},
      {"LocatorElsewhere", Patch(good, kLocator, 0, 8, Le(0, 8)),
       "zip64 end record out of place"},
      {"LocatorBeyondTheFile", Patch(good, kLocator, 0, 8, Le(~0ull, 8)),
       "zip64 end record out of place"},
      {"Zip64EndDamaged", Patch(good, kEnd64, 0, 0, "XX"),
       "damaged zip64 end record"},
      {"Zip64EndTooLong", Patch(good, kEnd64, 0, 4, Le(~0ull, 8)),
       "damaged zip64 end record"},
      {"EndsDisagree", Patch(good, kEnd64, 0, 40, Le(7, 8)),
       "two end records that disagree"},
      {"DirectoryBeyondTheEnd",
       Patch(Patch(good, kEnd64, 0, 40, Le(~0ull, 8)), kEnd, 0, 12,
             Le(0xffffffff, 4)),
       "does not end at byte"},
      {"DirectoryElsewhere",
       Patch(Patch(good, kEnd64, 0, 48, Le(4, 8)), kEnd, 0, 16, Le(4, 4)),
       "at byte 4, which does not end at byte"},
      {"TooManyEntries",
       Patch(Patch(good, kEnd, 0, 8, Le(0xffffffff, 4)), kEnd64, 0, 24,
             Le(200'001, 8) + Le(200'001, 8)),
       "200001 entries"},
      {"MoreEntriesThanDirectory",
       Patch(Patch(good, kEnd, 0, 8, Le(0x00040004, 4)), kEnd64, 0, 24,
             Le(4, 8) + Le(4, 8)),
       "damaged directory"},
      {"FewerEntriesThanDirectory",
       Patch(Patch(good, kEnd, 0, 8, Le(0x00020002, 4)), kEnd64, 0, 24,
             Le(2, 8) + Le(2, 8)),
       "bytes after its last directory entry"},
      {"BytesInserted",
       good.substr(0, local_bytes) + "x" + good.substr(local_bytes),
       "zip64 end record out of place"}};
}

// Returns files with damaged entries.
std::vector<BadFile> BadEntries() {
  const std::string& good = GoodFile();
  const ZipItems twice = {{"m/data.pkl", "a"}, {"m/data.pkl", "a"}};
  // The entry ends inside the next entry's header.
  const size_t too_long = good.find(kLocal, 1) + 4 - good.find("\x80\x02");
  const std::string saturated = Patch(good, kCentral, 0, 24, Le(~0u, 4));
  return {
      {"CentralSignature", Patch(good, kCentral, 1, 0, "XX"),
       "damaged directory"},
      {"Encrypted", Patch(good, kCentral, 0, 8, Le(0x0809, 2)),
       "'m/data.pkl' is encrypted"},
      {"UnknownFlags", Patch(good, kCentral, 0, 8, Le(0x2808, 2)),
       "unknown flags 10248"},
      {"OnAnotherDisk", Patch(good, kCentral, 0, 34, Le(1, 2)),
       "is on another disk"},
      {"Compressed", Patch(good, kCentral, 2, 10, Le(8, 2)),
       "'m/data/0' is compressed (method 8)"},
      {"StoredInFewerBytes", Patch(good, kCentral, 2, 20, Le(4, 4)),
       "'m/data/0' is compressed"},
      {"NameBeyondDirectory", Patch(good, kCentral, 2, 28, Le(0xffff, 2)),
       "damaged directory"},
      {"Zip64SizeMissing", saturated, "damaged extra field"},
      {"Zip64SizeCut", Zip64Storage(8), "zip64 field that is too short"},
      {"HeaderBeyondData", Patch(good, kCentral, 0, 42, Le(0x7fffffff, 4)),
       "starts at byte 2147483647, beyond the data", kLost},
      {"LocalSignature", Patch(good, kLocal, 1, 0, "XX"),
       "'m/byteorder' has a local header that disagrees"},
      {"LocalFlags", Patch(good, kLocal, 0, 6, Le(0, 2)), "local header"},
      {"LocalMethod", Patch(good, kLocal, 0, 8, Le(8, 2)), "local header"},
      {"LocalSize", Patch(good, kLocal, 0, 22, Le(1, 4)), "local header"},
      {"LocalChecksum", Patch(good, kLocal, 0, 14, Le(1, 4)), "local header"},
      {"LocalName", Patch(good, kLocal, 2, 30, "q"), "local header"},
      {"LocalNameLength", Patch(good, kLocal, 2, 26, Le(3, 2)), "local header"},
      {"LocalExtraBeyondData", Patch(good, kLocal, 2, 28, Le(0xffff, 2)),
       "do not fit before the directory", kLost},
      {"SizeBeyondData",
       Patch(good, kCentral, 2, 20, Le(9999, 4) + Le(9999, 4)),
       "9999 bytes, which do not fit", kLost},
      {"SameBytesTwice",
       Patch(Zip({{"m/data.pkl", "a"}, {"m/data.pkl", "a"}}), kCentral, 1, 42,
             Le(0, 4)),
       "'m/data.pkl' is there twice"},
      {"Overlap",
       Patch(good, kCentral, 0, 20, Le(too_long, 4) + Le(too_long, 4)),
       "'m/byteorder' overlaps the entry before"},
      {"NameTwice", Zip(twice), "'m/data.pkl' is there twice"}};
}

// Returns archives that have the right form, but the wrong contents.
std::vector<BadFile> BadContents() {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const std::string pickle = Pickle(DictOf({{"t", Tensor(kTensor)}}));
  const auto changed = [](auto&& change) {
    TestTensor tensor = kTensor;
    change(tensor);
    return FileOf(tensor);
  };
  return {{"NoPickle", Zip({{"m/x", "a"}}), "has no data.pkl"},
          {"NoEntries", Zip({}), "is not a zip archive"},
          {"PickleOutsideOfAFolder", Zip({{"/data.pkl", pickle}}),
           "outside of a folder"},
          {"TwoPickles", Zip({{"a/data.pkl", pickle}, {"b/data.pkl", pickle}}),
           "data.pkl twice"},
          {"BigEndian", Zip({{"m/data.pkl", pickle}, {"m/byteorder", "big"}}),
           "byteorder 'big', not little"},
          {"LongByteOrder",
           Zip({{"m/data.pkl", pickle}, {"m/byteorder", std::string(17, 'l')}}),
           "17 bytes > limit 16"},
          {"WrongChecksum", Patch(GoodFile(), kCentral, 0, 16, Le(1, 4)),
           "'m/data.pkl' fails its checksum", kLost},
          {"HostilePickle",
           TorchFile("\x80\x02"
                     "cposix\nsystem\n.",
                     {}),
           "names 'posix system'"},
          {"StorageMissing", TorchFile(pickle, {{"1", std::string(24, 'x')}}),
           "tensor 't' is in storage '0', which is missing"},
          {"StorageTooShort", TorchFile(pickle, {{"0", std::string(23, 'x')}}),
           "whose zip entry has 23 bytes"},
          {"StorageTooLong", TorchFile(pickle, {{"0", std::string(25, 'x')}}),
           "whose zip entry has 25 bytes"},
          {"StorageOverflows",
           changed([](TestTensor& t) { t.storage_elements = kMax; }),
           "storage of 9223372036854775807 elements"},
          {"StorageOfAnotherType",
           changed([](TestTensor& t) { t.type = "HalfStorage"; }),
           "6 elements of 2 bytes, whose zip entry has 24"},
          {"OneElementBeyond", changed([](TestTensor& t) { t.offset = 1; }),
           "tensor 't' reaches beyond the 6 elements"},
          {"OffsetOverflows", changed([](TestTensor& t) { t.offset = kMax; }),
           "reaches beyond"},
          {"StrideBeyond", changed([](TestTensor& t) {
             t.strides = {4, 1};
           }),
           "reaches beyond"},
          {"StrideOverflows", changed([](TestTensor& t) {
             t.strides = {kMax, kMax};
           }),
           "reaches beyond"},
          {"StridesWrapToNothing", changed([](TestTensor& t) {
             t.shape = {3, 3};
             t.strides = {kMax, 1};
           }),
           "reaches beyond"},
          {"ShapeOverflows", changed([](TestTensor& t) {
             t.shape = {int64_t{1} << 32, int64_t{1} << 32};
             t.strides = {0, 0};
           }),
           "2^63"},
          {"ZeroHidesOverflow", changed([](TestTensor& t) {
             t.shape = {kMax, 0};
           }),
           "2^63"},
          {"EmptyTensorBeyond", changed([](TestTensor& t) {
             t.shape = {0, 3};
             t.offset = 7;
           }),
           "reaches beyond"}};
}

class HostileTorchFile : public ::testing::TestWithParam<BadFile> {};

TEST_P(HostileTorchFile, IsRefusedByNameWithinASecond) {
  const ProcessorTime time;
  const auto tensors = Directory(GetParam().file);
  EXPECT_LT(time.Seconds(), 1);
  EXPECT_EQ(tensors.status().code(), GetParam().code);
  EXPECT_THAT(std::string(tensors.status().message()),
              HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(Ends, HostileTorchFile, ::testing::ValuesIn(BadEnds()),
                         [](const auto& bad) { return bad.param.name; });
INSTANTIATE_TEST_SUITE_P(Entries, HostileTorchFile,
                         ::testing::ValuesIn(BadEntries()),
                         [](const auto& bad) { return bad.param.name; });
INSTANTIATE_TEST_SUITE_P(Contents, HostileTorchFile,
                         ::testing::ValuesIn(BadContents()),
                         [](const auto& bad) { return bad.param.name; });

TEST(ReadTorchDirectory, RefusesEveryTruncation) {
  for (size_t size = 0; size < GoodFile().size(); ++size) {
    EXPECT_FALSE(Directory(GoodFile().substr(0, size)).ok()) << size;
  }
}

TEST(ReadTorchDirectory, NeverPlacesATensorOutsideOfTheFile) {
  // The file has no checksum, because a checksum would reveal the damage before
  // the pickle's checks do.
  const std::string good = Patch(GoodFile(), kCentral, 0, 16, Le(0, 4));
  ASSERT_TRUE(Directory(good).ok());
  for (size_t at = 0; at < good.size(); ++at) {
    for (const char bit : {'\x01', '\x80'}) {
      std::string damaged = good;
      damaged[at] = static_cast<char>(damaged[at] ^ bit);
      const auto tensors = Directory(damaged);
      if (!tensors.ok()) continue;
      for (const auto& [name, tensor] : *tensors) {
        EXPECT_LE(tensor.offset + tensor.size_bytes, good.size()) << at;
      }
    }
  }
}

}  // namespace
}  // namespace weft::weights::torch_bin_test
