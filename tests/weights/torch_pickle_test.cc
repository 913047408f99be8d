#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/weights/pickle_machine.h"
#include "src/weights/torch_bin.h"
#include "tests/support/processor_time.h"
#include "tests/weights/torch_files.h"

namespace weft::weights::torch_pickle_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

const TestTensor kTensor = {
    .shape = {2, 3}, .strides = {3, 1}, .storage_elements = 6};

std::string Repeat(int count, const std::string& text) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

// Returns a pickle of one tensor whose rebuild call has these arguments.
std::string Rebuild(const std::string& arguments) {
  return Pickle(DictOf(
      {{"t", "ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + "tR"}}));
}

TEST(ParseTorchPickle, ReadsTensorsAndParameters) {
  TestTensor half = {.shape = {4},
                     .strides = {1},
                     .storage = "seven",
                     .storage_elements = 9,
                     .offset = 5,
                     .type = "BFloat16Storage"};
  const auto tensors =
      ParseTorchPickle(
          Pickle(DictOf({{"b", Parameter(kTensor)}, {"a", Tensor(half)}})))
          .value();
  ASSERT_EQ(tensors.size(), 2u);
  const PickledTensor& a = tensors.at("a");
  EXPECT_EQ(a.dtype, ScalarType::kBf16);
  EXPECT_EQ(a.storage, "seven");
  EXPECT_EQ(a.storage_elements, 9u);
  EXPECT_EQ(a.offset, 5u);
  EXPECT_THAT(tensors.at("b").shape, ElementsAre(2, 3));
  EXPECT_THAT(tensors.at("b").strides, ElementsAre(3, 1));
}

TEST(ParseTorchPickle, KnowsEveryStorageType) {
  const std::pair<const char*, ScalarType> types[] = {
      {"Float", ScalarType::kF32},     {"Half", ScalarType::kF16},
      {"BFloat16", ScalarType::kBf16}, {"Double", ScalarType::kF64},
      {"Long", ScalarType::kI64},      {"Int", ScalarType::kI32},
      {"Short", ScalarType::kI16},     {"Char", ScalarType::kI8},
      {"Byte", ScalarType::kU8},       {"Bool", ScalarType::kBool}};
  for (const auto& [name, type] : types) {
    TestTensor tensor = kTensor;
    tensor.type = absl::StrCat(name, "Storage");
    const auto tensors =
        ParseTorchPickle(Pickle(DictOf({{"t", Tensor(tensor)}}))).value();
    EXPECT_EQ(tensors.at("t").dtype, type) << name;
  }
}

TEST(ParseTorchPickle, ReadsWhatAStateDictIsMadeOf) {
  // The OrderedDict is filled item by item. It has the attribute _metadata,
  // like a module's state dict.
  const std::string metadata =
      DictOf({{"_metadata", std::string(kNoHooks) + Str("") +
                                DictOf({{"version", "K\x01"},
                                        {"flags",
                                         "]\x88"
                                         "aN"
                                         "a"},
                                        {"scale", "G" + Le(0, 8)}}) +
                                "s"}});
  const auto tensors =
      ParseTorchPickle(Pickle(std::string(kNoHooks) + Str("t") +
                              Tensor(kTensor) + "s" + metadata + "b"))
          .value();
  EXPECT_EQ(tensors.count("t"), 1u);
}

TEST(ParseTorchPickle, ReadsProtocolFour) {
  const auto text = [](std::string_view value) {
    return "\x8c" + Le(value.size(), 1) + std::string(value) + "\x94";
  };
  const std::string zero = "\x8a" + Le(0, 1);  // LONG1 with no bytes.
  const std::string shape = "K\x02M" + Le(3, 2) + "\x86\x94";
  const std::string strides = "J" + Le(3, 4) + "\x8a\x01\x01\x86";
  const std::string program =
      "}\x94(\x8d" + Le(1, 8) + "t" + text("torch._utils") +
      text("_rebuild_tensor_v2") + "\x93\x94((" + text("storage") +
      text("torch") + text("FloatStorage") + "\x93\x94" + text("0") +
      text("cpu") + "K\x06tQ" + zero + shape + strides + "\x89" +
      text("collections") + text("OrderedDict") + "\x93)RtRu.";
  const auto tensors =
      ParseTorchPickle("\x80\x04\x95" + Le(program.size(), 8) + program)
          .value();
  EXPECT_EQ(tensors.at("t").offset, 0u);
  EXPECT_THAT(tensors.at("t").shape, ElementsAre(2, 3));
  EXPECT_THAT(tensors.at("t").strides, ElementsAre(3, 1));
}

TEST(ParseTorchPickle, ReadsTheMemo) {
  const std::string program = "}(" + Str("a") + "q" + Le(0, 1) +
                              Tensor(kTensor) + "r" + Le(1, 4) + Str("b") +
                              "j" + Le(1, 4) + "u";
  const auto tensors = ParseTorchPickle(Pickle(program)).value();
  EXPECT_EQ(tensors.count("a") + tensors.count("b"), 2u);
}

TEST(ParseTorchPickle, ReadsLongIntegersOfAnyWidth) {
  for (const int width : {1, 2, 5, 7, 8}) {
    const std::string two = "\x8a" + Le(width, 1) + Le(2, width);
    const auto tensors = ParseTorchPickle(
        Rebuild(StorageId(kTensor) + two + "))\x89" + kNoHooks));
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    EXPECT_EQ(tensors->at("t").offset, 2u);
  }
}

TEST(ParseTorchPickle, TakesADictThatHoldsItselfForWhatItIs) {
  const auto tensors = ParseTorchPickle(
      Pickle("}q" + Le(0, 1) + Str("self") + "h" + Le(0, 1) + "s"));
  EXPECT_THAT(std::string(tensors.status().message()),
              HasSubstr("'self', which is not a tensor"));
}

TEST(ParseTorchPickle, AcceptsAnEmptyDict) {
  const auto tensors = ParseTorchPickle(Pickle("}")).value();
  EXPECT_THAT(tensors, IsEmpty());
}

TEST(PickleOpcodeName, NamesKnownAndUnknownOpcodes) {
  EXPECT_EQ(PickleOpcodeName('i'), "INST");
  EXPECT_EQ(PickleOpcodeName(0x98), "READONLY_BUFFER");
  EXPECT_EQ(PickleOpcodeName(0xff), "0xff");
}

struct BadPickle {
  std::string name;
  std::string pickle;
  std::string message;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

void PrintTo(const BadPickle& bad, std::ostream* stream) {
  *stream << bad.name;
}

// Pickles that attack the PickleMachine itself.
std::vector<BadPickle> BadPrograms() {
  constexpr auto kLost = absl::StatusCode::kDataLoss;
  return {
      {"Empty", "", "pickle of 0 bytes has no STOP", kLost},
      {"NoProtocol", "}.", "opcode EMPTY_DICT at byte 0 is not the PROTO"},
      {"ProtocolOne", "\x80\x01}.", "has version 1; 2 to 5"},
      {"ProtocolSix", "\x80\x06}.", "has version 6"},
      {"ProtocolTwice", "\x80\x02\x80\x02}.", "PROTO at byte 2 is not at"},
      {"NoStop", "\x80\x02}", "has no STOP", kLost},
      {"NothingLeft", "\x80\x02.", "STOP at byte 2 leaves 0 values"},
      {"TwoValuesLeft", Pickle("}}"), "leaves 2 values"},
      {"MarkLeft", Pickle("}("), "leaves 1 values"},
      {"BytesAfterStop", Pickle("}") + "x", "has 1 bytes after it"},
      {"UnknownOpcode", Pickle("\xff"), "opcode 0xff at byte 2 has no place"},
      {"Instance", Pickle("(iposix\nsystem\n"), "INST at byte 3 has no place"},
      {"NewObject", Pickle("cposix\nx\n)\x81"), "GLOBAL at byte 2 names"},
      {"NewObjectOpcode", Pickle("})\x81"), "NEWOBJ at byte 4 has no place"},
      {"Extension", Pickle("\x82\x01"), "EXT1 at byte 2 has no place"},
      {"Pop", Pickle("}0"), "POP at byte 3 has no place"},
      {"Duplicate", Pickle("}2"), "DUP at byte 3 has no place"},
      {"Bytes", Pickle("C\x01x"), "SHORT_BINBYTES at byte 2 has no place"},
      {"Long4", Pickle("\x8b" + Le(1, 4) + "x"), "LONG4 at byte 2 has no"},
      {"LongOfNineBytes", Pickle("\x8a\x09" + Le(1, 8) + "x"),
       "integer of 9 bytes > 8"},
      {"CutInteger", "\x80\x02J\x01", "ends inside opcode BININT at byte 2",
       kLost},
      {"CutString", "\x80\x02X" + Le(9, 4) + "abc", "inside opcode BINUNICODE",
       kLost},
      {"CutGlobal",
       "\x80\x02"
       "ctorch\nFloat",
       "inside opcode GLOBAL", kLost},
      {"StringOf4GiB", Pickle("X" + Le(0xffffffff, 4)),
       "string of 4294967295 bytes > limit 4096"},
      {"StringOf2To63", Pickle("\x8d" + Le(uint64_t{1} << 63, 8)),
       "bytes > limit 4096"},
      {"FrameBeyondEnd", Pickle("\x95" + Le(100, 8) + "}"),
       "FRAME at byte 2 is longer"},
      {"EmptyStack", Pickle("s"), "SETITEM at byte 2 finds the stack empty"},
      {"StackEmptyAboveMark", Pickle("}(" + Str("a") + "s"),
       "finds the stack empty"},
      {"NoMark", Pickle("}u"), "SETITEMS at byte 3 finds no mark"},
      {"OddItems", Pickle("}(" + Str("a") + "u"), "key without a value"},
      {"SetItemOfATuple", Pickle(")" + Str("a") + "Ns"), "is for another type"},
      {"AppendToADict", Pickle("}Na"), "APPEND at byte 4 is for another type"},
      {"NumberAsKey", Pickle("}K\x01Ns"), "key that is not a string"},
      {"MemoGap", Pickle("}r" + Le(0xffffffff, 4)),
       "LONG_BINPUT at byte 3 skips to memo entry 4294967295 from 0"},
      {"MemoOfNothing", Pickle("\x94"), "MEMOIZE at byte 2 finds the stack"},
      {"MemoMissing", Pickle("h\x05"), "wants memo entry 5 of 0"},
      {"DeepStack", Pickle(Repeat(kMaxPickleStack + 1, "N")),
       "stack > limit 65536"},
      {"ManyMarks", Pickle(Repeat(kMaxPickleStack + 1, "(")),
       "MARK at byte 65538 is one more than 65536"}};
}

// Pickles that attack the objects that the PickleMachine builds.
std::vector<BadPickle> BadObjects() {
  TestTensor rank_nine = {.shape = std::vector<int64_t>(9, 1),
                          .strides = std::vector<int64_t>(9, 1)};
  TestTensor negative_size = {.shape = {-1}, .strides = {1}};
  TestTensor negative_stride = {.shape = {1}, .strides = {-1}};
  TestTensor negative_offset = {.shape = {1}, .strides = {1}, .offset = -1};
  TestTensor negative_storage = {.storage_elements = -1};
  const std::string id = StorageId(kTensor);
  const std::string zero = "K" + std::string(1, '\0');
  const std::string one_of = "ctorch\nFloatStorage\n";
  return {
      {"SystemCall", Pickle("cposix\nsystem\n(" + Str("true") + "tR"),
       "GLOBAL at byte 2 names 'posix system', which is neither"},
      {"SystemCallByStack", Pickle(Str("os") + Str("system") + "\x93"),
       "STACK_GLOBAL at byte 20 names 'os system'"},
      {"StackGlobalOfNumbers", Pickle("K\x01K\x01\x93"),
       "name that is not a string"},
      {"NewerTensor", Pickle("ctorch._utils\n_rebuild_tensor_v3\n"),
       "names 'torch._utils _rebuild_tensor_v3'"},
      {"QuantizedStorage", Pickle("ctorch\nQInt8Storage\n"),
       "names 'torch QInt8Storage'"},
      {"EscapedName", Pickle("c\x1b[2J\nx\n"), "names '\\x1b[2J x'"},
      {"CallOfAStorage", Pickle(one_of + ")R"), "calls a storage type"},
      {"CallOfADict", Pickle("})R"), "does not call a function with a tuple"},
      {"CallWithoutTuple", Pickle("ccollections\nOrderedDict\n}R"),
       "does not call a function with a tuple"},
      {"OrderedDictOfItems", Pickle("ccollections\nOrderedDict\n]\x85R"),
       "OrderedDict with arguments"},
      {"PersistentIdNumber", Pickle("K\x01Q"), "id that is not a storage's"},
      {"PersistentIdShort", Pickle(Str("storage") + "\x85Q"),
       "id that is not a storage's"},
      {"PersistentIdModule",
       Pickle("(" + Str("module") + one_of + Str("0") + Str("cpu") + zero +
              "tQ"),
       "id that is not a storage's"},
      {"PersistentIdOrderedDict",
       Pickle("(" + Str("storage") + "ccollections\nOrderedDict\n" + Str("0") +
              Str("cpu") + zero + "tQ"),
       "id that is not a storage's"},
      {"NegativeStorage", Pickle(DictOf({{"t", Tensor(negative_storage)}})),
       "id that is not a storage's"},
      {"RebuildNothing", Rebuild(""), "_rebuild_tensor_v2 with arguments"},
      {"RebuildFromATuple", Rebuild(")" + zero + "))\x89}"),
       "_rebuild_tensor_v2 with arguments"},
      {"RebuildConjugate",
       Rebuild(id + zero + "))\x89}" + DictOf({{"conj", "\x88"}})),
       "_rebuild_tensor_v2 with arguments"},
      {"SizesAndStridesDiffer", Rebuild(id + zero + Ints({1}) + ")\x89}"),
       "_rebuild_tensor_v2 with arguments"},
      {"NegativeOffset", Pickle(DictOf({{"t", Tensor(negative_offset)}})),
       "_rebuild_tensor_v2 with arguments"},
      {"SizeOfText",
       Rebuild(id + zero + Str("a") + "\x85" + Ints({1}) + "\x89}"),
       "size or stride is not an integer"},
      {"NegativeSize", Pickle(DictOf({{"t", Tensor(negative_size)}})),
       "size or stride is not an integer"},
      {"NegativeStride", Pickle(DictOf({{"t", Tensor(negative_stride)}})),
       "size or stride is not an integer"},
      {"RankNine", Pickle(DictOf({{"t", Tensor(rank_nine)}})),
       "9 dimensions > 8"},
      {"ParameterOfAStorage",
       Pickle("ctorch._utils\n_rebuild_parameter\n" + id + "\x88}\x87R"),
       "_rebuild_parameter with arguments"},
      {"StateOfADict", Pickle("}}b"), "other than an OrderedDict"},
      {"StateOfATensor", Pickle(Tensor(kTensor) + "}b"),
       "other than an OrderedDict"},
      {"StateOtherThanMetadata",
       Pickle(std::string(kNoHooks) + DictOf({{"__class__", "N"}}) + "b"),
       "sets the attribute '__class__'"},
      {"ATensorAlone", Pickle(Tensor(kTensor)), "holds no dict of tensors"},
      {"NumberInDict", Pickle(DictOf({{"epoch", "K\x01"}})),
       "'epoch', which is not a tensor"},
      {"DictInDict", Pickle(DictOf({{"model", DictOf({})}})),
       "'model', which is not a tensor"},
      {"NameTwice",
       Pickle(DictOf({{"t", Tensor(kTensor)}, {"t", Tensor(kTensor)}})),
       "tensor 't' is there twice"},
      {"NoName", Pickle(DictOf({{"", Tensor(kTensor)}})), "without a name"},
      {"ControlCharacter", Pickle(DictOf({{"a\nb", Tensor(kTensor)}})),
       "'a\\nb' has a control character"},
      {"LongName", Pickle(DictOf({{std::string(513, 'n'), Tensor(kTensor)}})),
       "513 bytes > limit 512"}};
}

void ExpectRefused(const BadPickle& bad, double max_seconds) {
  const ProcessorTime time;
  const auto tensors = ParseTorchPickle(bad.pickle);
  EXPECT_LT(time.Seconds(), max_seconds);
  EXPECT_EQ(tensors.status().code(), bad.code);
  EXPECT_THAT(std::string(tensors.status().message()), HasSubstr(bad.message));
}

class HostilePickle : public ::testing::TestWithParam<BadPickle> {};

TEST_P(HostilePickle, IsRefusedByNameWithinASecond) {
  ExpectRefused(GetParam(), /*max_seconds=*/1);
}

// These large pickles are not test parameters, because parameters are made
// again for each test. The first takes 0.7 s on a quiet processor; in quadratic
// time it would take hours.
TEST(HostileLargePickle, IsRefusedByNameInLinearTime) {
  ExpectRefused({"ManyItems",
                 Pickle("]" + Repeat(kMaxPickleItems + 1,
                                     ")\x94"
                                     "a")),
                 "more than 4000000 items"},
                /*max_seconds=*/5);
  ExpectRefused({"LongPickle", std::string(kMaxPickleBytes + 1, 'N'),
                 "67108865 bytes > limit 67108864"},
                /*max_seconds=*/1);
}

INSTANTIATE_TEST_SUITE_P(Programs, HostilePickle,
                         ::testing::ValuesIn(BadPrograms()),
                         [](const auto& bad) { return bad.param.name; });
INSTANTIATE_TEST_SUITE_P(Objects, HostilePickle,
                         ::testing::ValuesIn(BadObjects()),
                         [](const auto& bad) { return bad.param.name; });

TEST(ParseTorchPickle, RefusesEveryTruncationOfAGoodPickle) {
  const std::string pickle = Pickle(DictOf({{"t", Parameter(kTensor)}}));
  ASSERT_TRUE(ParseTorchPickle(pickle).ok());
  for (size_t size = 0; size < pickle.size(); ++size) {
    const auto cut = ParseTorchPickle(pickle.substr(0, size));
    EXPECT_EQ(cut.status().code(), absl::StatusCode::kDataLoss) << size;
    EXPECT_THAT(std::string(cut.status().message()), StartsWith("pickle "));
  }
}

}  // namespace
}  // namespace weft::weights::torch_pickle_test
