// adapter_config.json from a client: no input may crash, and what is accepted
// keeps to the limits.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "src/lora/peft_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr weft::lora::ModelShape kShape = {.num_layers = 2,
                                             .hidden = 4,
                                             .q_width = 6,
                                             .kv_width = 2,
                                             .ffn = 8,
                                             .vocab = 10};
  const auto config = weft::lora::ParsePeftConfig(
      absl::string_view(reinterpret_cast<const char*>(data), size), kShape);
  if (!config.ok()) return 0;
  if (config->rank < 1 || config->rank > weft::lora::kMaxFileRank ||
      config->target_modules.empty()) {
    std::abort();
  }
  return 0;
}
