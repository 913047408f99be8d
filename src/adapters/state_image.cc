#include "src/adapters/state_image.h"

#include <span>
#include <vector>

#include "src/base/status_macros.h"
#include "src/journal/image_file.h"

namespace weft::engine {

absl::Status KeepState(const EngineContext& context,
                       const lora::AdapterState& state, std::string& image) {
  if (!context.recorder.recording()) return absl::OkStatus();
  // Gradient and moments that are not there are zeros.
  const std::vector<float> zeros(state.weights.size());
  std::vector<std::span<const float>> blocks;
  for (const std::vector<float>* values :
       {&state.weights, &state.gradient, &state.moment1, &state.moment2}) {
    blocks.emplace_back(values->empty() ? zeros : *values);
  }
  image = context.recorder.NewImageName();
  // Before the file is there: nobody may take it for one that is left over.
  context.recorder.AddImage(image, /*recorded=*/false);
  return journal::WriteImage(*context.state, image, blocks);
}

absl::StatusOr<lora::AdapterState> ReadState(const journal::StateFolder& folder,
                                             const std::string& image,
                                             int64_t num_parameters) {
  lora::AdapterState state;
  std::vector<std::span<float>> blocks;
  for (std::vector<float>* values :
       {&state.weights, &state.gradient, &state.moment1, &state.moment2}) {
    values->resize(static_cast<size_t>(num_parameters));
    blocks.emplace_back(*values);
  }
  WEFT_RETURN_IF_ERROR(journal::ReadImage(folder, image, blocks));
  return state;
}

}  // namespace weft::engine
