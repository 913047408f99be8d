#include "src/engine/start/memory_split.h"

#include <algorithm>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace weft::engine {
namespace {

// The two parts of the reserve. cuBLAS, NCCL and attention take a few hundred
// megabytes on every device. Fragmentation takes 1 / kFragmentShare of the
// memory that the model leaves.
constexpr int64_t kWorkspaceBytes = int64_t{512} << 20;
constexpr int64_t kFragmentShare = 16;
// Up to this many adapters get memory before the micro-batch gets more than
// needs.good_batch.
constexpr int64_t kFewAdapters = 8;

struct Batch {
  int64_t tokens = 0;
  int64_t bytes = 0;
  int recomputed = 0;
};

Batch WithRecomputed(const MemoryNeeds& needs, const BatchNeeds& batch,
                     int64_t recomputed) {
  return {.tokens = batch.tokens,
          .bytes = batch.bytes -
                   (recomputed - needs.least_recomputed) * batch.layer_saving,
          .recomputed = static_cast<int>(recomputed)};
}

// Returns the micro-batch that needs the least memory: the shortest one, with
// the most recomputed layers.
Batch LeastBatch(const MemoryNeeds& needs) {
  return WithRecomputed(needs, needs.batches.front(), needs.most_recomputed);
}

// Returns the longest micro-batch that fits in `budget`; LeastBatch if none
// fits. A batch may recompute more layers than needs.least_recomputed in order
// to fit. A batch of more than kGoodBatchTokens may do so only if it is the
// shortest of needs.batches.
Batch LongestBatch(const MemoryNeeds& needs, int64_t budget) {
  for (auto batch = needs.batches.rbegin(); batch != needs.batches.rend();
       ++batch) {
    const int64_t missing = std::max<int64_t>(batch->bytes - budget, 0);
    const int64_t more =
        (missing + batch->layer_saving - 1) / batch->layer_saving;
    if (needs.least_recomputed + more > needs.most_recomputed) continue;
    if (more > 0 && batch->tokens > kGoodBatchTokens &&
        batch->tokens > needs.batches.front().tokens) {
      continue;
    }
    return WithRecomputed(needs, *batch, needs.least_recomputed + more);
  }
  return LeastBatch(needs);
}

absl::Status TooLittle(const MemoryNeeds& needs, const MemorySplit& least) {
  return absl::ResourceExhaustedError(
      absl::StrCat("the model leaves ", needs.available,
                   " bytes of device memory "
                   "(--device-memory-share), at least ",
                   least.Total(), " are needed: ", least.adapters,
                   " for an adapter (--max-rank), ", least.cache,
                   " for keys and values (--kv-cache-bytes, --max-context), ",
                   least.activations,
                   " for activations (--memory-budget, --max-batch-tokens, "
                   "--loss-chunk-size) and a reserve of ",
                   least.reserve));
}

// Gives the spare bytes to one part after another.
class Sharing {
 public:
  Sharing(const MemoryNeeds& needs, MemorySplit least)
      : needs_(needs), split_(least), spare_(needs.available - least.Total()) {
    SetBatch(LongestBatch(needs_, split_.activations));
  }

  void GrowBatch(int64_t most_bytes) {
    if (needs_.wanted_activations > 0) return;
    const int64_t budget =
        split_.activations +
        std::clamp<int64_t>(most_bytes - split_.activations, 0, spare_);
    const Batch batch = LongestBatch(needs_, budget);
    GrowTo(batch.bytes, split_.activations);
    SetBatch(batch);
  }

  void GrowCache(int64_t target) {
    if (needs_.wanted_cache == 0) GrowTo(target, split_.cache);
  }

  void GrowGraphs() {
    if (spare_ < needs_.decode_graphs) {
      split_.graphs_limit = Limit::kMemory;
    } else {
      GrowTo(needs_.decode_graphs, split_.decode_graphs);
    }
  }

  void GrowAdapters(int64_t most) {
    const int64_t held = split_.adapters / needs_.adapter;
    const int64_t fitting =
        std::min(std::max(most, held), held + spare_ / needs_.adapter);
    GrowTo(fitting * needs_.adapter, split_.adapters);
    if (needs_.wanted_adapters == 0) split_.num_adapters = fitting;
  }

  MemorySplit Finish() {
    if (needs_.wanted_activations == 0) split_.activations += spare_;
    if (needs_.wanted_adapters > 0) {
      split_.adapters_limit = Limit::kFlag;
    } else if (split_.num_adapters < needs_.most_adapters) {
      split_.adapters_limit = Limit::kMemory;
    }
    if (needs_.wanted_cache > 0) {
      split_.cache_limit = Limit::kFlag;
    } else if (split_.cache < needs_.usual_cache) {
      split_.cache_limit = Limit::kMemory;
    }
    split_.batch_limit = BatchLimit();
    return split_;
  }

 private:
  void GrowTo(int64_t target, int64_t& part) {
    const int64_t more = std::clamp<int64_t>(target - part, 0, spare_);
    part += more;
    spare_ -= more;
  }

  void SetBatch(const Batch& batch) {
    split_.batch_tokens = batch.tokens;
    split_.recomputed_layers = batch.recomputed;
  }

  Limit BatchLimit() const {
    const bool is_longest =
        split_.batch_tokens == needs_.batches.back().tokens &&
        split_.recomputed_layers == needs_.least_recomputed;
    if (!is_longest) {
      return needs_.wanted_activations > 0 ? Limit::kFlag : Limit::kMemory;
    }
    return needs_.batches.size() == 1 ? Limit::kFlag : Limit::kNothing;
  }

  const MemoryNeeds& needs_;
  MemorySplit split_;
  int64_t spare_;
};

}  // namespace

absl::string_view NameOf(Limit limit) {
  switch (limit) {
    case Limit::kMemory:
      return "memory";
    case Limit::kFlag:
      return "flag";
    case Limit::kNothing:
      break;
  }
  return "nothing";
}

absl::StatusOr<MemorySplit> SplitMemory(const MemoryNeeds& needs) {
  const auto given = [](int64_t wanted, int64_t other) {
    return wanted > 0 ? wanted : other;
  };
  const MemorySplit least{
      .num_adapters = given(needs.wanted_adapters, 1),
      .adapters = needs.adapter,
      .cache = given(needs.wanted_cache, needs.context),
      .activations = given(needs.wanted_activations, LeastBatch(needs).bytes),
      .reserve = kWorkspaceBytes + needs.available / kFragmentShare};
  if (least.Total() > needs.available) return TooLittle(needs, least);

  const int64_t most_adapters =
      given(needs.wanted_adapters, needs.most_adapters);
  Sharing sharing(needs, least);
  sharing.GrowGraphs();
  sharing.GrowBatch(needs.good_batch);
  sharing.GrowCache(needs.usual_cache);
  sharing.GrowAdapters(
      given(needs.wanted_adapters, std::min(kFewAdapters, most_adapters)));
  sharing.GrowBatch(std::numeric_limits<int64_t>::max());
  sharing.GrowAdapters(most_adapters);
  sharing.GrowCache(needs.most_cache);
  return sharing.Finish();
}

}  // namespace weft::engine
