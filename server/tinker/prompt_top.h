// Finds the most likely tokens at each position of a prompt. The engine gives
// them only for tokens that it draws, so each prefix of the prompt becomes a
// sample of one token. These samples run one after the other, and the prefix
// cache has all of a prefix but its end.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_PROMPT_TOP_H_
#define WEFT_SERVER_TINKER_PROMPT_TOP_H_

#include <functional>
#include <vector>

#include "server/tinker/sample_queue.h"
#include "server/tinker/sample_wire.h"

namespace weft::tinker {

// Returns a `done` for `sample`. It runs the prefixes one after the other by
// `add`, and then calls `finish` with the sample's own result and a row for
// each token of the prompt. The rows of the last `format.last_n` tokens, but
// never the first row, have `format.prompt_top` tokens; the others are empty.
// After an error it calls `finish` at once with that error.
[[nodiscard]] Callback<SampleResult> TopOfPrompt(
    const WaitingSample& sample, const SampleFormat& format,
    std::function<void(WaitingSample)> add,
    std::function<void(const absl::StatusOr<SampleResult>&,
                       const std::vector<TopLogprobs>&)>
        finish);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_PROMPT_TOP_H_
