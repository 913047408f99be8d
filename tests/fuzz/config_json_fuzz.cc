// Fuzzes the config.json of a base model. No input may crash, and every
// accepted config describes a model that can be computed.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "src/model_config/model_config.h"

namespace weft::model {
namespace {

bool HasSizes(const model_config::ModelConfig& config) {
  const model_config::ModelShape shape = config.shape();
  return shape.num_layers > 0 && shape.hidden > 0 && shape.q_width > 0 &&
         shape.kv_width > 0 && shape.ffn > 0 && shape.vocab > 0 &&
         config.num_heads % config.num_kv_heads == 0 &&
         config.num_parameters() > 0;
}

bool HasFrequencies(const model_config::ModelConfig& config,
                    const std::vector<double>& table) {
  return table.size() == static_cast<size_t>(config.head_dim) / 2 &&
         std::ranges::all_of(
             table, [](double f) { return std::isfinite(f) && f >= 0; });
}

bool IsFactor(double value) { return std::isfinite(value) && value > 0; }

// Returns whether every feature of a head has one place.
bool IsOrder(std::vector<int> order, int head_dim) {
  std::ranges::sort(order);
  for (int i = 0; i < static_cast<int>(order.size()); ++i) {
    if (order[i] != i) return false;
  }
  return order.empty() || order.size() == static_cast<size_t>(head_dim);
}

bool IsComputable(const model_config::ModelConfig& config,
                  const model_config::LayerAttention& layer) {
  const auto table = static_cast<size_t>(layer.rope_table);
  return table < config.rope_tables.size() && layer.rule.window >= 0 &&
         std::isfinite(layer.rule.scale) && layer.rule.scale > 0 &&
         std::isfinite(layer.rule.softcap) && layer.rule.softcap >= 0;
}

bool IsComputable(const model_config::ModelConfig& config) {
  return HasSizes(config) && config.rms_norm_eps > 0 &&
         std::isfinite(config.final_softcap) && config.final_softcap >= 0 &&
         IsFactor(config.embedding_multiplier) &&
         IsFactor(config.logits_divisor) && IsFactor(config.rope_magnitude) &&
         IsFactor(config.query_scale.period) &&
         IsOrder(config.head_order, config.head_dim) &&
         config.attention.size() == static_cast<size_t>(config.num_layers) &&
         std::ranges::all_of(config.attention,
                             [&](const model_config::LayerAttention& layer) {
                               return IsComputable(config, layer);
                             }) &&
         std::ranges::all_of(config.rope_tables,
                             [&](const std::vector<double>& table) {
                               return HasFrequencies(config, table);
                             });
}

}  // namespace
}  // namespace weft::model

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto config = weft::model_config::ParseModelConfig(
      std::string_view(reinterpret_cast<const char*>(data), size));
  if (config.ok() && !weft::model::IsComputable(*config)) std::abort();
  return 0;
}
