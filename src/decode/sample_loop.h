// Continuous batching: a prompt is prefilled once for all its samples, and
// every decode iteration draws one token for each running sequence of any
// adapter. Sequences join and leave between iterations.
//
// Prefill starts after the cached prefix of the same weights. It runs in
// pieces, and the other sequences decode between pieces.
//
// A sequence takes pages as it grows. If no page is left, cached prefixes are
// evicted first. Then the youngest sequence is preempted: it loses its pages
// and keeps its tokens. Later it is prefilled again and continues with the same
// random numbers, so its result differs only by rounding. The oldest sequence
// always has room for all its tokens (CheckFits), so one sequence always makes
// progress.
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
  bool decode_graphs = true;  // Only if the device has graphs.
};

// What one iteration produced for a request. Only requests that stream get
// deltas.
struct SampleEvent {
  uint64_t work_id = 0;
  std::vector<SampleDelta> deltas;
  bool finished = false;
  // Set when the request is finished.
  absl::StatusOr<SampleResult> result = SampleResult();
};

class SampleLoop {
 public:
  // Creates the executor's cache. `executor`, `token_bytes` (may be null) and
  // `probe` outlive the loop.
  SampleLoop(executor::Executor* executor, const SampleLoopOptions& options,
             const sampling::TokenBytes* token_bytes, EngineProbe* probe);

  // Any thread may call the method below.

  // Returns RESOURCE_EXHAUSTED if one sample would not fit even an empty cache.
  [[nodiscard]] absl::Status CheckFits(const SampleRequest& request) const;

  // The engine thread calls the methods below.

  // Returns the number of requests that are being prefilled or decoded.
  [[nodiscard]] int active() const { return static_cast<int>(jobs_.size()); }
  // Returns whether the request's prompt could start now.
  [[nodiscard]] bool HasRoom(const SampleRequest& request) const;
  // Admits a request. A null `version` means the base model. `request` outlives
  // the job.
  void Admit(uint64_t work_id, const SampleRequest* request, bool streams,
             absl::Time accepted_at, lora::AdapterVersionPtr version);
  // Removes the request and frees its pages. Returns false if there is no such
  // request.
  bool Cancel(uint64_t work_id);
  // Removes all requests and returns their ids. Called after an error in Step.
  std::vector<uint64_t> CancelAll();

  // Prefills admitted prompts, starts samples, and draws one token for each
  // running sequence. Throws what Executor throws.
  [[nodiscard]] std::vector<SampleEvent> Step();

 private:
  // Orders sequences by age: first by their job's admission; within a job the
  // prompt comes before its samples, in the order in which they start.
  using Age = std::pair<uint64_t, int>;
  static Age AgeOf(const SampleSequence& sequence) {
    return {sequence.job->order, sequence.sample_index};
  }

  // Prefill, in sample_prefill.cc.

  void Prefill();
  [[nodiscard]] std::vector<SamplePiece> PlanPrefill();
  // Gives pages to a waiting sequence, and reuses a cached prefix.
  [[nodiscard]] bool TakePages(SampleSequence& sequence);
  // Returns the prompt tokens whose scores this piece computes. The first of
  // them follows the token at `begin`.
  [[nodiscard]] absl::Span<const int32_t> UnscoredPrompt(
      const SamplePiece& piece, int64_t* begin) const;
  void RunPieces(const std::vector<SamplePiece>& pieces);

  // Pages, in sample_pages.cc.

  // Returns whether a sequence of this age may take `count` pages to start or
  // to continue. Leaves one page for each running sequence. If no sequence is
  // running, preempts younger sequences that hold pages.
  [[nodiscard]] bool MakeRoom(int64_t count, Age age);
  // Makes room for the next token of every running sequence. Preempts the
  // youngest sequences until there is room. Returns the sequences that still
  // run, oldest first.
  [[nodiscard]] std::vector<SampleSequence*> GrowRunning();
  // Returns the youngest sequence with pages; null if there is none.
  [[nodiscard]] SampleSequence* Youngest();
  void Preempt(SampleSequence& sequence);
  // Returns the experts [N, L K], i16, of the tokens in the sequence's pages.
  [[nodiscard]] at::Tensor ExpertsOf(const SampleSequence& sequence) const;
  // Adds the routing to the result of a finished sample, if it is wanted.
  void AddRouting(const SampleSequence& sample);
  void CachePrefix(SampleSequence& sequence);
  // Drops cached prefixes of versions that no request can use any more.
  void ForgetDeadVersions();
  void ReportPages();
  void EraseSequences(const SampleJob& job);
  void EraseFailed();
  [[nodiscard]] int64_t SequenceTokens(const SampleRequest& request) const;

  void StartSamples();
  [[nodiscard]] bool StartSample(SampleJob& job);
  void Decode();
  // Appends the token to its sample. Returns true if the sample ends with it.
  bool Accept(SampleJob& job, int sample_index, sampling::StopMatcher& stop,
              const sampling::DrawResult& drawn);
  // Returns the rule by which the sample's next token is drawn from a row of
  // logits.
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
  std::list<SampleJob> jobs_;  // Jobs in the order of admission.
  std::map<Age, SampleSequence> sequences_;
  uint64_t next_order_ = 0;
  // Versions whose prefixes may be cached, by weights id.
  std::map<uint64_t, std::weak_ptr<const lora::AdapterVersion>> versions_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_DECODE_SAMPLE_LOOP_H_
