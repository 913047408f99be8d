// Continuous batching: the samples of a request share the prefill of its
// prompt, and every decode iteration draws one token for each running sample of
// any adapter. Samples join and leave between iterations.
//
// Prefill can skip the part of a prompt that is cached for the same weights. A
// long prompt is prefilled in pieces. Other samples decode between these
// pieces.
//
// sample_sequences.h says which sequences hold pages and which ones wait.
#ifndef WEFT_SRC_ENGINE_DECODE_SAMPLE_LOOP_H_
#define WEFT_SRC_ENGINE_DECODE_SAMPLE_LOOP_H_

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/dispatch/work.h"
#include "src/engine/decode/decode_threads.h"
#include "src/engine/decode/sample_prefill.h"
#include "src/engine/decode/sample_sequences.h"
#include "src/engine/decode/sample_state.h"
#include "src/engine/device/engine_probe.h"
#include "src/executor/executor.h"
#include "src/lora/adapter.h"
#include "src/request/sample_record.h"
#include "src/sampling/draw_rows.h"
#include "src/sampling/stop_matcher.h"

namespace weft::engine {

struct SampleLoopOptions {
  int64_t kv_cache_bytes = 0;
  int max_decode_sequences = 0;
  std::map<std::string, int64_t> tenant_weights = {};  // As for DecodeOrder.
  int64_t max_prefill_tokens = 0;
  bool decode_graphs = false;  // Use graphs if the device has them.
  bool adapt_threads = false;  // As DecodeThreads does.
  LatestVersion latest = {};   // For requests in flight.
};

// What one iteration produced for a request. Only requests that stream get
// deltas.
struct SampleEvent {
  uint64_t work_id = 0;
  std::vector<SampleDelta> deltas;
  bool finished = false;
  // Set when the request is finished.
  absl::StatusOr<SampleResult> result = SampleResult();
  // Set when a request with `record` has finished without an error.
  std::optional<SampleRecord> record = {};
};

class SampleLoop {
 public:
  // Creates the executor's cache. `executor`, `token_bytes` (may be null) and
  // `probe` outlive the loop.
  SampleLoop(executor::Executor* executor, const SampleLoopOptions& options,
             const sampling::TokenBytes* token_bytes, EngineProbe* probe);

  // Any thread may call the two methods below.

  // Returns INVALID_ARGUMENT if one sample would not fit into an empty cache.
  absl::Status CheckFits(const SampleRequest& request) const;
  // Returns EngineInfo::cached_tokens.
  int64_t cached_tokens() const { return sequences_.cached_tokens(); }

  // The engine thread calls the methods below.

  // Returns the number of requests that are being prefilled or decoded.
  int active() const { return static_cast<int>(jobs_.size()); }
  // Returns whether the tenant's request could start now.
  bool HasRoom(const SampleRequest& request, const std::string& tenant);
  // Admits a request. A null `version` means the base model. `*task.request`
  // must live until the request finishes or is cancelled.
  void Admit(const dispatch::SampleTask& task, lora::AdapterVersionPtr version);
  // Removes the request and frees its pages. Returns false if there is no such
  // request.
  bool Cancel(uint64_t work_id);
  // Removes all requests and returns their ids. Called after an error in Step.
  std::vector<uint64_t> CancelAll();

  // Draws one token for each running sample, runs one prefill pass, and starts
  // samples. Throws what Executor throws.
  std::vector<SampleEvent> Step();

 private:
  void StartSamples();
  // Returns the job whose next sample starts next, if a slot is free for it.
  // Passes over the tenants `without`.
  SampleJob* NextToStart(const std::set<std::string>& without);
  [[nodiscard]] bool StartSample(SampleJob& job);
  void Decode();
  // Appends the token to its sample. Returns true if the token ends the sample.
  bool Accept(SampleSequence& sequence, const sampling::DrawResult& drawn);
  // Stores the experts of a finished sample's tokens in its result, if the
  // request has return_routing.
  void AddRouting(const SampleSequence& sample);
  void EraseFailed();
  std::vector<SampleEvent> CollectEvents();

  const model_config::ModelConfig& config() const {
    return executor_.decoder().config();
  }

  executor::Executor& executor_;
  const SampleLoopOptions options_;
  const sampling::TokenBytes* const token_bytes_;
  EngineProbe* const probe_;
  DecodeThreads threads_;
  SampleSequences sequences_;
  SamplePrefill prefill_;
  std::list<SampleJob> jobs_;  // Jobs in the order of admission.
  uint64_t next_order_ = 0;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DECODE_SAMPLE_LOOP_H_
