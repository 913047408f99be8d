// Describes model families. The model_type of config.json names the family,
// which implies the parts of the model and the defaults of absent fields. Each
// family is one row of data. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_FAMILY_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_FAMILY_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace weft::model_config {

// Which layers attend only to the last sliding_window tokens, if the file has
// no layer_types.
enum class WindowScheme {
  kNone,        // No layer. sliding_window must be off.
  kEveryLayer,  // All layers.
  kLateLayers,  // Layers from max_window_layers on, if use_sliding_window is
                // true.
  kEvenLayers,  // Every other layer below max_window_layers, the first one
                // included, if use_sliding_window is true.
  kPattern,     // All layers except every nth (Family::pattern).
};

enum class AttentionBias {
  kNone,        // Never.
  kField,       // On q, k, v and o, if attention_bias is true.
  kFieldOn,     // As kField, but an absent attention_bias is true.
  kQkv,         // On q, k and v. qkv_bias of Qwen2-MoE may turn these off.
  kQkvField,    // On q, k and v, if attention_bias is true.
  kQkvFieldOn,  // As kQkvField, but an absent attention_bias is true.
};

// The norms of q and k before the rotation.
enum class QkNorm : uint8_t {
  kNone,
  kHead,   // An RMS norm of each head.
  kWhole,  // One RMS norm of all heads of q together, and one of k's.
};

// The names of a layer's norms of the residual stream's width. A part of the
// layer without a name has no norm.
struct NormNames {
  absl::string_view attention_in = "input_layernorm";
  absl::string_view attention_out;
  absl::string_view mlp_in = "post_attention_layernorm";
  absl::string_view mlp_out;
};

// Gemma: also the outputs of attention and MLP are normed.
inline constexpr NormNames kGemmaNorms = {
    .attention_out = "post_attention_layernorm",
    .mlp_in = "pre_feedforward_layernorm",
    .mlp_out = "post_feedforward_layernorm"};
// GLM-4: as Gemma, with other names.
inline constexpr NormNames kGlmNorms = {
    .attention_out = "post_self_attn_layernorm",
    .mlp_in = "post_attention_layernorm",
    .mlp_out = "post_mlp_layernorm"};
// OLMo 2: only the outputs are normed.
inline constexpr NormNames kOutputNorms = {
    .attention_in = "",
    .attention_out = "post_attention_layernorm",
    .mlp_in = "",
    .mlp_out = "post_feedforward_layernorm"};

// Which layers have experts, and which fields of config.json describe them.
enum class ExpertFields {
  kNone,
  kQwen,     // moe_intermediate_size, decoder_sparse_step, mlp_only_layers.
  kQwenVl,   // As kQwen. Each tensor of experts in a checkpoint has all experts
             // of a layer.
  kMixtral,  // Every layer has experts, of intermediate_size features.
  kGptOss,   // As kMixtral, with biases, clamped activations and a softmax over
             // only a token's experts. Each tensor of experts in a checkpoint
             // has all experts of a layer.
  kGlm,      // n_routed_experts, n_shared_experts, first_k_dense_replace. The
             // router takes sigmoids.
  kMiniMax,  // As kMixtral, with a router that takes sigmoids.
};

// Whether a token's router weights are scaled so that they sum to one, in
// families with the fields of kQwen.
enum class ExpertNorm : uint8_t {
  kField,    // If norm_topk_prob is true.
  kFieldOn,  // As kField, but an absent norm_topk_prob is true.
  kAlways,   // Always. norm_topk_prob must be true or absent.
};

// Which layers compute a gated delta rule in place of attention
// (ModelConfig::delta).
enum class DeltaFields {
  kNone,
  kSplit,  // The layers of linear_attention in layer_types, or all except every
           // nth (full_attention_interval). q_proj of the other layers makes
           // gates (ModelConfig::output_gate).
  kFused,  // As kSplit, but checkpoints fuse q, k, v and z, and b and a.
};

