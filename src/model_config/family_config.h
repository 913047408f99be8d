// What config.json implies by its model_type: which parts a family has, and the
// values of absent fields. One row of data per family. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_FAMILY_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_FAMILY_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace weft::model {

// The layers that have the window of sliding_window.
enum class WindowScheme {
  kNone,        // None; the field is refused.
  kEveryLayer,  // All.
  kLateLayers,  // Those from max_window_layers on, if use_sliding_window.
  kPattern,     // All except every nth.
};

enum class AttentionBias {
  kNone,   // Never.
  kField,  // On q, k, v and o, when attention_bias says so.
  kQkv,    // Always on q, k and v.
};

// Sizes of absent fields; 0: the file must have the field.
struct DefaultSizes {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;
  int64_t positions = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // 0: as many as query heads.
  int64_t head_dim = 0;  // 0: hidden / heads.
};

struct Family {
  absl::string_view model_type;
  DefaultSizes sizes;
  AttentionBias attention_bias = AttentionBias::kField;
  bool mlp_bias_field = false;
  bool qk_norm = false;
  WindowScheme windows = WindowScheme::kNone;
  int64_t window = 0;   // When sliding_window is absent; null: no window.
  int64_t pattern = 0;  // kPattern: every nth layer is full.
  double theta = 10000;
  double local_theta = 0;  // > 0: sliding layers have a rotary table of theirs.
  // Gemma: norms store their weight less one and also norm what a sublayer
  // adds, embeddings are scaled by sqrt(hidden), embeddings tied by default,
  // query_pre_attn_scalar in place of head_dim, its own spelling of hidden_act.
  bool gemma = false;
  double attention_softcap = 0;  // When the field is absent; null: no softcap.
  double final_softcap = 0;
  bool softcap_fields = false;  // False: fields must be null.
};

// Null: not built.
[[nodiscard]] const Family* FindFamily(absl::string_view model_type);

// Returns the family of a config whose decoder is in its text_config; null:
// none.
[[nodiscard]] const Family* FindWrappedFamily(absl::string_view model_type);

// Returns every model_type that the two functions know, quoted.
[[nodiscard]] std::string KnownFamilies();

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_FAMILY_CONFIG_H_
