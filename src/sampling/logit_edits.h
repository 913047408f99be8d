// Changes logits before tokens are drawn from them: biases, penalties, and
// tokens that may not be drawn. Requests without such options have no edits and
// cost nothing here.
//
// On CUDA the edits stay on the device, and an iteration uploads only what the
// sequences have drawn since their last edit, all in one copy. On the device a
// request takes at most 16 bytes for each bias and token of its prompt, for
// each sample 32 for each token that it draws and at least 1 KiB, which is
// little beside keys and values, and V / 4 bytes if it bans tokens. The server
// charges the caller for edits and bans before it accepts the request
// (server/wire/request_fields.cc).
//
// Legend: R rows, V vocabulary.
#ifndef WEFT_SRC_SAMPLING_LOGIT_EDITS_H_
#define WEFT_SRC_SAMPLING_LOGIT_EDITS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <utility>
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
};

// The edits that all samples of a request share, and the tokens that they do
// not draw.
class SharedEdits {
 public:
  // No edits. Allocates nothing.
  SharedEdits() = default;
  // `stops` are not drawn before a sample has min_tokens tokens. Errors: throws
  // c10::Error. Threads: engine thread only.
  SharedEdits(const SamplingConfig& config, const std::vector<int32_t>& prompt,
              const std::vector<int32_t>& stops, int64_t vocab,
              at::Device device);

  // Returns the edits, in the order of tokens.
  const std::vector<LogitEdit>& edits() const { return edits_; }
  // Returns the bytes of edits() on a CUDA device. Undefined if there are none,
  // or if the device is a CPU.
  const at::Tensor& edits_on_device() const { return edits_on_device_; }
  // Returns a bit for each token that a sample does not draw, in words of 32
  // bits, on the device. Undefined if there are none. `early`: the sample has
  // fewer than min_tokens tokens.
  const at::Tensor& banned(bool early) const {
    return early ? early_banned_ : banned_;
  }

 private:
  friend class SequenceEdits;

  bool has_penalties_ = false;
  float repetition_ = 1, presence_ = 0, frequency_ = 0;
  std::vector<LogitEdit> edits_;
  at::Tensor edits_on_device_;
  at::Tensor banned_, early_banned_;
};

// The edits of one sequence: those that it shares with others, and then its
// own, which are penalties of the tokens that it has drawn. They depend only on
// the request and on these tokens, so a sequence that loses its pages continues
// with the same edits.
// Units:   memory O(distinct tokens of the sample) with penalties. Push is
// O(log(edits of the request)).
class SequenceEdits {
 public:
  // `shared` outlives the object.
  explicit SequenceEdits(const SharedEdits* shared) : shared_(shared) {}
  SequenceEdits(SequenceEdits&&) = default;
  SequenceEdits& operator=(SequenceEdits&&) = default;

  // Takes the next drawn token.
  void Push(int32_t token);

  const SharedEdits& shared() const { return *shared_; }
  // Returns the sequence's own edits, in the order of the first draws.
  const std::vector<LogitEdit>& own() const { return own_; }
  // Returns whether there is nothing to change.
  bool IsEmpty(bool early) const {
    return shared_->edits().empty() && own_.empty() &&
           !shared_->banned(early).defined();
  }

  // The bytes of own() on a CUDA device, and the places whose entries differ
  // there.
  struct DeviceList {
    at::Tensor bytes;
    std::vector<int32_t> stale_places;  // Distinct, ascending.
  };
  // Returns the list, which has room for own(). The caller updates all stale
  // places. Throws c10::Error.
  DeviceList UpdateOn(at::Device device);

 private:
  // Where a token's entry is in own_, and how often the sequence has drawn it.
  struct Drawn {
    int32_t place = 0;
    int32_t count = 0;
  };

  const SharedEdits* shared_;
  std::vector<LogitEdit> own_;
  std::unordered_map<int32_t, Drawn> drawn_;
  at::Tensor own_on_device_;
  // The places of all tokens drawn since the last UpdateOn. Empty without a
  // list on the device.
  std::vector<int32_t> pushed_;
};

// The changes of one row of logits.
struct RowEdits {
  int64_t row = 0;
  SequenceEdits* edits = nullptr;  // Of one row only. Outlives this object.
  bool early = false;  // The sequence has fewer than min_tokens tokens.
};

// Changes the rows in place. Each row occurs once.
// Shapes:  logits_RV [R, V] f32, contiguous.
// Units:   time O(edits), which grows with the context as that of attention
//          does but by far fewer bytes per token; and O(V) for each row with
//          banned tokens. On CUDA one copy to the device and one launch.
// Errors:  throws c10::Error.   Threads: engine thread only.
// Source:  the formulas of transformers (RepetitionPenaltyLogitsProcessor) and
//          of OpenAI's API (presence and frequency penalty), in the order of
//          transformers and vLLM.
void EditRows(const at::Tensor& logits_RV, const std::vector<RowEdits>& rows);

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_LOGIT_EDITS_H_
