#include "src/request/step.h"

#include <type_traits>
#include <utility>

#include "src/request/digest.h"

namespace weft {
namespace {

template <typename T>
int64_t BytesOf(const std::vector<T>& values) {
  return static_cast<int64_t>(values.size() * sizeof(T));
}

int64_t BytesOf(const TrainResult& result) {
  int64_t bytes = BytesOf(result.data);
  for (const DatumResult& datum : result.data) {
    bytes += BytesOf(datum.logprobs) + BytesOf(datum.losses) +
             BytesOf(datum.entropies) + BytesOf(datum.routing);
  }
  for (const auto& [name, value] : result.metrics) {
    bytes += static_cast<int64_t>(name.size() + sizeof(value));
  }
  return bytes;
}

int64_t BytesOf(const LoraConfig& config) {
  return BytesOf(config.target_modules) + BytesOf(config.overrides);
}

}  // namespace

const std::string& AdapterIdOf(const StepRequest& request) {
  return std::visit(
      [](const auto& r) -> const std::string& { return r.adapter_id; },
      request);
}

uint64_t StepOf(const StepRequest& request) {
  return std::visit([](const auto& r) { return r.step; }, request);
}

uint64_t EpochOf(const StepRequest& request) {
  return std::visit([](const auto& r) { return r.epoch; }, request);
}

absl::Time DeadlineOf(const StepRequest& request) {
  return std::visit([](const auto& r) { return r.deadline; }, request);
}

absl::StatusOr<StepResult> StoredResult(absl::StatusOr<StepResult> result) {
  if (result.ok() || absl::IsUnavailable(result.status())) return result;
  return StepFailure{.status = result.status()};
}

std::string PayloadDigest(const StepRequest& request) {
  return std::visit(
      [](const auto& r) {
        if constexpr (std::is_same_v<std::decay_t<decltype(r)>, RefusedStep>) {
          return r.digest;
        } else {
          return PayloadDigest(r);
        }
      },
      request);
}

int64_t NumBytes(const StepResult& result) {
  int64_t bytes = sizeof(StepResult);
  if (const auto* train = std::get_if<TrainResult>(&result)) {
    bytes += BytesOf(*train);
  } else if (const auto* checkpoint = std::get_if<CheckpointInfo>(&result)) {
    bytes += BytesOf(checkpoint->config) +
             static_cast<int64_t>(MetadataBytes(checkpoint->metadata));
  } else if (const auto* adapter = std::get_if<AdapterInfo>(&result)) {
    bytes += BytesOf(adapter->config) + BytesOf(adapter->snapshots);
  } else if (const auto* failure = std::get_if<StepFailure>(&result)) {
    bytes += static_cast<int64_t>(failure->status.message().size());
  }
  return bytes;
}

}  // namespace weft
