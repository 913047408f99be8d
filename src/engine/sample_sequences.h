// Keeps the sequences of the decode loop, and decides which of them hold pages
// of the key/value cache.
//
// A sequence takes pages as it grows. If no page is left, cached prefixes are
// evicted first. Then the youngest sequence is preempted: it loses its pages
// and keeps its tokens. Later it is prefilled again and continues with the same
// random numbers, so only rounding can change its result. The oldest sequence
// always has room for all its tokens (CheckFits), so one sequence always makes
// progress.
#ifndef WEFT_SRC_ENGINE_SAMPLE_SEQUENCES_H_
#define WEFT_SRC_ENGINE_SAMPLE_SEQUENCES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "src/engine/engine_probe.h"
#include "src/engine/kv_pool.h"
#include "src/engine/sample_state.h"
#include "src/executor/executor.h"
#include "src/lora/adapter.h"

namespace weft::engine {

class SampleSequences {
 public:
  // Creates the executor's cache. `executor` and `probe` outlive the sequences.
  SampleSequences(executor::Executor* executor, int64_t kv_cache_bytes,
                  EngineProbe* probe);

  // Any thread may call the method below.

  // Returns RESOURCE_EXHAUSTED if one sample would not fit into an empty cache.
  [[nodiscard]] absl::Status CheckFits(const SampleRequest& request) const;

  // The engine thread calls the methods below.

  // Returns whether the request's prompt could start now. With the prompt,
  // there may be at most `max_sequences` sequences, not counting prompts that
  // are prefilled.
  [[nodiscard]] bool HasRoom(const SampleRequest& request,
                             int max_sequences) const;

  // Returns all sequences, oldest first.
  [[nodiscard]] std::map<SampleAge, SampleSequence>& by_age() {
    return sequences_;
  }
  // REQUIRES: the job's last sample has not started.
  [[nodiscard]] SampleSequence& PromptOf(const SampleJob& job) {
    return sequences_.at({job.order, kPrompt});
  }
  // Adds a sequence. Its job outlives the sequence. From now on prefixes may be
  // cached for the job's version.
  void Add(SampleSequence sequence);
  void Erase(SampleAge age) { sequences_.erase(age); }
  void EraseAllOf(const SampleJob& job);
  void Clear() { sequences_.clear(); }

  // Allocates the pages of `sequence`, which has no pages yet. Reuses a cached
  // prefix. Returns false if the sequence must wait.
  [[nodiscard]] bool TakePages(SampleSequence& sequence);
  // Returns pages with the prompt's tokens for one of its samples; none if the
  // sample must wait.
  [[nodiscard]] std::optional<kv::SequencePages> Fork(
      const SampleSequence& prompt);
  // Makes room for the next token of every running sequence. Preempts the
  // youngest sequences until there is room. Returns the sequences that still
  // run, oldest first.
  [[nodiscard]] std::vector<SampleSequence*> GrowRunning();
  // Keeps the sequence's full pages for later sequences of the same version
  // that begin with the same tokens.
  void CachePrefix(SampleSequence& sequence);
  // Drops cached prefixes of versions that no request can use any more.
  void ForgetDeadVersions();

  // Returns the experts [N, L K], i16, of the N tokens in the sequence's pages,
  // for L layers with experts and K experts per token.
  [[nodiscard]] at::Tensor ExpertsOf(const SampleSequence& sequence) const;
  void ReportPages();

 private:
  // Returns whether a sequence of this age may take `count` pages to start or
  // to continue. Leaves one page free for each sample that has pages. If no
  // sample has pages and no prompt is being prefilled, preempts younger prompts
  // that have pages.
  [[nodiscard]] bool MakeRoom(int64_t count, SampleAge age);
  // Returns the youngest sequence with pages; null if there is none.
  [[nodiscard]] SampleSequence* Youngest();
  void Preempt(SampleSequence& sequence);

  executor::Executor& executor_;
  EngineProbe* const probe_;
  KvPool pool_;
  std::map<SampleAge, SampleSequence> sequences_;
  // Versions whose prefixes may be cached, by weights id.
  std::map<uint64_t, std::weak_ptr<const lora::AdapterVersion>> versions_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_SAMPLE_SEQUENCES_H_
