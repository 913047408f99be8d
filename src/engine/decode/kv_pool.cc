#include "src/engine/decode/kv_pool.h"

#include <algorithm>
#include <utility>

#include "src/executor/model_runner.h"
#include "src/model_config/model_shard.h"

namespace weft::engine {
namespace {

// A prompt has a state until its last sample starts.
constexpr int64_t kLeastStates = 2;

}  // namespace

ModelSizes SizesOf(const model::Decoder& decoder) {
  return {
      .config = decoder.config(),
      .tensor_size = decoder.tensor_size(),
      .element_bytes = static_cast<int64_t>(at::elementSize(decoder.dtype()))};
}

CacheUnits CacheUnitsOf(const ModelSizes& sizes) {
  const model_config::ModelConfig largest =
      model_config::LargestConfig(sizes.config, sizes.tensor_size);
  return {
      .page = executor::PageBytes(largest, sizes.element_bytes, kPageTokens),
      .state = executor::StateBytes(largest, sizes.element_bytes)};
}

CacheCounts CountsIn(const CacheUnits& units, int64_t bytes,
                     int64_t max_sequences) {
  CacheCounts counts;
  if (units.state > 0) {
    const int64_t most = std::max(2 * max_sequences, kLeastStates);
    counts.states =
        1 + std::clamp(bytes / 2 / units.state - 1, kLeastStates, most);
  }
  counts.pages = std::max<int64_t>(1, (bytes - counts.states * units.state) /
                                          std::max<int64_t>(1, units.page));
  return counts;
}

int64_t BytesFor(const CacheUnits& units, int64_t num_pages,
                 int64_t max_sequences) {
  const int64_t pages = num_pages * units.page;
  if (units.state == 0) return pages;
  const int64_t most = std::max(2 * max_sequences, kLeastStates);
  return pages + std::clamp(pages, (1 + kLeastStates) * units.state,
                            (1 + most) * units.state);
}

KvPool::KvPool(const CacheUnits& units, const CacheCounts& counts,
               std::function<void(const CacheCopy&)> copy)
    : units_(units),
      allocator_(static_cast<int32_t>(counts.pages)),
      states_(static_cast<int32_t>(counts.states)),
      prefixes_(&allocator_, kPageTokens, has_states() ? &states_ : nullptr),
      copy_(std::move(copy)) {
  // The first slot is kPaddingState, which stays in use.
  if (has_states()) (void)states_.Allocate();
}

dispatch::SequencePages KvPool::Begin(uint64_t version,
                                      absl::Span<const int32_t> tokens,
                                      int64_t* fork_tokens) {
  dispatch::PrefixCache::Prefix prefix = prefixes_.Lookup(version, tokens);
  dispatch::SequencePages sequence(&allocator_, kPageTokens,
                                   std::move(prefix.pages));
  // The sequence shares the prefix's state until it has a copy.
  if (prefix.state) sequence.SetState({&states_, *prefix.state});
  if (fork_tokens != nullptr) *fork_tokens = prefix.fork_tokens;
  return sequence;
}

bool KvPool::HasRoomForState(const dispatch::SequencePages& from) const {
  if (!has_states() || available_states() > 0) return true;
  // A cached state with one user has two references.
  const std::optional<StateId> shared = from.state().id();
  return shared.has_value() && states_.num_references(*shared) == 2;
}

bool KvPool::TakeState(dispatch::SequencePages& sequence) {
  if (!has_states()) return true;
  const std::optional<StateId> shared = sequence.state().id();
  dispatch::StateSlot own = NewState(shared);
  if (!own.id().has_value()) {
    return shared.has_value() && prefixes_.GiveState(*shared);
  }
  sequence.SetState(std::move(own));
  return true;
}

dispatch::StateSlot KvPool::NewState(std::optional<StateId> from) {
  if (states_.num_free() == 0) prefixes_.EvictState();
  dispatch::StateSlot slot = dispatch::StateSlot::Allocate(&states_);
  if (slot.id()) copy_(StateCopy{.from = from, .to = *slot.id()});
  return slot;
}

bool KvPool::Append(dispatch::SequencePages& sequence, int64_t count) {
  const auto held = static_cast<int64_t>(sequence.pages().size());
  MakeFree(PagesFor(sequence.num_tokens() + count) - held);
  return sequence.AppendMany(count);
}

std::optional<dispatch::SequencePages> KvPool::Fork(
    const dispatch::SequencePages& source) {
  if (!HasRoomForState(source)) return std::nullopt;
  if (source.num_tokens() % kPageTokens > 0) MakeFree(1);
  std::optional<dispatch::SequencePages::Fork> fork = source.ForkSequence();
  if (!fork.has_value()) return std::nullopt;
  if (fork->copy.has_value()) copy_(*fork->copy);
  if (has_states()) fork->sequence.SetState(NewState(source.state().id()));
  return std::move(fork->sequence);
}

void KvPool::CachePrefix(uint64_t version, absl::Span<const int32_t> tokens,
                         dispatch::SequencePages& sequence) {
  prefixes_.Insert(version, tokens, sequence);
}

void KvPool::CacheState(uint64_t version, absl::Span<const int32_t> tokens,
                        const dispatch::SequencePages& sequence, bool ends) {
  if (!has_states() || !prefixes_.LacksState(version, tokens)) return;
  const std::optional<StateId> own = sequence.state().id();
  if (ends) return prefixes_.InsertState(version, tokens, *own);
  const dispatch::StateSlot copy = NewState(own);
  if (copy.id()) prefixes_.InsertState(version, tokens, *copy.id());
}

void KvPool::MakeFree(int64_t count) {
  const int64_t missing = count - allocator_.num_free();
  if (missing > 0) prefixes_.Evict(missing);
}

}  // namespace weft::engine
