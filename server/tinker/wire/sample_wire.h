// Converts requests and results of asample between Tinker's messages and
// Weft's.
// Errors: INVALID_ARGUMENT, which names the field; UNIMPLEMENTED for what Weft
// does not offer.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_WIRE_SAMPLE_WIRE_H_
#define WEFT_SERVER_TINKER_WIRE_SAMPLE_WIRE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/tinker/wire.pb.h"
#include "server/tinker/wire/fields.h"
#include "src/request/sample.h"
#include "weft/v1/sampling.pb.h"

namespace weft::server::tinker {

// The caller's choices for the prompt's log-probabilities.
struct SampleFormat {
  // The number of tokens at the end of the prompt that get log-probabilities
  // and lists of the most likely tokens. The prompt's first token gets none.
  int64_t last_n = 0;
  // The number of columns in the table of the prompt's most likely tokens. If
  // it is 0, the result has no such table.
  int64_t prompt_top = 0;
  // The tensor `target_prompt_logprobs`, or one without a dtype.
  Tensor targets;
  int64_t alternatives = 0;  // The value of `prompt_alt_tokens_k`.
};

struct TranslatedSample {
  v1::SampleRequest request;  // The adapter and the snapshot are not set.
  SampleFormat format;
};

// Converts a request. If max_tokens is absent, it is kAllThatFit.
absl::StatusOr<TranslatedSample> TranslateSample(const Json& body);

// Returns a serialized SampleResponse.
std::string SampleOutput(const SampleResult& result,
                         const SampleFormat& format);
// Converts the result of SampleOutput to JSON text, with the field names of the
// SDK's types.
std::string SampleOutputJson(const std::string& serialized);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_WIRE_SAMPLE_WIRE_H_
