#include "src/model_config/family_config.h"

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
     .qk_norm = true,
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
     .qk_norm = true,
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
     .windows = WindowScheme::kPattern,
     .window = 4096,
     .pattern = 2,
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
     .qk_norm = true,
     .windows = WindowScheme::kPattern,
     .window = 4096,
     .pattern = 6,
     .theta = 1e6,
     .local_theta = 10000,
     .gemma = true},
    {.model_type = "qwen3_5_text",
     .sizes = {.layers = 32,
               .hidden = 4096,
               .ffn = 12288,
               .vocab = 248320,
               .positions = 32768,
               .heads = 16,
               .kv_heads = 4,
               .head_dim = 256},
     .qk_norm = true,
     .delta = DeltaFields::kSplit,
     .norms_from_one = true,
     .rotary_share = 0.25,
     .multimodal_rope = true},
    // Every layer has experts, so files do not have the MLP's size.
    {.model_type = "qwen3_5_moe_text",
     .sizes = {.layers = 40,
               .hidden = 2048,
               .ffn = 512,
               .vocab = 248320,
               .positions = 32768,
               .heads = 16,
               .kv_heads = 2,
               .head_dim = 256,
               .experts = 256,
               .experts_per_token = 8,
               .expert_ffn = 512,
               .shared_ffn = 512},
     .qk_norm = true,
     .experts = ExpertFields::kQwen,
     .normalizes_experts = true,
     .delta = DeltaFields::kSplit,
     .norms_from_one = true,
     .rotary_share = 0.25,
     .multimodal_rope = true},
    {.model_type = "qwen3_next",
     .sizes = {.layers = 48,
               .hidden = 2048,
               .ffn = 5632,
               .vocab = 151936,
               .positions = 32768,
               .heads = 16,
               .kv_heads = 2,
               .head_dim = 256,
               .experts = 512,
               .experts_per_token = 10,
               .expert_ffn = 512,
               .shared_ffn = 512},
     .qk_norm = true,
     .experts = ExpertFields::kQwen,
     .normalizes_experts = true,
     .delta = DeltaFields::kFused,
     .norms_from_one = true,
     .rotary_share = 0.25},
};

struct Wrapper {
  absl::string_view model_type;
  absl::string_view text_model_type;
};

constexpr Wrapper kWrappers[] = {{"gemma3", "gemma3_text"},
                                 {"qwen3_5", "qwen3_5_text"},
                                 {"qwen3_5_moe", "qwen3_5_moe_text"}};

}  // namespace

const Family* FindFamily(absl::string_view model_type) {
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return &family;
  }
  return nullptr;
}

const Family* FindWrappedFamily(absl::string_view model_type) {
  for (const Wrapper& wrapper : kWrappers) {
    if (wrapper.model_type == model_type) {
      return FindFamily(wrapper.text_model_type);
    }
  }
  return nullptr;
}

std::string KnownFamilies() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) {
    names.push_back(absl::StrCat("\"", family.model_type, "\""));
  }
  for (const Wrapper& wrapper : kWrappers) {
    names.push_back(absl::StrCat("\"", wrapper.model_type, "\""));
  }
  return absl::StrJoin(names, ", ");
}

}  // namespace weft::model
