#include "src/engine/adapters/state_image.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"
#include "src/checkpoint/checkpoint_files.h"
#include "src/engine/adapters/adapter_io.h"
#include "src/engine/device/compute_guard.h"
#include "src/log/image.h"
#include "src/store/object_store.h"

namespace weft::engine {
namespace {

// Returns the buffers of a state as the blocks of an image file, in the order
// of lora::AdapterImage::Tensors().
template <typename State>
auto BuffersOf(State& state) {
  return std::array{&state.gradient, &state.moment1, &state.moment2,
                    &state.weights};
}

// Reads the weights of a checkpoint. The optimizer's state is zeros, because
// nobody trains them.
absl::Status ReadCheckpoint(const EngineContext& context,
                            const CheckpointSource& source, int64_t size,
                            lora::AdapterImage& image) {
  const absl::Time start = SteadyNow();
  const absl::StatusOr<LoadedCheckpoint> loaded =
      context.files.Load({.source_adapter_id = source.adapter_id,
                          .name = source.name,
                          .weights_only = true});
  context.probe.ObserveCheckpoint("load", loaded.ok(), SteadyNow() - start);
  WEFT_RETURN_IF_ERROR(loaded.status());
  const std::vector<float>& weights = loaded->state.weights;
  if (loaded->info.created_at != source.created_at ||
      static_cast<int64_t>(weights.size()) != size) {
    return absl::UnavailableError(
        absl::StrCat("checkpoint: '", source.name,
                     "' was overwritten while it was read; try again"));
  }
  return RunGuarded("reading a checkpoint", [&] {
    const at::InferenceMode no_autograd;
    for (at::Tensor* tensor : image.Tensors()) {
      *tensor = at::zeros({size}, at::kFloat);
    }
    std::ranges::copy(
        weights, image.versions.front().weights_N.mutable_data_ptr<float>());
  });
}

}  // namespace

absl::StatusOr<std::string> KeepState(const EngineContext& context,
                                      Durability durability,
                                      const lora::AdapterState& state) {
  if (durability != Durability::kStep || !context.recorder.recording()) {
    return std::string();
  }
  // An empty gradient or moment is written as zeros.
  const std::vector<float> zeros(state.weights.size());
  std::vector<std::span<const float>> blocks;
  for (const std::vector<float>* values : BuffersOf(state)) {
    blocks.emplace_back(values->empty() ? zeros : *values);
  }
  const std::string image = context.state->NewImageName();
  // Registers the image before its file exists, because State::Cut
  // removes files that the recorder does not know.
  context.recorder.AddImage(image, /*recorded=*/false);
  const absl::Status written = log::WriteImage(*context.state, image, blocks);
  if (!written.ok()) {
    context.recorder.DropImage(image);
    if (!IsStoreAway(context, written)) return written;
    return WithReason(absl::UnavailableError(written.message()),
                      {.name = "STATE_STORE_UNREACHABLE", .values = {}});
  }
  return image;
}

bool IsStoreAway(const EngineContext& context, const absl::Status& status) {
  if (context.options.state.empty() || status.ok()) return false;
  return store::IsAway(status) || checkpoint::IsUnreachable(status);
}

void DropState(const EngineContext& context, const std::string& image) {
  if (image.empty()) return;
  context.recorder.DropImage(image);
  context.PostIo("", [&context, image] {
    const absl::Status removed = context.state->RemoveImage(image);
    if (!removed.ok() && !absl::IsNotFound(removed)) {
      Log(LogLevel::kWarning, "a file of the state folder stays",
          {{"reason", removed.message()}});
    }
  });
}

absl::Status ReadTensors(const EngineContext& context, const SpillFolder& spill,
                         const ImageFile& file, int64_t size,
                         lora::AdapterImage& image) {
  if (file.checkpoint) {
    return ReadCheckpoint(context, *file.checkpoint, size, image);
  }
  std::vector<std::span<float>> blocks;
  WEFT_RETURN_IF_ERROR(RunGuarded("reading an adapter back", [&] {
    const at::InferenceMode no_autograd;
    for (at::Tensor* tensor : image.Tensors()) {
      *tensor = at::empty({size}, at::kFloat);
      blocks.emplace_back(tensor->mutable_data_ptr<float>(), size);
    }
  }));
  return file.durable ? log::ReadImage(*context.state, file.name, blocks)
                      : spill.Read(file.name, blocks);
}

std::vector<std::span<const float>> BlocksOf(lora::AdapterImage& image) {
  std::vector<std::span<const float>> blocks;
  for (const at::Tensor* tensor : image.Tensors()) {
    blocks.emplace_back(tensor->const_data_ptr<float>(), tensor->numel());
  }
  return blocks;
}

absl::StatusOr<lora::AdapterState> ReadState(const log::State& state_store,
                                             const std::string& image,
                                             int64_t num_parameters) {
  lora::AdapterState state;
  std::vector<std::span<float>> blocks;
  for (std::vector<float>* values : BuffersOf(state)) {
    values->resize(static_cast<size_t>(num_parameters));
    blocks.emplace_back(*values);
  }
  WEFT_RETURN_IF_ERROR(log::ReadImage(state_store, image, blocks));
  return state;
}

}  // namespace weft::engine
