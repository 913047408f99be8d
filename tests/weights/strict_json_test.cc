#include "src/weights/strict_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/weights/files.h"

namespace weft::weights {
namespace {

using ::testing::HasSubstr;

constexpr JsonLimits kLimits = {
    .max_bytes = 200, .max_depth = 3, .max_keys = 4, .max_values = 12};

TEST(ParseStrictJson, RefusesByRule) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not a JSON object"},
      {"[]", "not a JSON object"},
      {"{", "not a JSON object"},
      {"{} x", "not a JSON object"},
      {"{\"a\": 1e999}", "not a JSON object"},
      {"{\"\xff\": 1}", "not a JSON object"},
      {std::string("{}\0", 3), "NUL byte"},
      {R"({"a":1,"a":1})", "key 'a' twice"},
      {R"({"x":{"a":1,"b":2,"a":3}})", "key 'a' twice"},
      {R"({"a":[[[1]]]})", "deeper than 3"},
      {R"({"a":{"b":{"c":{}}}})", "deeper than 3"},
      {R"({"a":{"a":1,"b":2,"c":3,"d":4,"e":5}})", "more than 4 keys"},
      {R"({"a":[1,2,3,4,5,6],"b":[1,2,3,4,5,6]})", "more than 12 values"},
      {std::string(201, ' '), "201 bytes > limit 200"}};
  for (const auto& [text, rule] : cases) {
    const auto value = ParseStrictJson(text, "the file", kLimits);
    EXPECT_EQ(value.status().code(), absl::StatusCode::kInvalidArgument)
        << text;
    EXPECT_THAT(std::string(value.status().message()), HasSubstr(rule)) << text;
  }
}

TEST(ParseStrictJson, AcceptsTheSameKeyInTwoObjects) {
  const auto value =
      ParseStrictJson(R"({"a":{"k":1},"b":{"k":[1]}})", "the file", kLimits)
          .value();
  EXPECT_EQ(value["a"]["k"], 1);
}

TEST(ParseStrictJson, KeepsTheOrderOfKeysOnDemand) {
  const auto value = ParseStrictJson<nlohmann::ordered_json>(
                         R"({"b":1,"a":2})", "the file", kLimits)
                         .value();
  EXPECT_EQ(value.dump(), R"({"b":1,"a":2})");
}

TEST(ReadSmallFile, RefusesLargeMissingAndSpecialFiles) {
  const TempFolder folder;
  const std::string path = folder.Write("file", "12345");
  EXPECT_EQ(*ReadSmallFile(path, 5), "12345");
  EXPECT_EQ(ReadSmallFile(path, 4).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadSmallFile(path + "x", 5).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadSmallFile(folder.path(), 5).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadSmallFile("/dev/zero", 5).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace weft::weights
