// Continuous batching: prompts are prefilled once for all their samples, and
// every decode iteration draws one token for each running sequence, whatever
// their adapters. Sequences join and leave between iterations.
//
// Prefill starts after what the cache remembers of the tokens under the same
// weights, and goes in pieces, between which the others decode.
//
// A sequence takes pages as it grows. Where none is left, remembered prefixes
// go first; then the youngest sequence is preempted: its pages go to the others
// and its tokens stay. It waits in line, is prefilled again and goes on with
// the same random numbers: its result differs at most where rounding decides.
// The oldest one has room for all its tokens (CheckFits), so something always
// moves.
#ifndef WEFT_SRC_DECODE_SAMPLE_LOOP_H_
#define WEFT_SRC_DECODE_SAMPLE_LOOP_H_

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "src/decode/kv_pool.h"
#include "src/decode/sample_state.h"
#include "src/executor/executor.h"
#include "src/lora/adapter.h"
#include "src/runtime/engine_probe.h"
#include "src/sampling/draw_rows.h"
#include "src/sampling/stop_matcher.h"

namespace weft::engine {

struct SampleLoopOptions {
  int64_t kv_cache_bytes = 0;
  int max_decode_sequences = 64;
  int64_t max_prefill_tokens = 2048;
  bool decode_graphs = true;  // Where the device has them.
};

// What one iteration produced. Deltas are made only for requests that stream.
struct SampleEvent {
  uint64_t work_id = 0;
  std::vector<SampleDelta> deltas;
  bool finished = false;
  absl::StatusOr<SampleResult> result = SampleResult();  // When finished.
};

class SampleLoop {
 public:
  // Makes the executor's cache. executor, token_bytes (may be null) and probe
  // outlive the loop.
  SampleLoop(executor::Executor* executor, const SampleLoopOptions& options,
             const sampling::TokenBytes* token_bytes, EngineProbe* probe);

  // Any thread.

  // RESOURCE_EXHAUSTED when not even one sample fits the empty cache.
  [[nodiscard]] absl::Status CheckFits(const SampleRequest& request) const;

  // Engine thread.

  // Requests that are prefilled or being decoded.
  [[nodiscard]] int active() const { return static_cast<int>(jobs_.size()); }
  // True when the request's prompt could start now.
  [[nodiscard]] bool HasRoom(const SampleRequest& request) const;
  // Takes a request in; `version` null: base model. `request` outlives the job.
  void Admit(uint64_t work_id, const SampleRequest* request, bool streams,
             absl::Time accepted_at, lora::AdapterVersionPtr version);
  // Forgets the request and frees its pages. False: unknown.
  bool Cancel(uint64_t work_id);
  // Forgets everything; returns the ids. After an error in Step.
  std::vector<uint64_t> CancelAll();

  // Prefills what was admitted, starts samples, draws one token for each
  // running sequence. Throws what Group does.
  [[nodiscard]] std::vector<SampleEvent> Step();

 private:
  // By age: jobs in the order of admission, in each the prompt, then the
  // samples in the order of their start.
  using Age = std::pair<uint64_t, int>;
  static Age AgeOf(const SampleSequence& sequence) {
    return {sequence.job->order, sequence.sample_index};
  }

  // Prefill (sample_prefill.cc).

  void Prefill();
  [[nodiscard]] std::vector<SamplePiece> PlanPrefill();
  // Gives a sequence that waits its pages, with what the cache remembers.
  [[nodiscard]] bool TakePages(SampleSequence& sequence);
  // Tokens of the prompt whose log-probabilities are wanted and come out of
  // this piece; the first one's follows from the token at `begin`.
  [[nodiscard]] absl::Span<const int32_t> UnscoredPrompt(
      const SamplePiece& piece, int64_t* begin) const;
  void RunPieces(const std::vector<SamplePiece>& pieces);

  // Pages (sample_pages.cc).

  // Whether `count` pages may be taken to start or to continue a sequence of
  // this age. Leaves one for each running sequence; where none moves, younger
  // ones that hold pages are preempted.
  [[nodiscard]] bool MakeRoom(int64_t count, Age age);
  // A place for the next token of every running sequence; the youngest are
  // preempted until there is. Returns those that run on, oldest first.
  [[nodiscard]] std::vector<SampleSequence*> GrowRunning();
  // The youngest sequence with pages; null when there is none.
  [[nodiscard]] SampleSequence* Youngest();
  void Preempt(SampleSequence& sequence);
  void CachePrefix(SampleSequence& sequence);
  // Forgets prefixes of weights that nobody can sample from any more.
  void ForgetDeadVersions();
  void ReportPages();
  void EraseSequences(const SampleJob& job);
  [[nodiscard]] int64_t SequenceTokens(const SampleRequest& request) const;

  void StartSamples();
  [[nodiscard]] bool StartSample(SampleJob& job);
  void Decode();
  // Appends the token to its sample; true when the sample ends with it.
  bool Accept(SampleJob& job, int sample_index, sampling::StopMatcher& stop,
              const sampling::DrawResult& drawn);
  // How the sample's next token is drawn, from a row of the logits.
  [[nodiscard]] static sampling::DrawRule DrawRuleOf(const SampleJob& job,
                                                     int sample_index,
                                                     int64_t row);
  [[nodiscard]] std::vector<SampleEvent> CollectEvents();

  [[nodiscard]] const model::ModelConfig& config() const {
    return executor_.decoder().config();
  }

  executor::Executor& executor_;
  const SampleLoopOptions options_;
  const sampling::TokenBytes* const token_bytes_;
  EngineProbe* const probe_;
  KvPool pool_;
  std::list<SampleJob> jobs_;  // In the order of admission.
  std::map<Age, SampleSequence> sequences_;
  uint64_t next_order_ = 0;
  // The weights whose prefixes may be remembered, by their id.
  std::map<uint64_t, std::weak_ptr<const lora::AdapterVersion>> versions_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_DECODE_SAMPLE_LOOP_H_
