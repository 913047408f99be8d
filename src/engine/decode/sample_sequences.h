// Keeps the sequences of the decode loop, and decides which of them hold pages
// of the key/value cache.
//
// Tenants share the slots and the pages of the loop (decode_order.h). With one
// tenant, the order of sequences is that of their age. Samples that have no
// slot wait, and keep their pages until others need them.
//
// A sequence takes pages as it grows. If no page is left, cached prefixes are
// evicted first. Then the last sequence in order is preempted: it loses its
// pages and keeps its tokens. Later it is prefilled again and continues with
// the same random numbers, so only rounding can change its result. The first
// sequence in order always has room for all its tokens (CheckFits), so one
// sequence always makes progress.
//
// In models with recurrent layers a sequence with pages also has a state, which
// is that after its last token. Slots of states run out as pages do.
//
// A prefix is of use only with the state at its end. Prefill keeps states at
// the last page border before a prompt's end, where a sequence with the same
// prompt, or with one that goes on, finds it. It also keeps one where a prompt
// leaves the pages of an earlier one, because prompts that share a beginning
// often are many. Pieces of prefill end at these two places. States at every
// border would be useful seldom, and each takes the memory of hundreds of
// tokens. A sequence that ends at a border leaves its own state there.
//
// Samples in flight take the adapter's newer versions between two tokens, and a
// prompt takes them until it has pages. So one version computes and scores the
// prompt, and draws the first tokens. From then on a sample has keys of several
// versions, or it loses its pages as if it were preempted, and is prefilled
// again. No other sequence ever begins with keys of several versions.
#ifndef WEFT_SRC_ENGINE_DECODE_SAMPLE_SEQUENCES_H_
#define WEFT_SRC_ENGINE_DECODE_SAMPLE_SEQUENCES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/dispatch/decode_order.h"
#include "src/engine/decode/kv_pool.h"
#include "src/engine/decode/sample_state.h"
#include "src/engine/device/engine_probe.h"
#include "src/executor/executor.h"
#include "src/lora/adapter.h"

namespace weft::engine {

class SampleSequences {
 public:
  // Creates the executor's cache. At most `max_running` samples have a slot.
  // `weights` are the tenants' weights. `latest` is for samples in flight.
  // `executor` and `probe` outlive the sequences.
  SampleSequences(executor::Executor* executor, int64_t kv_cache_bytes,
                  int max_running, std::map<std::string, int64_t> weights,
                  LatestVersion latest, EngineProbe* probe);

  // Any thread may call the two methods below.

  // Returns INVALID_ARGUMENT if one sample would not fit into an empty cache.
  absl::Status CheckFits(const SampleRequest& request) const;
  // Returns EngineInfo::cached_tokens.
  int64_t cached_tokens() const;

  // The engine thread calls the methods below.

  // Returns whether the tenant's request could start now: there is a slot for
  // its prompt, and pages, which sequences behind it would yield. A tenant
  // without sequences always has room for one request.
  bool HasRoom(const SampleRequest& request, const std::string& tenant);

  // Returns all sequences, oldest first.
  const std::map<SampleAge, SampleSequence>& by_age() const {
    return sequences_;
  }
  // Returns all sequences in order, and sets their `place` and `has_slot`.
  std::vector<SampleSequence*> InOrder();
  // Returns whether one more sample of the job may start. REQUIRES: InOrder has
  // placed the job's prompt.
  bool HasSlotFor(const SampleJob& job);
  // REQUIRES: the job's last sample has not started.
  SampleSequence& PromptOf(const SampleJob& job) {
    return sequences_.at({job.order, kPrompt});
  }
  // Adds a sequence. Its job outlives the sequence. From now on prefixes may be
  // cached for the sequence's version.
  void Add(SampleSequence sequence);
  void Erase(SampleAge age) { sequences_.erase(age); }
  void EraseAllOf(const SampleJob& job);
  void Clear() { sequences_.clear(); }

  // Allocates the pages of `sequence`, which has no pages yet. Reuses a cached
  // prefix. Returns false if the sequence must wait.
  [[nodiscard]] bool TakePages(SampleSequence& sequence);
  // Returns pages with the prompt's tokens for one of its samples; none if the
  // sample must wait.
  std::optional<dispatch::SequencePages> Fork(const SampleSequence& prompt);
  // Makes room for the next token of every sample that has a slot. Preempts the
  // last sequences until there is room. Returns the samples that run, in order.
  std::vector<SampleSequence*> GrowRunning();
  // Returns where a piece of prefill ends that could go on to `end`.
  int64_t EndOfPiece(const SampleSequence& sequence, int64_t end) const;
  // Keeps the sequence's full pages for later sequences of the same version
  // that begin with the same tokens, and the state if the sequence `ends`, or
  // if EndOfPiece chose its place.
  void CachePrefix(SampleSequence& sequence, bool ends);
  // Gives the latest versions to sequences of requests in flight. Call it
  // between two tokens.
  void TakeVersions();
  // Drops cached prefixes of versions that no request can use any more.
  void ForgetDeadVersions();

  // Returns the experts [N, L K], i16, of the N tokens in the sequence's pages,
  // for L layers with experts and K experts per token.
  at::Tensor ExpertsOf(const SampleSequence& sequence) const;
  void ReportPages();

 private:
  // Returns whether a sequence of the tenant at this place, which begins as
  // `from`, may take `count` pages and a state to start or to continue. Leaves
  // one page free for each sample that has pages. Preempts sequences of other
  // tenants that are behind. If no sample runs and no prompt is being
  // prefilled, also preempts those of the tenant that are behind.
  [[nodiscard]] bool MakeRoom(int64_t count,
                              const dispatch::SequencePages& from,
                              const std::string& tenant,
                              const dispatch::DecodeOrder::Place& place);
  // Returns the pages that MakeRoom leaves for a sequence. Sets *moves to
  // whether some sequence with pages makes progress.
  int64_t SparePages(bool* moves) const;
  static bool MayTakeFrom(const dispatch::DecodeOrder::Place& place,
                          const SampleSequence& other);
  // Returns the last sequence that has pages and is behind `place`; null if
  // there is none. Passes over sequences of `passed`, unless it is null.
  SampleSequence* LastBehind(const dispatch::DecodeOrder::Place& place,
                             const std::string* passed);
  // Returns all sequences, oldest first. With several tenants, a prompt that
  // only waits for its samples to start comes behind those that have started.
  // So no sample waits for pages that its own or another tenant's prompt holds
  // for later ones.
  std::vector<SampleSequence*> Line();
  static std::vector<dispatch::DecodeOrder::Member> MembersOf(
      const std::vector<SampleSequence*>& line);
  // Returns the place of a new prompt of the tenant.
  dispatch::DecodeOrder::Place NextPlace(const std::string& tenant);
  void TakeVersion(SampleSequence& sequence, lora::AdapterVersionPtr version);
  void Preempt(SampleSequence& sequence);
  // Frees the pages of the sequence, which must then be prefilled again.
  void DropPages(SampleSequence& sequence);

  executor::Executor& executor_;
  EngineProbe* const probe_;
  const int max_running_;
  KvPool pool_;
  dispatch::DecodeOrder order_;
  const LatestVersion latest_;
  std::map<SampleAge, SampleSequence> sequences_;
  // Versions whose prefixes may be cached, by weights id.
  std::map<uint64_t, std::weak_ptr<const lora::AdapterVersion>> versions_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DECODE_SAMPLE_SEQUENCES_H_
