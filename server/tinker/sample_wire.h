// asample between Tinker's messages and Weft's.
// Errors: INVALID_ARGUMENT naming the field; UNIMPLEMENTED for what Weft does
// not offer.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_SAMPLE_WIRE_H_
#define WEFT_SERVER_TINKER_SAMPLE_WIRE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/tinker/fields.h"
#include "src/request/sample.h"
#include "weft/v1/sampling.pb.h"

namespace weft::tinker {

// What the caller wants of the result.
struct SampleFormat {
  // The log-probabilities of so many last prompt tokens.
  int64_t last_n = 0;
  // So many most likely tokens at each position of the prompt.
  int64_t prompt_top = 0;
};

struct TranslatedSample {
  v1::SampleRequest request;  // Without adapter and snapshot.
  SampleFormat format;
};
// `context_length` is what max_tokens has when it is absent, but for the
// prompt.
[[nodiscard]] absl::StatusOr<TranslatedSample> TranslateSample(
    const Json& body, int context_length);

// A serialized SampleResponse. `prompt_top` has a row for each prompt token if
// format.prompt_top is set; the first is empty.
[[nodiscard]] std::string SampleOutput(
    const SampleResult& result, const SampleFormat& format,
    const std::vector<weft::TopLogprobs>& prompt_top);
// The same as JSON text.
[[nodiscard]] std::string SampleOutputJson(const std::string& serialized);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLE_WIRE_H_
