#include "src/request/request_bytes.h"

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace weft {
namespace {

// What the request itself, its places in the dispatcher and its callbacks take.
constexpr int64_t kRequestBytes = 4096;
// What the allocator adds to an allocation.
constexpr int64_t kAllocationBytes = 24;
// What the scheduler notes of a datum.
constexpr int64_t kScheduledBytes = 2 * sizeof(int64_t);
// What a map adds to an entry.
constexpr int64_t kNodeBytes = 32 + kAllocationBytes;

// Return what the value takes besides its own size.
int64_t HeldBytes(const std::pair<int32_t, float>& /*bias*/) { return 0; }
int64_t HeldBytes(const CustomLossInput& input);
int64_t HeldBytes(const SampledSpan& span);
int64_t HeldBytes(const Datum& datum);
int64_t HeldBytes(const std::string& text) {
  return static_cast<int64_t>(text.capacity()) + kAllocationBytes;
}

template <typename T>
int64_t HeldBytes(const std::vector<T>& list) {
  if (list.capacity() == 0) return 0;
  int64_t bytes =
      kAllocationBytes + static_cast<int64_t>(list.capacity() * sizeof(T));
  if constexpr (!std::is_trivially_copyable_v<T>) {
    for (const T& entry : list) bytes += HeldBytes(entry);
  }
  return bytes;
}

int64_t HeldBytes(const TokenSupport& support) {
  return HeldBytes(support.offsets) + HeldBytes(support.tokens);
}

int64_t HeldBytes(const CustomLossInput& input) {
  return HeldBytes(input.name);
}

int64_t HeldBytes(const LossConfig& loss) {
  return HeldBytes(loss.custom.graph) + HeldBytes(loss.custom.inputs) +
         HeldBytes(loss.teacher.adapter_id) + HeldBytes(loss.teacher.snapshot);
}

int64_t HeldBytes(const SampledSpan& span) {
  return HeldBytes(span.sequence_id);
}

int64_t HeldBytes(const CustomInput& input) {
  return HeldBytes(input.shape) + HeldBytes(input.floats) +
         HeldBytes(input.ints);
}

// Returns what an entry of a map takes, its own size and its node included.
template <typename Value>
int64_t EntryBytes(const std::pair<const std::string, Value>& entry) {
  constexpr int64_t kOwnBytes = sizeof(std::pair<const std::string, Value>);
  return kNodeBytes + kOwnBytes + HeldBytes(entry.first) +
         HeldBytes(entry.second);
}

int64_t HeldBytes(const Datum& datum) {
  int64_t bytes = kScheduledBytes + HeldBytes(datum.tokens) +
                  HeldBytes(datum.targets) + HeldBytes(datum.weights) +
                  HeldBytes(datum.logprobs) + HeldBytes(datum.advantages) +
                  HeldBytes(datum.target_offsets) + HeldBytes(datum.routing) +
                  HeldBytes(datum.support) + HeldBytes(datum.teacher_tokens);
  for (const auto& entry : datum.custom_inputs) bytes += EntryBytes(entry);
  return bytes;
}

// Returns what the texts take that name an adapter and what the step makes.
template <typename... Texts>
int64_t RequestWith(const Texts&... texts) {
  return (kRequestBytes + ... + HeldBytes(texts));
}

}  // namespace

int64_t NumBytes(const TrainRequest& request) {
  return RequestWith(request.adapter_id, request.tenant, request.snapshot,
                     request.digest) +
         HeldBytes(request.loss) + HeldBytes(request.data) +
         HeldBytes(request.replay.spans);
}

int64_t NumBytes(const OptimStepRequest& request) {
  return RequestWith(request.adapter_id);
}

int64_t NumBytes(const SaveCheckpointRequest& request) {
  int64_t bytes = RequestWith(request.adapter_id, request.name);
  for (const auto& entry : request.metadata) bytes += EntryBytes(entry);
  return bytes;
}

int64_t NumBytes(const LoadCheckpointRequest& request) {
  return RequestWith(request.adapter_id, request.source_adapter_id,
                     request.name, request.tenant);
}

int64_t NumBytes(const PublishSnapshotRequest& request) {
  return RequestWith(request.adapter_id, request.name);
}

int64_t NumBytes(const RefusedStep& request) {
  return RequestWith(request.adapter_id, request.digest) +
         static_cast<int64_t>(request.status.message().size());
}

int64_t NumBytes(const SampleRequest& request) {
  const SamplingConfig& config = request.config;
  const StopRule& stop = config.stop;
  return RequestWith(request.adapter_id, request.tenant, request.snapshot,
                     request.checkpoint, request.record) +
         HeldBytes(request.prompt) + HeldBytes(request.prompt_targets) +
         HeldBytes(request.prompt_target_offsets) +
         HeldBytes(config.logit_bias) + HeldBytes(config.allowed_token_ids) +
         HeldBytes(stop.token_ids) + HeldBytes(stop.token_sequences) +
         HeldBytes(stop.byte_strings);
}

}  // namespace weft
