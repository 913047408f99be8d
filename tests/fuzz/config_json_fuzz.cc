// config.json of a base model: no input may crash, and what is accepted is a
// model that can be computed.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "src/model/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto config = weft::model::ParseModelConfig(
      std::string_view(reinterpret_cast<const char*>(data), size));
  if (!config.ok()) return 0;
  const weft::lora::ModelShape shape = config->shape();
  if (shape.num_layers <= 0 || shape.hidden <= 0 || shape.q_width <= 0 ||
      shape.kv_width <= 0 || shape.ffn <= 0 || shape.vocab <= 0 ||
      config->num_parameters() == 0) {
    std::abort();
  }
  return 0;
}
