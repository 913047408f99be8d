// What the model_type of config.json implies: which parts a family has, and the
// defaults of absent fields. Each family is one row of data. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_FAMILY_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_FAMILY_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace weft::model {

// Says which layers have the window of sliding_window.
enum class WindowScheme {
  kNone,        // No layer; the field is refused.
  kEveryLayer,  // All.
  kLateLayers,  // Layers from max_window_layers on, if use_sliding_window is
                // set.
  kPattern,     // All layers except every nth.
};

enum class AttentionBias {
  kNone,     // Never.
  kField,    // On q, k, v and o, if attention_bias is set.
  kFieldOn,  // The same; attention_bias is set if it is absent.
  kQkv,      // Always on q, k and v.
};

// Which fields describe a mixture of experts.
enum class ExpertFields {
  kNone,
  kQwen,     // moe_intermediate_size, decoder_sparse_step, mlp_only_layers.
  kMixtral,  // intermediate_size is that of an expert; every layer has experts.
  kGptOss,   // As kMixtral, with biases, clamped activations and a softmax over
             // a token's experts alone. Checkpoints have fused tensors only.
};

// Defaults of absent fields. 0: the file must have the field.
struct DefaultSizes {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;
  int64_t positions = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // 0: equal to the number of query heads.
  int64_t head_dim = 0;  // 0: hidden / heads.
  int64_t experts = 0;
  int64_t experts_per_token = 0;
  int64_t expert_ffn = 0;
  int64_t shared_ffn = 0;  // 0: the family has no shared expert.
};

struct Family {
  absl::string_view model_type;
  DefaultSizes sizes;
  AttentionBias attention_bias = AttentionBias::kField;
  bool mlp_bias_field = false;
  bool qk_norm = false;
  ExpertFields experts = ExpertFields::kNone;
  WindowScheme windows = WindowScheme::kNone;
  int64_t window = 0;   // Used if sliding_window is absent.
  int64_t pattern = 0;  // kPattern: every nth layer has no window.
  // Each query head has a sink: a learned logit in its softmax without a value.
  bool sinks = false;
  double rms_norm_eps = 1e-6;  // Used if the field is absent.
  double theta = 10000;
  // Releases of transformers differ in the rotary table that absent fields
  // imply, so the file must have them.
  bool needs_rope = false;
  double local_theta = 0;  // If > 0, sliding layers have their own rotary
                           // table.
  // Gemma stores norm weights less one and also norms the outputs of attention
  // and MLP. It scales embeddings by sqrt(hidden) and ties them by default. It
  // has query_pre_attn_scalar in place of head_dim, and spells hidden_act
  // differently.
  bool gemma = false;
  double attention_softcap = 0;  // Used if the field is absent.
  double final_softcap = 0;
  bool softcap_fields = false;  // If false, both fields must be null.
};

// Returns null if Weft does not support the family.
[[nodiscard]] const Family* FindFamily(absl::string_view model_type);

// Returns the family of a config whose decoder is in its text_config, or null
// if there is none.
[[nodiscard]] const Family* FindWrappedFamily(absl::string_view model_type);

// Returns every model_type that the two functions above know, quoted.
[[nodiscard]] std::string KnownFamilies();

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_FAMILY_CONFIG_H_
