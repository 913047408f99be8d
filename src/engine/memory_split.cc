#include "src/engine/memory_split.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace weft::engine {
namespace {

// cuBLAS, NCCL and attention ask for some hundred megabytes, whatever the
// device; pieces that no request fits into grow with it.
constexpr int64_t kWorkspaceBytes = int64_t{512} << 20;
constexpr int64_t kFragmentShare = 16;
// Of what is there without the reserve, for the cache.
constexpr int64_t kCacheShare = 4;

absl::Status TooLittle(const MemoryNeeds& needs, const MemorySplit& least) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "the model leaves ", needs.available,
      " bytes of device memory "
      "(--device-memory-share), at least ",
      least.adapters + least.cache + least.activations + least.reserve,
      " are needed: ", least.adapters, " for an adapter (--max-rank), ",
      least.cache, " for keys and values (--kv-cache-bytes, --max-context), ",
      least.activations,
      " for activations (--memory-budget, --max-batch-tokens, "
      "--loss-chunk-size) and a reserve of ",
      least.reserve));
}

}  // namespace

absl::StatusOr<MemorySplit> SplitMemory(const MemoryNeeds& needs) {
  const auto given = [](int64_t wanted, int64_t least) {
    return wanted > 0 ? wanted : least;
  };
  MemorySplit split{
      .num_adapters = given(needs.wanted_adapters, 1),
      .adapters = needs.adapter,
      .cache = given(needs.wanted_cache, needs.context),
      .activations = given(needs.wanted_activations, needs.activations),
      .reserve = kWorkspaceBytes + needs.available / kFragmentShare};
  const int64_t usable = needs.available - split.reserve;
  int64_t spare = usable - split.adapters - split.cache - split.activations;
  if (spare < 0) return TooLittle(needs, split);

  const auto grow_to = [&](int64_t target, int64_t& part) {
    const int64_t more = std::clamp<int64_t>(target - part, 0, spare);
    part += more;
    spare -= more;
  };
  if (needs.wanted_activations == 0) {
    grow_to(needs.full_batch, split.activations);
  }
  if (needs.wanted_cache == 0) {
    grow_to(std::min(usable / kCacheShare, needs.most_cache), split.cache);
  }
  const int64_t most = given(needs.wanted_adapters, needs.most_adapters);
  const int64_t fitting = std::min(most, 1 + spare / needs.adapter);
  grow_to(fitting * needs.adapter, split.adapters);
  if (needs.wanted_adapters == 0) split.num_adapters = fitting;
  if (needs.wanted_activations == 0) split.activations += spare;
  return split;
}

}  // namespace weft::engine
