// How a device's memory is shared out at the start: adapters, key/value cache,
// activations, graphs of the decode step, and a reserve. Arithmetic only; who
// asks the device and the model is memory_plan.h.
#ifndef WEFT_SRC_STARTUP_MEMORY_SPLIT_H_
#define WEFT_SRC_STARTUP_MEMORY_SPLIT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::engine {

// Full GEMM rate on a large device, nearly: worth all memory that it takes to
// recompute no layer. More tokens at a time gain a few percent.
inline constexpr int64_t kGoodBatchTokens = 4096;

// The activations of a micro-batch, with a head's chunk of logits.
struct BatchNeeds {
  int64_t tokens = 0;
  int64_t bytes = 0;         // With no more layers recomputed than must be.
  int64_t layer_saving = 0;  // Bytes less for each further one, > 0.
};

// Bytes, but for numbers of adapters and layers.
struct MemoryNeeds {
  int64_t available = 0;    // What the model has left of the device.
  int64_t adapter = 0;      // One adapter of the largest rank, in training.
  int64_t context = 0;      // Keys and values of the longest sequence.
  int64_t usual_cache = 0;  // What decoding is configured for, >= context.
  int64_t most_cache = 0;   // No use for more.
  int64_t decode_graphs = 0;
  // What a micro-batch may be, from short to long; the shortest must fit.
  std::vector<BatchNeeds> batches;
  // BatchNeeds::bytes of the one that comes first: of kGoodBatchTokens, or of
  // the longest if it is shorter or the operator wants it.
  int64_t good_batch = 0;
  int least_recomputed = 0;  // Layers, as the policy has it.
  int most_recomputed = 0;
  int64_t most_adapters = 1;  // No use for more.
  // What the operator has set, which is neither lowered nor raised; 0: nothing.
  int64_t wanted_adapters = 0;
  int64_t wanted_cache = 0;
  int64_t wanted_activations = 0;
};

// Why a part is not larger.
enum class Limit : uint8_t {
  kNothing,  // It has what it has a use for.
  kMemory,   // There is no more.
  kFlag,     // The operator has set it.
};
[[nodiscard]] absl::string_view NameOf(Limit limit);

struct MemorySplit {
  int64_t model = 0;  // Taken before anything is shared out; for reports.
  int64_t num_adapters = 0;
  int64_t adapters = 0;  // For fewer of the largest if the operator wants more.
  int64_t cache = 0;
  int64_t activations = 0;
  int64_t decode_graphs = 0;
  int64_t reserve = 0;
  // The longest micro-batch, and its layers that are recomputed.
  int64_t batch_tokens = 0;
  int recomputed_layers = 0;
  Limit adapters_limit = Limit::kNothing;
  Limit cache_limit = Limit::kNothing;
  Limit batch_limit = Limit::kNothing;
  Limit graphs_limit = Limit::kNothing;

  // Bytes given away, the reserve's among them.
  [[nodiscard]] int64_t Total() const {
    return adapters + cache + activations + decode_graphs + reserve;
  }
};

// Everybody gets what it must have: one adapter, one context, the shortest
// micro-batch, and the reserve, which is for libraries' workspaces, further
// versions of adapters and fragmentation. What is left goes, in this order, to
//   1. the graphs of the decode step, all of them or none: they are small;
//   2. a micro-batch within good_batch without recomputation, or with as little
//      of it as there is memory;
//   3. the cache, up to usual_cache;
//   4. a few adapters, so that micro-batches can mix them without moving any;
//   5. the longest micro-batch that recomputes nothing;
//   6. further adapters, then the cache, then the activations.
// Adapters that the operator wants are rarely of the largest rank on every
// layer: all of them are taken, with the memory that there is for them.
// Errors: RESOURCE_EXHAUSTED with the bytes of each and the flags that change
// them.
[[nodiscard]] absl::StatusOr<MemorySplit> SplitMemory(const MemoryNeeds& needs);

}  // namespace weft::engine

#endif  // WEFT_SRC_STARTUP_MEMORY_SPLIT_H_
