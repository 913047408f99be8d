// What rank 0 tells the other ranks.
#ifndef WEFT_SRC_EXECUTOR_MESSAGE_H_
#define WEFT_SRC_EXECUTOR_MESSAGE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"
#include "src/executor/plan.h"
#include "src/kv/sequence_pages.h"
#include "src/request/adapter.h"

namespace weft::executor {

// How large the cache is.
struct CacheSize {
  int64_t num_pages = 0;
  int64_t page_tokens = 0;
};
// Weights that plans will name from now on. Each rank receives its part of them
// next.
struct NewVersion {
  uint64_t id = 0;  // lora::WeightsId.
  LoraConfig config;
};
// No plan will name them any more.
struct DropVersions {
  std::vector<uint64_t> ids;
};
// Plans by replica; those beyond the last one have nothing to do.
struct TrainCommand {
  std::vector<TrainPlan> plans;
};
// The backward pass of the plans before, by replica.
struct GradientsCommand {
  std::vector<at::Tensor> gradients_E;  // dLoss/dlogprob, f32.
  // Ids of the versions whose gradients the rank sends back, in that order.
  std::vector<std::vector<uint64_t>> trained;
};
struct CacheCommand {
  CachePlan plan;
};
struct CopyPageCommand {
  kv::PageCopy copy;
};
struct StopCommand {};

using Message =
    std::variant<CacheSize, NewVersion, DropVersions, TrainCommand,
                 GradientsCommand, CacheCommand, CopyPageCommand, StopCommand>;

// The weights of an id; throws c10::Error when there are none.
using FindVersion = std::function<lora::AdapterVersionPtr(uint64_t id)>;

// A routing's segments travel with the ids of their weights; Decode looks the
// weights up.
[[nodiscard]] std::string Encode(const Message& message);
// Throws c10::Error.
[[nodiscard]] Message Decode(absl::string_view bytes, const FindVersion& find);

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_MESSAGE_H_
