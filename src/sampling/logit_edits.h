// Changes logits before tokens are drawn from them: biases, penalties, and
// tokens that may not be drawn. Requests without such options have no edits and
// cost nothing here.
//
// Legend: R rows, V vocabulary.
#ifndef WEFT_SRC_SAMPLING_LOGIT_EDITS_H_
#define WEFT_SRC_SAMPLING_LOGIT_EDITS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/request/sample.h"

namespace weft::sampling {

// The change of one token's logit. First `bias` is added. The sum is divided by
// `repetition` if it is positive, and otherwise multiplied by it. At last
// `penalty` is subtracted.
struct LogitEdit {
  int32_t token = 0;
  float bias = 0;
  float repetition = 1;
  float penalty = 0;
  int32_t count = 0;  // How often the sequence has drawn the token.
};

// The changes of one row of logits.
struct RowEdits {
  int64_t row = 0;
  std::vector<LogitEdit> edits;  // Of distinct tokens.
  // [V] bool, on the logits' device: the tokens that are not drawn, whose
  // logits become -inf. Undefined if there are none.
  at::Tensor banned_V;
};

// Changes the rows in place. Each row occurs once.
// Shapes:  logits_RV [R, V] f32, contiguous.
// Units:   time and memory O(edits), which grows with the context as that of
//          attention does but by far fewer bytes per token; and O(V) for each
//          row with banned tokens.
// Errors:  throws c10::Error.   Threads: engine thread only.
// Source:  the formulas of transformers (RepetitionPenaltyLogitsProcessor) and
//          of OpenAI's API (presence and frequency penalty), in the order of
//          transformers and vLLM.
void EditRows(const at::Tensor& logits_RV, const std::vector<RowEdits>& rows);

// Returns RowEdits::banned_V for the tokens `banned` and, unless `allowed` is
// empty, for all tokens that are not in `allowed`. Undefined if that bans none.
// Errors:  throws c10::Error.   Threads: engine thread only.
at::Tensor BannedTokens(const std::vector<int32_t>& allowed,
                        const std::vector<int32_t>& banned, int64_t vocab,
                        at::Device device);

// The edits of one sequence, which change with the tokens that it draws. They
// depend only on the request and on these tokens, so a sequence that loses its
// pages continues with the same edits.
// Units:   memory O(distinct tokens of prompt and sample) with penalties, and
//          O(biases) without. Push is O(distinct tokens) for a new token.
class SequenceEdits {
 public:
  // A sequence without edits. Allocates nothing.
  SequenceEdits() = default;
  // The edits after the prompt.
  SequenceEdits(const SamplingConfig& config,
                const std::vector<int32_t>& prompt);

  // Takes the next drawn token.
  void Push(int32_t token);
  // Returns the edits, in the order of tokens.
  const std::vector<LogitEdit>& edits() const { return edits_; }

 private:
  // Returns the token's edit. If there is none, adds one.
  LogitEdit& Of(int32_t token);

  bool has_penalties_ = false;
  float repetition_ = 1, presence_ = 0, frequency_ = 0;
  std::vector<LogitEdit> edits_;
};

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_LOGIT_EDITS_H_
