// Continuous batching: prompts are prefilled once for all their samples, and
// every decode iteration draws one token for each running sequence, whatever
// their adapters. Sequences join and leave between iterations.
//
// Prefill starts after the cached prefix of the same weights. It runs in
// pieces, and the other sequences decode between them.
//
// A sequence takes pages as it grows. If no page is left, cached prefixes are
// evicted first. Then the youngest sequence is preempted: it loses its pages
// and keeps its tokens. It waits, is prefilled again and goes on with the same
// random numbers, so its result differs at most by rounding. The oldest
// sequence has room for all its tokens (CheckFits), so one sequence always
// makes progress.
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
  bool decode_graphs = true;  // If the device has them.
};

// A request's output of one iteration. Only requests that stream get deltas.
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

  // Returns RESOURCE_EXHAUSTED if one sample does not fit the empty cache.
  [[nodiscard]] absl::Status CheckFits(const SampleRequest& request) const;

  // Engine thread.

  // Returns the number of requests that are being prefilled or decoded.
  [[nodiscard]] int active() const { return static_cast<int>(jobs_.size()); }
  // Returns whether the request's prompt could start now.
  [[nodiscard]] bool HasRoom(const SampleRequest& request) const;
  // Admits a request. If `version` is null, it runs on the base model.
  // `request` outlives the job.
  void Admit(uint64_t work_id, const SampleRequest* request, bool streams,
             absl::Time accepted_at, lora::AdapterVersionPtr version);
  // Removes the request and frees its pages. Returns false if it is unknown.
  bool Cancel(uint64_t work_id);
  // Removes all requests and returns their ids. For use after an error in Step.
  std::vector<uint64_t> CancelAll();

  // Prefills admitted prompts, starts samples, and draws one token for each
  // running sequence. Throws what Executor throws.
  [[nodiscard]] std::vector<SampleEvent> Step();

 private:
  // The place of a sequence by age: jobs in the order of admission; within a
  // job the prompt, then its samples in the order of their start.
  using Age = std::pair<uint64_t, int>;
  static Age AgeOf(const SampleSequence& sequence) {
    return {sequence.job->order, sequence.sample_index};
  }

  // Prefill (sample_prefill.cc).

  void Prefill();
  [[nodiscard]] std::vector<SamplePiece> PlanPrefill();
  // Gives pages to a sequence that waits, and reuses a cached prefix.
  [[nodiscard]] bool TakePages(SampleSequence& sequence);
  // Returns the prompt's tokens whose log-probabilities this piece computes.
  // The first one follows the token at `begin`.
  [[nodiscard]] absl::Span<const int32_t> UnscoredPrompt(
      const SamplePiece& piece, int64_t* begin) const;
  void RunPieces(const std::vector<SamplePiece>& pieces);

  // Pages (sample_pages.cc).

  // Returns whether a sequence of this age may take `count` pages to start or
  // to continue. Leaves one page for each running sequence. If no sequence
  // runs, preempts younger ones that hold pages.
  [[nodiscard]] bool MakeRoom(int64_t count, Age age);
  // Makes room for the next token of every running sequence, and preempts the
  // youngest until there is room. Returns those that go on, oldest first.
  [[nodiscard]] std::vector<SampleSequence*> GrowRunning();
  // Returns the youngest sequence with pages; null if there is none.
  [[nodiscard]] SampleSequence* Youngest();
  void Preempt(SampleSequence& sequence);
  void CachePrefix(SampleSequence& sequence);
  // Drops cached prefixes of weights that can no longer be sampled from.
  void ForgetDeadVersions();
  void ReportPages();
  void EraseSequences(const SampleJob& job);
  [[nodiscard]] int64_t SequenceTokens(const SampleRequest& request) const;

  void StartSamples();
  [[nodiscard]] bool StartSample(SampleJob& job);
  void Decode();
  // Appends the token to its sample. Returns true if the sample ends with it.
  bool Accept(SampleJob& job, int sample_index, sampling::StopMatcher& stop,
              const sampling::DrawResult& drawn);
  // Returns how the sample's next token is drawn, from a row of the logits.
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
  // The weights whose prefixes may be cached, by their id.
  std::map<uint64_t, std::weak_ptr<const lora::AdapterVersion>> versions_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_DECODE_SAMPLE_LOOP_H_
