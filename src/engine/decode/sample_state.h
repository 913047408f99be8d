// The decode loop's records of a request and of its sequences. Only src/decode
// uses them.
#ifndef WEFT_SRC_ENGINE_DECODE_SAMPLE_STATE_H_
#define WEFT_SRC_ENGINE_DECODE_SAMPLE_STATE_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "src/dispatch/decode_order.h"
#include "src/dispatch/sequence_pages.h"
#include "src/lora/adapter.h"
#include "src/request/adapter_key.h"
#include "src/request/sample.h"
#include "src/sampling/draw_rows.h"
#include "src/sampling/logit_edits.h"
#include "src/sampling/stop_matcher.h"

namespace weft::engine {

// Returns an adapter's latest version; null if the adapter is not on the device
// or does not exist any more.
using LatestVersion = std::function<lora::AdapterVersionPtr(AdapterKey)>;

// A request with the tokens that its samples have drawn so far.
struct SampleJob {
  uint64_t work_id = 0;
  AdapterKey adapter = AdapterKey::kBaseModel;
  AdapterKey flow = AdapterKey::kBaseModel;  // As in dispatch::SampleTask.
  std::string tenant;
  uint64_t order = 0;  // The request's number in the order of admission.
  const SampleRequest* request = nullptr;
  bool streams = false;
  absl::Time accepted_at;
  StopRule stop;
  sampling::SharedEdits edits;  // MakeEdits sets it.
  // first_draws[i] is sample i's first draw, and is reset when the sample
  // starts. The vector is empty until the prompt is prefilled.
  std::vector<std::optional<sampling::DrawResult>> first_draws;
  SampleResult result;
  int num_started = 0;
  int num_finished = 0;
  bool failed = false;
  bool looked_up = false;  // result.prompt_cached_tokens is set.
  // The positions of the prompt before this one have all that the request wants
  // of them. Position 0 has nothing to want, because nothing predicts it.
  int64_t num_scored = 1;
  bool sent_prompt_scores = false;
  std::vector<SampleDelta> deltas;

  bool HasMoreToStart() const {
    return !failed && num_started < request->num_samples;
  }
  int num_running() const { return num_started - num_finished; }
  // Returns the rule for drawing the sample's next token from this row of the
  // logits.
  sampling::DrawRule RuleOf(int sample_index, int64_t row) const;
  // Called once, before the first draw. Throws c10::Error.
  void MakeEdits(int64_t vocab, at::Device device);
};

// The value of sample_index for a prompt.
inline constexpr int kPrompt = -1;

// A sequence's place in the order of age: (job order, sample_index). Within a
// job the prompt comes first, and then the samples in the order of their start.
using SampleAge = std::pair<uint64_t, int>;

// A prompt, or a prompt and the tokens of one of its samples. The prompt has a
// sequence of its own until its last sample starts.
struct SampleSequence {
  SampleJob* job = nullptr;
  int sample_index = 0;
  lora::AdapterVersionPtr version;  // Reads the next token. Null: the base.
  std::optional<dispatch::SequencePages>
      pages;           // None while the sequence waits.
  int64_t length = 0;  // Number of tokens whose keys are in the pages.
  // Earlier versions computed some of these keys, or chose the experts with
  // which they are computed again.
  bool has_old_keys = false;
  int64_t fork_tokens = 0;  // See dispatch::PrefixCache::Prefix.
  // Set by SampleSequences::InOrder.
  dispatch::DecodeOrder::Place place = {};
  bool has_slot = true;
  // The experts [N, L K], i16, that computed the first N tokens of a preempted
  // sequence, for L layers with experts and K experts per token. Prefill
  // computes these tokens with the same experts again. Undefined if the
  // sequence was not preempted or the request has no return_routing.
  at::Tensor experts_NE = {};
  sampling::StopMatcher stop;
  sampling::SequenceEdits edits;

  SampleAge age() const { return {job->order, sample_index}; }
  // Returns 0 for the base model.
  uint64_t weights_id() const {
    return version == nullptr ? 0 : version->id.value();
  }
  // Returns whether the sequence, of a request in flight, may take another
  // version now (SampleSequences::TakeVersions).
  bool may_take_version() const;
  // Returns the number of tokens whose keys the sequence needs to continue: all
  // tokens of a prompt, or all tokens of a sample except the last.
  int64_t target() const;
  bool ready() const { return pages.has_value() && length == target(); }
  // Returns whether this is a prompt that has been prefilled. It waits only for
  // its samples to start, although it may have lost its pages.
  bool only_forks() const {
    return sample_index == kPrompt && !job->first_draws.empty();
  }
  // Returns the first token of a prompt that is not prefilled yet after which
  // prefill needs all logits, for prompt_top_logprobs or prompt_alternatives;
  // target() if there is none.
  int64_t first_listed() const;
  // Returns the numbers of tokens, ascending, after which prefill of a prompt
  // caches the state (sample_sequences.h); 0: nowhere.
  std::array<int64_t, 2> StatePlaces() const;
  // Returns the first `count` tokens.
  std::vector<int32_t> Tokens(int64_t count) const;
  // Appends the changes of the logits of the sequence's next token, if there
  // are any. `row` is the logits' row. The sequence outlives `rows`.
  void AddEdits(int64_t row, std::vector<sampling::RowEdits>& rows);
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DECODE_SAMPLE_STATE_H_
