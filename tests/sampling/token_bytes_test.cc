#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "src/sampling/stop_matcher.h"
#include "tests/sampling/tokenizer_folder.h"
#include "tests/support/status_matchers.h"

namespace weft::sampling {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnsupported = absl::StatusCode::kUnimplemented;

TEST(TokenBytes, DecodesTheByteAlphabet) {
  // U+0100 is byte 0, U+0120 a space, U+010A a line feed, and U+0143, the last
  // code point of the alphabet, is 0xad.
  const TokenizerFolder folder(
      R"({"\u0100":0,"\u0120the":1,"\u010a":2,"\u0143":3,"\u00ff~!":4,)"
      R"("\u0121":5,"\u0122":6,"\u0142":7})");
  const auto bytes = TokenBytes::Load(folder.path()).value();
  EXPECT_EQ(bytes.Bytes(0), std::string(1, '\0'));
  EXPECT_EQ(bytes.Bytes(1), " the");
  EXPECT_EQ(bytes.Bytes(2), "\n");
  EXPECT_EQ(bytes.Bytes(3), "\xad");
  EXPECT_EQ(bytes.Bytes(4), "\xff~!");
  EXPECT_EQ(bytes.Bytes(5), "\x7f");
  EXPECT_EQ(bytes.Bytes(6), "\x80");
  EXPECT_EQ(bytes.Bytes(7), "\xa0");
}

TEST(TokenBytes, ReadsAddedTokens) {
  const TokenizerFolder folder(
      R"({"a":0,"<|end|>":1})",
      R"([{"id":1,"content":"<|end|>","special":true},)"
      R"({"id":3,"content":"  \u00e9"}])");
  const auto bytes = TokenBytes::Load(folder.path()).value();
  EXPECT_EQ(bytes.Bytes(1), "<|end|>");
  EXPECT_EQ(bytes.Bytes(2), "");
  EXPECT_EQ(bytes.Bytes(3), "  \xc3\xa9");
  EXPECT_EQ(bytes.Bytes(4), "");
  EXPECT_EQ(bytes.Bytes(-1), "");
}

TEST(TokenBytes, KeepsTokensOutsideTheAlphabet) {
  const TokenizerFolder folder(R"({"\u4e00":0,"a b":1,"\u0144":2})");
  const auto bytes = TokenBytes::Load(folder.path()).value();
  EXPECT_EQ(bytes.Bytes(0), "\xe4\xb8\x80");
  EXPECT_EQ(bytes.Bytes(1), "a b");
  EXPECT_EQ(bytes.Bytes(2), "\xc5\x84");
}

TEST(TokenBytes, ReadsADecoderThatIsASequence) {
  const TokenizerFolder folder;
  folder.Write(
      R"({"decoder":{"type":"Sequence","decoders":[{"type":"ByteLevel"}]},)"
      R"("model":{"type":"BPE","vocab":{"a":0}}})");
  EXPECT_THAT(TokenBytes::Load(folder.path()), IsOk());
}

TEST(TokenBytes, ReadsByteFallback) {
  const TokenizerFolder folder;
  folder.Write(
      R"({"decoder":{"type":"Sequence","decoders":[{"type":"Replace",)"
      R"("pattern":{"String":"\u2581"},"content":" "},{"type":"ByteFallback"},)"
      R"({"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},)"
      R"("model":{"type":"BPE","byte_fallback":true,"vocab":{"<unk>":0,)"
      R"("<0x0A>":1,"<0xE2>":2,"\u2581the":3,"\u2581\u2581":4,"<0xZZ>":5}},)"
      R"("added_tokens":[{"id":6,"content":"</s>","special":true},)"
      R"({"id":7,"content":"\u2581\u2581\u2581"}]})");
  const auto bytes = TokenBytes::Load(folder.path()).value();
  EXPECT_EQ(bytes.Bytes(1), "\n");
  EXPECT_EQ(bytes.Bytes(2), "\xe2");
  EXPECT_EQ(bytes.Bytes(3), " the");
  EXPECT_EQ(bytes.Bytes(4), "  ");
  EXPECT_EQ(bytes.Bytes(5), "<0xZZ>");
  EXPECT_EQ(bytes.Bytes(6), "</s>");
  EXPECT_EQ(bytes.Bytes(7), "   ");
}

TEST(TokenBytes, RefusesOtherTokenizers) {
  const TokenizerFolder folder;
  for (const char* json :
       {R"({"model":{"type":"Unigram","vocab":[]},)"
        R"("decoder":{"type":"ByteLevel"}})",
        R"({"model":{"type":"BPE","vocab":{"a":0}}})",
        R"({"model":{"type":"BPE","vocab":{"a":0}},"decoder":null})",
        R"({"model":{"type":"BPE","vocab":{"a":0}},"decoder":)"
        R"({"type":"Sequence","decoders":[{"type":"Fuse"}]}})",
        R"({"model":{"type":"BPE","vocab":{"a":0}},"decoder":)"
        R"({"type":"Sequence","decoders":[{"type":"ByteFallback"},)"
        R"({"type":"WordPiece"}]}})"}) {
    folder.Write(json);
    EXPECT_THAT(TokenBytes::Load(folder.path()),
                IsStatus(kUnsupported, "byte-level"))
        << json;
  }
}

TEST(TokenBytes, AFolderWithAnOlderFileNamesTheWayOut) {
  const TokenizerFolder folder;
  EXPECT_THAT(
      TokenBytes::Load(folder.path()),
      IsStatus(absl::StatusCode::kNotFound, "tokenizer.json does not exist"));
  std::ofstream(folder.path() + "/tokenizer.model") << "sentencepiece";
  EXPECT_THAT(TokenBytes::Load(folder.path()),
              IsStatus(absl::StatusCode::kNotFound,
                       "tokenizer.json does not exist, only tokenizer.model; "
                       "transformers makes one: AutoTokenizer"));
}

TEST(TokenBytes, RefusesDamagedFiles) {
  const TokenizerFolder folder;
  const std::string head =
      R"({"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":)";
  for (const std::string& json :
       {std::string(), std::string("[]"), std::string("{}"),
        std::string("{\"a\":"), head + "[]}}", head + R"({"a":-1}}})",
        head + R"({"a":"0"}}})", head + R"({"a":99999999}}})",
        head + R"({"a":0}},"added_tokens":{}})",
        head + R"({"a":0}},"added_tokens":[1]})",
        head + R"({"a":0}},"added_tokens":[{"id":1}]})",
        head + R"({"a":0}},"added_tokens":[{"content":"x"}]})"}) {
    folder.Write(json);
    EXPECT_THAT(TokenBytes::Load(folder.path()),
                IsStatus(kInvalid, "tokenizer.json"))
        << json;
  }
  std::filesystem::remove(folder.path() + "/tokenizer.json");
  std::filesystem::create_directory(folder.path() + "/tokenizer.json");
  EXPECT_THAT(TokenBytes::Load(folder.path()),
              IsStatus(kInvalid, "not a regular file"));
}

}  // namespace
}  // namespace weft::sampling
