// Continuous batching: prompts are prefilled once for all their samples, and
// every decode iteration draws one token for each running sequence, whatever
// their adapters. Sequences join and leave between iterations.
//
// A sequence gets all its pages when it starts, so a running one never stops
// for want of memory; what has no room yet waits in its queue.
#ifndef WEFT_SRC_ENGINE_SAMPLE_LOOP_H_
#define WEFT_SRC_ENGINE_SAMPLE_LOOP_H_

#include <list>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "src/engine/engine_probe.h"
#include "src/engine/kv_pool.h"
#include "src/engine/work.h"
#include "src/lora/adapter.h"
#include "src/model/decoder.h"
#include "src/sampling/sampler.h"
#include "src/sampling/stop_matcher.h"

namespace weft::engine {

struct SampleLoopOptions {
  int64_t kv_cache_bytes = 0;
  int max_decode_sequences = 64;
  int64_t max_prefill_tokens = 2048;
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
  // decoder, token_bytes (may be null) and probe outlive the loop.
  SampleLoop(const model::Decoder& decoder, const SampleLoopOptions& options,
             const sampling::TokenBytes* token_bytes, EngineProbe* probe);

  // Any thread.

  // RESOURCE_EXHAUSTED when not even one sample fits the empty cache.
  [[nodiscard]] absl::Status CheckFits(const SampleRequest& request) const;

  // Engine thread.

  // Requests that are prefilled or being decoded.
  [[nodiscard]] int active() const { return static_cast<int>(jobs_.size()); }
  // True when the request could start now.
  [[nodiscard]] bool HasRoom(const SampleRequest& request) const;
  // Takes a request in; `version` null: base model. `request` outlives the job.
  void Admit(uint64_t work_id, const SampleRequest* request, bool streams,
             absl::Time accepted_at, lora::AdapterVersionPtr version);
  // Forgets the request and frees its pages. False: unknown.
  bool Cancel(uint64_t work_id);
  // Forgets everything; returns the ids. After an error in Step.
  std::vector<uint64_t> CancelAll();

  // Prefills what was admitted, starts samples, draws one token for each
  // running sequence. Throws c10::Error.
  [[nodiscard]] std::vector<SampleEvent> Step();

 private:
  // A request: its prompt in the cache and what its samples have drawn.
  struct Job {
    uint64_t work_id = 0;
    const SampleRequest* request = nullptr;
    bool streams = false;
    absl::Time accepted_at;
    lora::AdapterVersionPtr version;
    StopRule stop;
    std::optional<kv::SequencePages> prompt_pages;
    std::vector<float> first_logits;  // [V], until every sample has started.
    SampleResult result;
    int num_started = 0;
    int num_finished = 0;
    bool prefilled = false;
    bool failed = false;
    bool sent_prompt_logprobs = false;
    std::vector<SampleDelta> deltas;

    [[nodiscard]] bool HasMoreToStart() const {
      return !failed && num_started < request->num_samples;
    }
    [[nodiscard]] int num_running() const { return num_started - num_finished; }
  };

  struct Sequence {
    Job* job = nullptr;
    int sample_index = 0;
    kv::SequencePages pages;
    int32_t last_token = 0;
    int64_t length = 0;  // Tokens in the cache, last_token not included.
    sampling::StopMatcher stop;
  };

  void Prefill();
  void PrefillBatch(const std::vector<Job*>& jobs);
  void ReadPromptScores(const std::vector<Job*>& jobs, const at::Tensor& x_TH);
  void StartSamples();
  [[nodiscard]] bool StartSample(Job& job);
  void Decode();
  // Appends the token to its sample; true when the sample ends with it.
  bool Accept(Job& job, int sample_index, sampling::StopMatcher& stop,
              const sampling::DrawResult& drawn);
  [[nodiscard]] std::optional<sampling::DrawResult> Draw(
      const Job& job, int sample_index, const float* logits) const;
  // Nothing could be drawn: the job ends, its neighbours go on.
  void FailJob(Job& job);
  [[nodiscard]] std::vector<SampleEvent> CollectEvents();
  [[nodiscard]] int64_t SequenceTokens(const SampleRequest& request) const;
  [[nodiscard]] int64_t PagesToStart(const SampleRequest& request) const;

  const model::Decoder& decoder_;
  const SampleLoopOptions options_;
  const sampling::TokenBytes* const token_bytes_;
  EngineProbe* const probe_;
  KvPool pool_;
  std::list<Job> jobs_;  // In the order of admission.
  std::list<Sequence> sequences_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_SAMPLE_LOOP_H_
