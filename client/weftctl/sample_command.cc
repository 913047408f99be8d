#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "src/base/status_macros.h"

namespace weft::client::weftctl {
namespace {

using Config = v1::SamplingConfig;

// The flags whose value is a field of the config.
constexpr struct {
  const char* flag;
  void (Config::*set)(uint32_t);
} kWholeNumbers[] = {{"max-tokens", &Config::set_max_tokens},
                     {"min-tokens", &Config::set_min_tokens},
                     {"top-k", &Config::set_top_k}};
constexpr struct {
  const char* flag;
  void (Config::*set)(double);
} kNumbers[] = {{"temperature", &Config::set_temperature},
                {"top-p", &Config::set_top_p},
                {"min-p", &Config::set_min_p},
                {"repetition-penalty", &Config::set_repetition_penalty},
                {"presence-penalty", &Config::set_presence_penalty},
                {"frequency-penalty", &Config::set_frequency_penalty}};

// Reads --logit-bias, such as 42:-100,7:1.5.
absl::Status ReadBias(const Arguments& arguments, Config& config) {
  const std::string text = arguments.GetString("logit-bias");
  for (const auto part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> entry =
        absl::StrSplit(part, absl::MaxSplits(':', 1));
    uint32_t token = 0;
    float bias = 0;
    if (!absl::SimpleAtoi(entry.first, &token) ||
        !absl::SimpleAtof(entry.second, &bias)) {
      return UsageError(
          absl::StrCat("--logit-bias: '", text,
                       "' is not a list of ID:BIAS such as 42:-100,7:1.5"));
    }
    v1::TokenBias* const added = config.add_logit_bias();
    added->set_token(token);
    added->set_bias(bias);
  }
  return absl::OkStatus();
}

absl::Status ReadConfig(const Arguments& arguments, Config& config) {
  for (const auto& field : kWholeNumbers) {
    WEFT_ASSIGN_OR_RETURN(const auto value, arguments.GetUint32(field.flag));
    (config.*field.set)(value);
  }
  for (const auto& field : kNumbers) {
    WEFT_ASSIGN_OR_RETURN(const auto value, arguments.GetDouble(field.flag));
    (config.*field.set)(value);
  }
  if (arguments.Has("seed")) {
    WEFT_ASSIGN_OR_RETURN(const auto seed, arguments.GetInt("seed"));
    config.set_seed(static_cast<uint64_t>(seed));
  }
  WEFT_ASSIGN_OR_RETURN(const auto allowed,
                        arguments.GetTokens("allowed-tokens"));
  config.mutable_allowed_token_ids()->Add(allowed.begin(), allowed.end());
  return ReadBias(arguments, config);
}

absl::StatusOr<v1::SampleRequest> ReadRequest(const Arguments& arguments) {
  v1::SampleRequest request;
  request.set_adapter_id(arguments.GetString("adapter"));
  request.set_snapshot(arguments.GetString("snapshot"));
  request.set_checkpoint(arguments.GetString("checkpoint"));
  WEFT_ASSIGN_OR_RETURN(const auto prompt,
                        arguments.GetTokens("prompt-tokens"));
  if (prompt.empty()) {
    return UsageError(
        "--prompt-tokens is empty; for text: python -m weft sample "
        "--model-dir MODEL --prompt TEXT");
  }
  request.mutable_prompt()->Add(prompt.begin(), prompt.end());
  WEFT_ASSIGN_OR_RETURN(const auto samples, arguments.GetUint32("num-samples"));
  request.set_num_samples(samples);
  WEFT_RETURN_IF_ERROR(ReadConfig(arguments, *request.mutable_config()));
  return request;
}

absl::Status Stream(const Session& session, const v1::SampleRequest& request) {
  return session.client.SampleStream(
      request, [&session](const v1::SampleStreamResponse& delta) {
        if (session.json) {
          PrintJson(delta, session.out);
        } else {
          session.out << delta.sample_index() << ": "
                      << absl::StrJoin(delta.tokens(), ",") << std::endl;
        }
        return true;
      });
}

absl::Status Sample(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const auto request, ReadRequest(session.arguments));
  if (session.arguments.Has("stream")) return Stream(session, request);
  WEFT_ASSIGN_OR_RETURN(const auto response, session.client.Sample(request));
  if (session.json) {
    PrintJson(response, session.out);
    return absl::OkStatus();
  }
  for (const v1::Sample& sample : response.samples()) {
    session.out << absl::StrJoin(sample.tokens(), ",") << "\n";
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<Command> SampleCommands() {
  return {{"sample",
           "Draw token ids from the base model or an adapter.",
           Sample,
           {},
           {{"prompt-tokens", "IDS", "the prompt: 1,2,3", ""},
            {"adapter", "ADAPTER", "adapter; absent: the base model", ""},
            {"snapshot", "NAME", "snapshot of the adapter", ""},
            {"checkpoint", "NAME", "checkpoint of the adapter", ""},
            {"num-samples", "N", "independent samples", "1"},
            {"max-tokens", "N", "0: the server's default", "0"},
            {"temperature", "T", "0: the most likely token", "1"},
            {"top-k", "K", "0: all", "0"},
            {"top-p", "P", "least probability mass kept", "1"},
            {"min-p", "P", "least share of the most likely token", "0"},
            {"repetition-penalty", "R", "of tokens seen; > 1: fewer", "1"},
            {"presence-penalty", "X", "taken from logits of drawn tokens", "0"},
            {"frequency-penalty", "X", "the same for each time drawn", "0"},
            {"logit-bias", "LIST", "added to logits: 42:-100,7:1.5", ""},
            {"allowed-tokens", "IDS", "draw only these: 1,2,3", ""},
            {"min-tokens", "N", "least tokens before a stop", "0"},
            {"seed", "N", "absent: drawn by the server", ""},
            {"stream", "", "print tokens as they come", ""}}}};
}

}  // namespace weft::client::weftctl
