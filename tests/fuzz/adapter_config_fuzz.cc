// Fuzzes an adapter_config.json from a client, which may contain regular
// expressions. No input may crash or take long. Every accepted config has LoRA
// factors, and its ranks are within the limits.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "src/lora/peft_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr weft::model_config::ModelShape kShape = {.num_layers = 2,
                                                     .hidden = 4,
                                                     .q_width = 6,
                                                     .kv_width = 2,
                                                     .ffn = 8,
                                                     .vocab = 10};
  const auto config = weft::lora::ParsePeftConfig(
      absl::string_view(reinterpret_cast<const char*>(data), size), kShape);
  if (!config.ok()) return 0;
  const weft::lora::AdapterLayout layout(kShape, *config);
  if (layout.factors().empty() || layout.max_rank() < 1 ||
      layout.max_rank() > weft::lora::kMaxFileRank) {
    std::abort();
  }
  // The written file parses to the same config.
  const auto again = weft::lora::ParsePeftConfig(
      weft::lora::WritePeftConfig(*config, kShape, {}, "base"), kShape);
  if (!again.ok() || !(*again == *config)) std::abort();
  return 0;
}
