// Manages the pages of the key/value cache, the slots of states, and the prompt
// prefixes that are cached in them. When no page or slot is free, cached ones
// that no sequence uses are evicted. The executor owns the memory.
//
// Only models with recurrent layers have states. There each sequence has one
// slot beside its pages.
#ifndef WEFT_SRC_ENGINE_DECODE_KV_POOL_H_
#define WEFT_SRC_ENGINE_DECODE_KV_POOL_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>

#include "absl/types/span.h"
#include "src/dispatch/page_allocator.h"
#include "src/dispatch/prefix_cache.h"
#include "src/dispatch/sequence_pages.h"
#include "src/dispatch/state_slot.h"
#include "src/model/decoder.h"
#include "src/model_config/model_config.h"

namespace weft::engine {

inline constexpr int64_t kPageTokens = 16;

// The properties of a model from which sizes in memory are computed.
struct ModelSizes {
  model_config::ModelConfig config;  // Config of the whole model.
  int tensor_size = 1;               // Ranks that share every layer.
  int64_t element_bytes = 2;  // Bytes of an element of activations and cache.
};
ModelSizes SizesOf(const model::Decoder& decoder);

// The bytes of one page, and of one state; state 0: the model has no states.
struct CacheUnits {
  int64_t page = 0;
  int64_t state = 0;
};
// Returns the units on the rank with the largest part of the model.
CacheUnits CacheUnitsOf(const ModelSizes& sizes);

struct CacheCounts {
  int64_t pages = 0;
  int64_t states = 0;  // With the slot of padding (kPaddingState).
};
// Returns how many pages and states the bytes hold, for up to `max_sequences`
// samples that decode. States get at most half of the bytes, and no more than
// one for each sample, one as a cached prefix of each, and the padding's. At
// least there are one page, and the states of a prompt and of a sample of it.
CacheCounts CountsIn(const CacheUnits& units, int64_t bytes,
                     int64_t max_sequences);
// Returns the fewest bytes, or a few more, in which CountsIn finds `num_pages`.
int64_t BytesFor(const CacheUnits& units, int64_t num_pages,
                 int64_t max_sequences);

// Threads: engine thread only, except num_pages and bytes_per_page.
class KvPool {
 public:
  KvPool(const CacheUnits& units, const CacheCounts& counts,
         std::function<void(const CacheCopy&)> copy);

  static int64_t PagesFor(int64_t num_tokens) {
    return (num_tokens + kPageTokens - 1) / kPageTokens;
  }
  int64_t num_pages() const { return allocator_.num_pages(); }
  // Returns the number of pages that no sequence uses.
  int64_t available_pages() const {
    return allocator_.num_free() + allocator_.num_idle();
  }
  // Returns the number of pages of cached prefixes, used by sequences or not.
  int64_t prefix_pages() const { return prefixes_.num_pages(); }
  int64_t bytes_per_page() const { return units_.page; }
  bool has_states() const { return units_.state > 0; }
  int64_t bytes_per_state() const { return units_.state; }
  // Returns the number of slots, with the padding's.
  int64_t num_slots() const { return states_.num_pages(); }
  // Returns the number of states that sequences could have.
  int64_t num_states() const { return std::max<int64_t>(num_slots() - 1, 0); }
  // Returns the number of states that no sequence uses.
  int64_t available_states() const {
    return states_.num_free() + states_.num_idle();
  }
  // Returns whether a sequence that begins as `from` could have a state of its
  // own, or needs none.
  bool HasRoomForState(const dispatch::SequencePages& from) const;

  // Returns a sequence that begins with the longest prefix of `tokens` that is
  // cached for `version` (a weights id), in whole pages. The sequence is empty
  // if no prefix is cached. It has no state of its own before TakeState. If
  // `fork_tokens` is not null, sets it to Prefix::fork_tokens.
  dispatch::SequencePages Begin(uint64_t version,
                                absl::Span<const int32_t> tokens,
                                int64_t* fork_tokens = nullptr);
  // Gives the sequence of Begin a state of its own: a copy of the prefix's, or
  // zeros. If there is no slot for a copy, the sequence takes the prefix's
  // state from the cache, unless another sequence uses it. Does nothing in
  // models without states. Returns false if there is no state to have.
  [[nodiscard]] bool TakeState(dispatch::SequencePages& sequence);
  // Makes room for `count` more tokens. If there is no room, returns false and
  // leaves the sequence as it is.
  [[nodiscard]] bool Append(dispatch::SequencePages& sequence, int64_t count);
  // Returns a second sequence with the same tokens and a copy of the state.
  // Returns none if no page is free for the copy of a partly filled last page,
  // or no slot for that of the state.
  std::optional<dispatch::SequencePages> Fork(
      const dispatch::SequencePages& source);

  // Caches the full pages of `tokens`, which are the sequence's first tokens
  // and were computed with `version`. If equal pages are cached already, this
  // sequence shares them from now on.
  void CachePrefix(uint64_t version, absl::Span<const int32_t> tokens,
                   dispatch::SequencePages& sequence);
  // Caches the state of the sequence, which has read `tokens`, if the cache has
  // their pages and lacks the state, and `tokens` are whole pages. A sequence
  // that ends gives its slot. Else this copies the state, if a slot is free.
  void CacheState(uint64_t version, absl::Span<const int32_t> tokens,
                  const dispatch::SequencePages& sequence, bool ends);
  void Forget(uint64_t version) { prefixes_.DropVersion(version); }

 private:
  // Evicts cached prefixes until `count` pages are free or nothing can be
  // evicted.
  void MakeFree(int64_t count);
  // Returns a slot, with a copy of `from` or zeros. If need be, evicts a cached
  // state. Returns an empty one if no slot is free.
  dispatch::StateSlot NewState(std::optional<StateId> from);

  const CacheUnits units_;
  dispatch::PageAllocator allocator_;
  dispatch::PageAllocator states_;
  dispatch::PrefixCache prefixes_;
  const std::function<void(const CacheCopy&)> copy_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DECODE_KV_POOL_H_
