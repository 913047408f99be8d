// At startup, divides a device's memory between adapters, key/value cache,
// activations, decode graphs and a reserve. memory_plan.h computes the input,
// MemoryNeeds, from the options and the model.
#ifndef WEFT_SRC_ENGINE_START_MEMORY_SPLIT_H_
#define WEFT_SRC_ENGINE_START_MEMORY_SPLIT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::engine {

// A micro-batch of this length has nearly the full GEMM rate on a large device.
// More tokens gain only a few percent. The micro-batch gets memory right after
// the minimums and the decode graphs, so that it recomputes few layers.
inline constexpr int64_t kGoodBatchTokens = 4096;

// Memory for the activations of a micro-batch and for a chunk of logits.
struct BatchNeeds {
  int64_t tokens = 0;
  int64_t bytes = 0;         // With the fewest recomputed layers.
  int64_t layer_saving = 0;  // Bytes that one more recomputed layer saves; > 0.
};

// The input of SplitMemory: bytes, and numbers of adapters and layers.
struct MemoryNeeds {
  int64_t available = 0;    // Free after the model is loaded.
  int64_t adapter = 0;      // One adapter of the largest rank, in training.
  int64_t context = 0;      // Keys and values of the longest sequence.
  int64_t usual_cache = 0;  // Cache for a usual load; >= context.
  int64_t most_cache = 0;   // The most cache that is of use.
  int64_t decode_graphs = 0;
  // The possible micro-batches, from short to long. The shortest must fit.
  std::vector<BatchNeeds> batches;
  // BatchNeeds::bytes of the batch that gets memory before further cache and
  // adapters. It has kGoodBatchTokens unless the caller chooses another length.
  int64_t good_batch = 0;
  int least_recomputed = 0;  // Fewest layers that the policy permits.
  int most_recomputed = 0;
  int64_t most_adapters = 1;  // The most adapters that are of use.
  // Values that the operator has set. SplitMemory keeps them. 0: not set.
  int64_t wanted_adapters = 0;
  int64_t wanted_cache = 0;
  int64_t wanted_activations = 0;
};

// The reason why a part is not larger.
enum class Limit : uint8_t {
  kNothing,  // The part needs no more.
  kMemory,   // No memory is left.
  kFlag,     // The operator set the size of the part.
};
absl::string_view NameOf(Limit limit);

struct MemorySplit {
  int64_t model = 0;  // Bytes of the loaded model; only for reports.
  int64_t num_adapters = 0;
  int64_t adapters = 0;  // Bytes. May be too few if all adapters have the
                         // largest rank.
  int64_t cache = 0;
  int64_t activations = 0;
  int64_t decode_graphs = 0;
  int64_t reserve = 0;
  // The longest micro-batch, and the layers that it recomputes.
  int64_t batch_tokens = 0;
  int recomputed_layers = 0;
  Limit adapters_limit = Limit::kNothing;
  Limit cache_limit = Limit::kNothing;
  Limit batch_limit = Limit::kNothing;
  Limit graphs_limit = Limit::kNothing;

  // Returns the bytes of all parts except the model.
  int64_t Total() const {
    return adapters + cache + activations + decode_graphs + reserve;
  }
};

// Divides needs.available. First each part gets its minimum: one adapter, the
// cache of one longest sequence, the shortest micro-batch, and the reserve. If
// the operator sets the size of the cache or of the activations, the part gets
// this size and no more. The reserve is for libraries' workspaces, for parts of
// weights that are widened for a product, for further versions of adapters and
// for fragmentation. The rest goes, in this order, to
//   1. the decode graphs, all or none, because they are small;
//   2. a micro-batch of at most good_batch bytes, with few recomputed layers;
//   3. the cache, up to usual_cache;
//   4. a few adapters, or the number that the operator sets, so that
//      micro-batches can mix adapters without moving any to the device;
//   5. a longer micro-batch, over kGoodBatchTokens only if it recomputes no
//      more layers than needs.least_recomputed;
//   6. further adapters, then the cache, then the activations.
// The operator's number of adapters is always accepted, even if their memory is
// too small for it, because adapters rarely have the largest rank on every
// layer.
// Errors: RESOURCE_EXHAUSTED, with bytes and flags, if the minimums do not fit.
absl::StatusOr<MemorySplit> SplitMemory(const MemoryNeeds& needs);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_START_MEMORY_SPLIT_H_
