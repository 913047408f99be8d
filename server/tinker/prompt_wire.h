// Converts what asample asks and returns about the tokens that a prompt might
// have had: target_prompt_logprobs and prompt_alt_tokens_k.
// Errors: INVALID_ARGUMENT, which names the field.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_PROMPT_WIRE_H_
#define WEFT_SERVER_TINKER_PROMPT_WIRE_H_

#include <vector>

#include "absl/status/statusor.h"
#include "server/tinker/fields.h"
#include "server/tinker/wire.pb.h"
#include "src/request/sample.h"
#include "weft/v1/sampling.pb.h"

namespace weft::tinker {

// Reads `target_prompt_logprobs` of the body, int64 [P - 1, K], dense or CSR; a
// cell of -1 asks for nothing. Returns the tensor, and sets *out, which has the
// prompt, to what the cells ask for. An absent field returns a tensor without a
// dtype and leaves *out unchanged.
[[nodiscard]] absl::StatusOr<Tensor> ReadTargets(const Json& body,
                                                 v1::SampleRequest* out);
// Returns the tensor `asked` with the log-probabilities in place of the tokens,
// and 0 in place of -1. `logprobs` are those of the tokens, in their order.
[[nodiscard]] Tensor ScoredTargets(Tensor asked,
                                   const std::vector<float>& logprobs);

// Converts SampleResult::prompt_alternatives with `width` draws in each entry
// but the first.
[[nodiscard]] PromptAltTokens AltTokens(
    const std::vector<weft::TopLogprobs>& draws, int64_t width);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_PROMPT_WIRE_H_
