#include "client/weftctl/data_file.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/weft_client.h"
#include "client/weftctl/arguments.h"
#include "nlohmann/json.hpp"

namespace weft::weftctl {
namespace {

constexpr char kTokenizeHint[] =
    "weftctl has no tokenizer. Make token ids with: python -m weft tokenize "
    "--model-dir MODEL --input TEXTS.jsonl --output TOKENS.jsonl";

absl::StatusOr<Example> ReadExample(const std::string& line) {
  const auto json =
      nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return absl::InvalidArgumentError("not a JSON object");
  }
  const auto tokens = json.find("tokens");
  if (tokens == json.end()) {
    return absl::InvalidArgumentError(json.contains("text") ? kTokenizeHint
                                                            : "no \"tokens\"");
  }
  if (!tokens->is_array()) {
    return absl::InvalidArgumentError("tokens: not a list");
  }
  std::vector<uint32_t> ids;
  for (const auto& token : *tokens) {
    if (!token.is_number_unsigned() || token.get<uint64_t>() > UINT32_MAX) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokens: ", token.dump(), " is not a token id"));
    }
    ids.push_back(token.get<uint32_t>());
  }
  const auto prompt = json.find("prompt_length");
  if (prompt != json.end() && !prompt->is_number_unsigned()) {
    return absl::InvalidArgumentError("prompt_length is not a count");
  }
  const size_t prompt_length = prompt == json.end() ? 0 : prompt->get<size_t>();
  auto datum = client::NextTokenDatum(ids, prompt_length);
  if (!datum.ok()) return datum.status();
  // Targets in the prompt have weight 0. The first token is not a target.
  const size_t num_scored = ids.size() - std::max<size_t>(prompt_length, 1);
  return Example{*std::move(datum), num_scored};
}

}  // namespace

absl::StatusOr<std::vector<Example>> ReadExamples(std::istream& input,
                                                  const std::string& name) {
  std::vector<Example> examples;
  std::string line;
  for (int number = 1; std::getline(input, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    auto example = ReadExample(line);
    if (!example.ok()) {
      return UsageError(
          absl::StrCat(name, ":", number, ": ", example.status().message()));
    }
    examples.push_back(*std::move(example));
  }
  if (examples.empty()) {
    return UsageError(absl::StrCat(name, ": no data"));
  }
  return examples;
}

}  // namespace weft::weftctl
