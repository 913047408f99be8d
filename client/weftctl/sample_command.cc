#include "absl/strings/str_join.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "src/base/status_macros.h"

namespace weft::weftctl {
namespace {

absl::Status ReadConfig(const Arguments& arguments,
                        v1::SamplingConfig& config) {
  WEFT_ASSIGN_OR_RETURN(const auto max_tokens,
                        arguments.GetUint32("max-tokens"));
  config.set_max_tokens(max_tokens);
  WEFT_ASSIGN_OR_RETURN(const auto temperature,
                        arguments.GetDouble("temperature"));
  config.set_temperature(temperature);
  WEFT_ASSIGN_OR_RETURN(const auto top_k, arguments.GetUint32("top-k"));
  config.set_top_k(top_k);
  WEFT_ASSIGN_OR_RETURN(const auto top_p, arguments.GetDouble("top-p"));
  config.set_top_p(top_p);
  if (arguments.Has("seed")) {
    WEFT_ASSIGN_OR_RETURN(const auto seed, arguments.GetInt("seed"));
    config.set_seed(static_cast<uint64_t>(seed));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::SampleRequest> ReadRequest(const Arguments& arguments) {
  v1::SampleRequest request;
  request.set_adapter_id(arguments.GetString("adapter"));
  request.set_snapshot(arguments.GetString("snapshot"));
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
           {},
           {{"prompt-tokens", "IDS", "the prompt: 1,2,3", ""},
            {"adapter", "ADAPTER", "adapter; absent: the base model", ""},
            {"snapshot", "NAME", "snapshot of the adapter", ""},
            {"num-samples", "N", "independent samples", "1"},
            {"max-tokens", "N", "0: the server's default", "0"},
            {"temperature", "T", "0: the most likely token", "1"},
            {"top-k", "K", "0: all", "0"},
            {"top-p", "P", "least probability mass kept", "1"},
            {"seed", "N", "absent: drawn by the server", ""},
            {"stream", "", "print tokens as they come", ""}},
           Sample}};
}

}  // namespace weft::weftctl
