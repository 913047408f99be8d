// The most likely tokens at each position of a prompt. The engine gives them
// for tokens that it draws, so each prefix of the prompt is a sample of one
// token: they follow each other, and the prefix cache has all of a prefix but
// its end.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_PROMPT_TOP_H_
#define WEFT_SERVER_TINKER_PROMPT_TOP_H_

#include <functional>
#include <vector>

#include "server/tinker/sample_queue.h"

namespace weft::tinker {

// A `done` for `sample` that goes on with its prefixes, each by `add`, and
// calls `finish` at the end with the sample's own result and a row of `count`
// tokens for each prompt token, the first of them empty. The first error ends
// it.
[[nodiscard]] Callback<SampleResult> TopOfPrompt(
    const WaitingSample& sample, int count,
    std::function<void(WaitingSample)> add,
    std::function<void(const absl::StatusOr<SampleResult>&,
                       const std::vector<TopLogprobs>&)>
        finish);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_PROMPT_TOP_H_