// The defaults of absent fields. A field with default 0 is required, except
// where a comment says otherwise.
struct DefaultSizes {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;
  int64_t positions = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // 0: the number of query heads.
  int64_t head_dim = 0;  // 0: hidden / heads.
  // The next two are read only if Family::experts is not kNone.
  int64_t experts = 0;
  int64_t experts_per_token = 0;
  int64_t expert_ffn = 0;  // Of the field moe_intermediate_size.
  int64_t shared_ffn = 0;  // 0: the family has no shared expert.
};

struct Family {
  absl::string_view model_type;
  DefaultSizes sizes;
  AttentionBias attention_bias = AttentionBias::kField;
  bool out_bias_field = false;  // attention_out_bias sets the bias of o alone.
  bool mlp_bias_field = false;
  QkNorm qk_norm = QkNorm::kNone;
  NormNames norms = {};
  // Checkpoints and PEFT's files have q, k and v in one projection, qkv_proj,
  // and gate and up in one, gate_up_proj.
  bool fused_qkv = false;
  bool fused_gate_up = false;
  ExpertFields experts = ExpertFields::kNone;
  ExpertNorm expert_norm = ExpertNorm::kField;
  DeltaFields delta = DeltaFields::kNone;
  bool norms_from_one = false;  // ModelConfig::norms_from_one.
  WindowScheme windows = WindowScheme::kNone;
  int64_t window = 0;              // Used if sliding_window is absent.
  int64_t max_window_layers = 28;  // Used if max_window_layers is absent.
  int64_t pattern = 0;  // n of kPattern: every nth layer has no window.
  // Each query head has a sink: a learned logit that takes part in the softmax
  // but has no value vector.
  bool sinks = false;
  double rms_norm_eps = 1e-6;  // Used if the field is absent.
  double theta = 10000;
  // True if the file must have rope_parameters or rope_scaling, because
  // releases of transformers differ in the defaults.
  bool needs_rope = false;
  // Layers with a window have a rotary table of their own, without scaling.
  bool local_rope = false;
  double local_theta = 0;  // The base of this table; 0: the same as others.
  bool long_rope = false;  // The file may have longrope factors.
  // Queries at late positions are scaled (llama_4_scaling_beta).
  bool query_scale = false;
  // The part of a head's features that rotate, if partial_rotary_factor is
  // absent. 0: all rotate, and another partial_rotary_factor is refused.
  double rotary_share = 0;
  // Rotation pairs adjacent features, not feature c with c + half.
  bool interleaved_rope = false;
  // Positions in text and images rotate parts of a head (mrope_section). In
  // text these positions are equal, so the parts do not matter.
  bool multimodal_rope = false;
  // Every nth layer has no rotation, unless no_rope_layers says which. 0: the
  // file cannot have such layers.
  int64_t no_rope_interval = 0;
  // The fields embedding_multiplier, residual_multiplier, attention_multiplier
  // and logits_scaling.
  bool multipliers = false;
  bool tied = false;           // Used if tie_word_embeddings is absent.
  int64_t padding_token = -1;  // Used if pad_token_id is absent; -1: none.
  // Gemma stores norm weights minus one. It scales embeddings by sqrt(hidden).
  // The scale of attention is 1 / sqrt(query_pre_attn_scalar). The activation's
  // field is hidden_activation.
  bool gemma = false;
  double attention_softcap = 0;  // Used if the field is absent.
  double final_softcap = 0;
  bool softcap_fields = false;  // If false, a file with a softcap is refused.
};

// Returns the family, or null if Weft does not support it.
const Family* FindFamily(absl::string_view model_type);

// A model_type whose config has the decoder's in text_config, and a model_type
// that text_config may have.
struct Wrapper {
  absl::string_view model_type;
  absl::string_view text_model_type;
  // Files may also have the decoder's fields in place of text_config, or repeat
  // them beside it. Embeddings are tied if either place says so.
  bool may_be_flat = false;
  // AutoModelForCausalLM loads the text model alone, so PEFT's files have its
  // plain names (DecoderNames).
  bool loads_text = false;
};

// Returns the wrappers of this model_type. The first one is the default.
// Returns none if a config of this model_type has no text_config.
std::vector<Wrapper> FindWrappers(absl::string_view model_type);

// Returns every model_type that the two functions above know. The names are
// quoted and separated by commas.
std::string KnownFamilies();

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_FAMILY_CONFIG_H_
