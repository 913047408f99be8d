#include "src/model_config/family_config.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace weft::model {
namespace {

// Source: the configuration classes of transformers 4.57 and 5.17.
constexpr Family kFamilies[] = {
    {.model_type = "llama", .mlp_bias_field = true},
    {.model_type = "mistral",
     .sizes = {.kv_heads = 8},
     .attention_bias = AttentionBias::kNone,
     .windows = WindowScheme::kEveryLayer,
     .window = 4096},
    {.model_type = "qwen2",
     .sizes = {.kv_heads = 32},
     .attention_bias = AttentionBias::kQkv,
     .windows = WindowScheme::kLateLayers,
     .window = 4096},
    {.model_type = "qwen3",
     .sizes = {.kv_heads = 32, .head_dim = 128},
     .qk_norm = QkNorm::kHead,
     .windows = WindowScheme::kLateLayers,
     .window = 4096},
    {.model_type = "mixtral",
     .sizes = {.kv_heads = 8, .experts = 8, .experts_per_token = 2},
     .attention_bias = AttentionBias::kNone,
     .experts = ExpertFields::kMixtral,
     .rms_norm_eps = 1e-5,
     .theta = 1e6},
    {.model_type = "qwen2_moe",
     .sizes = {.kv_heads = 16,
               .experts = 60,
               .experts_per_token = 4,
               .expert_ffn = 1408,
               .shared_ffn = 5632},
     .attention_bias = AttentionBias::kQkv,
     .experts = ExpertFields::kQwen,
     .windows = WindowScheme::kLateLayers,
     .window = 4096},
    {.model_type = "qwen3_moe",
     .sizes = {.kv_heads = 4,
               .experts = 128,
               .experts_per_token = 8,
               .expert_ffn = 768},
     .qk_norm = QkNorm::kHead,
     .experts = ExpertFields::kQwen},
    {.model_type = "gpt_oss",
     .sizes = {.layers = 36,
               .hidden = 2880,
               .ffn = 2880,
               .vocab = 201088,
               .positions = 131072,
               .heads = 64,
               .kv_heads = 8,
               .head_dim = 64,
               .experts = 128,
               .experts_per_token = 4},
     .attention_bias = AttentionBias::kFieldOn,
     .experts = ExpertFields::kGptOss,
     .windows = WindowScheme::kPattern,
     .window = 128,
     .pattern = 2,
     .sinks = true,
     .rms_norm_eps = 1e-5,
     .theta = 150000,
     .needs_rope = true},
    {.model_type = "gemma2",
     .sizes = {.layers = 26,
               .hidden = 2304,
               .ffn = 9216,
               .vocab = 256000,
               .positions = 8192,
               .heads = 8,
               .kv_heads = 4,
               .head_dim = 256},
     .norms = kGemmaNorms,
     .windows = WindowScheme::kPattern,
     .window = 4096,
     .pattern = 2,
     .tied = true,
     .gemma = true,
     .attention_softcap = 50,
     .final_softcap = 30,
     .softcap_fields = true},
    {.model_type = "gemma3_text",
     .sizes = {.layers = 26,
               .hidden = 2304,
               .ffn = 9216,
               .vocab = 262208,
               .positions = 131072,
               .heads = 8,
               .kv_heads = 4,
               .head_dim = 256},
     .qk_norm = QkNorm::kHead,
     .norms = kGemmaNorms,
     .windows = WindowScheme::kPattern,
     .window = 4096,
     .pattern = 6,
     .theta = 1e6,
     .local_rope = true,
     .local_theta = 10000,
     .tied = true,
     .gemma = true},
    {.model_type = "smollm3",
     .sizes = {.layers = 36,
               .hidden = 2048,
               .ffn = 11008,
               .vocab = 128256,
               .positions = 32768,
               .heads = 16,
               .kv_heads = 4},
     .mlp_bias_field = true,
     .theta = 2e6,
     .no_rope_interval = 4,
     .tied = true},
    {.model_type = "olmo2",
     .qk_norm = QkNorm::kWhole,
     .norms = kOutputNorms,
     .rms_norm_eps = 1e-5},
    {.model_type = "olmo3",
     .qk_norm = QkNorm::kWhole,
     .norms = kOutputNorms,
     .windows = WindowScheme::kPattern,
     .window = 4096,
     .pattern = 4,
     .rms_norm_eps = 1e-5,
     .theta = 500000,
     .local_rope = true},
    {.model_type = "granite", .mlp_bias_field = true, .multipliers = true},
    {.model_type = "phi3",
     .attention_bias = AttentionBias::kNone,
     .fused_qkv = true,
     .fused_gate_up = true,
     .windows = WindowScheme::kEveryLayer,
     .rms_norm_eps = 1e-5,
     .long_rope = true,
     .rotary_share = 1},
    {.model_type = "glm4",
     .sizes = {.kv_heads = 2, .head_dim = 128},
     .attention_bias = AttentionBias::kQkvFieldOn,
     .norms = kGlmNorms,
     .fused_gate_up = true,
     .rms_norm_eps = 1.5625e-7,
     .rotary_share = 0.5,
     .interleaved_rope = true},
    {.model_type = "seed_oss",
     .sizes = {.kv_heads = 8, .head_dim = 128},
     .attention_bias = AttentionBias::kQkvFieldOn,
     .out_bias_field = true,
     .mlp_bias_field = true},
    {.model_type = "ministral3",
     .sizes = {.kv_heads = 8, .head_dim = 128},
     .attention_bias = AttentionBias::kNone,
     .windows = WindowScheme::kEveryLayer,
     .rms_norm_eps = 1e-5,
     .theta = 1e6,
     .needs_rope = true,
     .query_scale = true},
    {.model_type = "qwen2_5_vl_text",
     .sizes = {.kv_heads = 8},
     .attention_bias = AttentionBias::kQkv,
     .windows = WindowScheme::kLateLayers,
     .window = 4096,
     .rms_norm_eps = 1e-5,
     .theta = 1e6,
     .multimodal_rope = true},
    {.model_type = "qwen3_vl_text",
     .sizes = {.kv_heads = 32, .head_dim = 128},
     .qk_norm = QkNorm::kHead,
     .theta = 500000,
     .multimodal_rope = true},
    {.model_type = "qwen3_vl_moe_text",
     .sizes = {.kv_heads = 16,
               .experts = 60,
               .experts_per_token = 4,
               .expert_ffn = 1408},
     .qk_norm = QkNorm::kHead,
     .experts = ExpertFields::kQwenVl,
     .theta = 500000,
     .multimodal_rope = true,
     .tied = true},
    {.model_type = "glm4_moe",
     .sizes = {.kv_heads = 8,
               .experts = 128,
               .experts_per_token = 8,
               .expert_ffn = 1408},
     .attention_bias = AttentionBias::kQkvField,
     .experts = ExpertFields::kGlm,
     .rms_norm_eps = 1e-5,
     .rotary_share = 0.5},
    {.model_type = "minimax_m2",
     .sizes = {.kv_heads = 8,
               .head_dim = 128,
               .experts = 256,
               .experts_per_token = 8},
     .attention_bias = AttentionBias::kNone,
     .qk_norm = QkNorm::kWhole,
     .experts = ExpertFields::kMiniMax,
     .theta = 5e6,
     .rotary_share = 1},
};

// The text models of some wrappers differ. The first one is used if text_config
// has no model_type.
constexpr Wrapper kWrappers[] = {
    {"gemma3", "gemma3_text"},
    {"mistral3", "mistral"},
    {"mistral3", "ministral3"},
    {"qwen2_5_vl", "qwen2_5_vl_text", /*may_be_flat=*/true},
    {"qwen3_vl", "qwen3_vl_text"},
    {"qwen3_vl_moe", "qwen3_vl_moe_text"},
    {"qwen3_vl_moe", "qwen3_vl_moe_text"},
};

}  // namespace

const Family* FindFamily(absl::string_view model_type) {
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return &family;
  }
  return nullptr;
}

std::vector<Wrapper> FindWrappers(absl::string_view model_type) {
  std::vector<Wrapper> found;
  std::ranges::copy_if(
      kWrappers, std::back_inserter(found),
      [&](const Wrapper& wrapper) { return wrapper.model_type == model_type; });
  return found;
}

std::string KnownFamilies() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) {
    names.push_back(absl::StrCat("\"", family.model_type, "\""));
  }
  for (const Wrapper& wrapper : kWrappers) {
    std::string name = absl::StrCat("\"", wrapper.model_type, "\"");
    if (names.back() != name) names.push_back(std::move(name));
  }
  return absl::StrJoin(names, ", ");
}

}  // namespace weft::model
