// Messages from rank 0 to the other ranks.
#ifndef WEFT_SRC_EXECUTOR_MESSAGE_H_
#define WEFT_SRC_EXECUTOR_MESSAGE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"
#include "src/executor/plan.h"
#include "src/model/decoder.h"
#include "src/parallel/communicator.h"
#include "src/request/adapter.h"
#include "src/request/cache_copy.h"

namespace weft::executor {

// Allocates the key/value cache and the slots of states.
struct CacheSize {
  int64_t num_pages = 0;
  int64_t page_tokens = 0;
  int64_t num_states = 0;
};
// Announces weights that later plans name. Each other rank then receives its
// part of the weights as a tensor.
struct NewVersion {
  uint64_t id = 0;  // A lora::WeightsId.
  LoraConfig config;
};
// Drops versions that no plan will name any more.
struct DropVersions {
  std::vector<uint64_t> ids;
};
// Runs plans[i] on replica i. Replicas without a plan have no work.
struct TrainCommand {
  std::vector<TrainPlan> plans;
};
// Runs the backward pass of the latest TrainCommand's plans. Both vectors are
// indexed by replica.
struct GradientsCommand {
  std::vector<at::Tensor> gradients_E;  // dLoss/dlogprob, f32.
  // The ids of versions. The ranks of a replica send back the gradients of its
  // versions in this order.
  std::vector<std::vector<uint64_t>> trained;
};
struct CacheCommand {
  CachePlan plan;
};
struct StopCommand {};

using Message =
    std::variant<CacheSize, NewVersion, DropVersions, TrainCommand,
                 GradientsCommand, CacheCommand, CacheCopy, StopCommand>;

// Returns the weights with this id. Throws c10::Error if there are none.
using FindVersion = std::function<lora::AdapterVersionPtr(uint64_t id)>;

// Returns the message as bytes. For the weights in a routing, the bytes contain
// only their ids. Decode gets the weights from `find`.
std::string Encode(const Message& message);
// Throws c10::Error if the bytes end too early or the kind of message is
// unknown. Also throws what `find` throws.
Message Decode(absl::string_view bytes, const FindVersion& find);

// SendMessage sends from rank 0 to all other ranks, which call ReceiveMessage.
// ReceiveMessage returns the bytes that Encode made of the message. On failure,
// both functions throw std::exception.
void SendMessage(const Message& message, parallel::Communicator& commands);
std::string ReceiveMessage(parallel::Communicator& commands);

// Returns the adapter version with which this rank's decoder runs. `compute_N`
// has the N weights that the adapter adds to this rank's part of the model.
lora::AdapterVersionPtr MakeVersion(const model::Decoder& decoder,
                                    const LoraConfig& config,
                                    at::Tensor compute_N);

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_MESSAGE_H_
