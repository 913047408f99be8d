#include "src/model/decoder_weights.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/progress.h"
#include "src/base/status_macros.h"
#include "src/weights/tensor_reader.h"

namespace weft::model {
namespace {

// A piece of a stacked matrix or bias: `rows` rows from the tensor `name`.
struct Part {
  std::string name;
  int64_t rows;
};

class Loader {
 public:
  Loader(const weights::Checkpoint& checkpoint, const ModelConfig& config,
         at::TensorOptions options)
      : checkpoint_(checkpoint),
        options_(options),
        norms_from_one_(config.norms_from_one),
        progress_("loading weights",
                  static_cast<int64_t>(config.num_parameters() *
                                       options.dtype().itemsize()),
                  "B") {}

  absl::StatusOr<at::Tensor> Norm(const std::string& name, int64_t size) {
    at::Tensor tensor = at::empty(
        {size}, norms_from_one_ ? options_.dtype(at::kFloat) : options_);
    WEFT_RETURN_IF_ERROR(Read(name, tensor));
    return norms_from_one_ ? tensor.add_(1) : tensor;
  }

  absl::StatusOr<at::Tensor> Matrix(const std::string& name, int64_t rows,
                                    int64_t columns) {
    at::Tensor tensor = at::empty({rows, columns}, options_);
    WEFT_RETURN_IF_ERROR(Read(name, tensor));
    return tensor;
  }

  absl::StatusOr<lora::BaseLinear> Stacked(const std::vector<Part>& parts,
                                           int64_t columns, bool with_bias) {
    int64_t rows = 0;
    for (const Part& part : parts) rows += part.rows;
    lora::BaseLinear linear;
    linear.weight_OI = at::empty({rows, columns}, options_);
    if (with_bias) linear.bias_O = at::empty({rows}, options_);
    int64_t row = 0;
    for (const Part& part : parts) {
      WEFT_RETURN_IF_ERROR(Read(absl::StrCat(part.name, ".weight"),
                                linear.weight_OI.narrow(0, row, part.rows)));
      if (with_bias) {
        WEFT_RETURN_IF_ERROR(Read(absl::StrCat(part.name, ".bias"),
                                  linear.bias_O.narrow(0, row, part.rows)));
      }
      row += part.rows;
    }
    return linear;
  }

 private:
  absl::Status Read(const std::string& name, const at::Tensor& destination) {
    WEFT_RETURN_IF_ERROR(weights::ReadTensor(checkpoint_, name, destination));
    progress_.Add(static_cast<int64_t>(destination.nbytes()));
    return absl::OkStatus();
  }

  const weights::Checkpoint& checkpoint_;
  const at::TensorOptions options_;
  const bool norms_from_one_;
  Progress progress_;
};

// The norms around attention and MLP. What Llama calls post_attention_layernorm
// comes before the MLP; where there are output norms, it is one of them.
absl::Status LoadNorms(Loader& loader, const ModelConfig& config,
                       const std::string& prefix, LayerWeights& w) {
  const auto load = [&](const char* name) {
    return loader.Norm(absl::StrCat(prefix, name, ".weight"), config.hidden);
  };
  WEFT_ASSIGN_OR_RETURN(w.input_norm_H, load("input_layernorm"));
  if (!config.output_norms) {
    WEFT_ASSIGN_OR_RETURN(w.mlp_norm_H, load("post_attention_layernorm"));
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(w.attention_out_norm_H,
                        load("post_attention_layernorm"));
  WEFT_ASSIGN_OR_RETURN(w.mlp_norm_H, load("pre_feedforward_layernorm"));
  WEFT_ASSIGN_OR_RETURN(w.mlp_out_norm_H, load("post_feedforward_layernorm"));
  return absl::OkStatus();
}

absl::Status LoadAttention(Loader& loader, const ModelConfig& config,
                           const std::string& prefix, LayerWeights& w) {
  const lora::ModelShape shape = config.shape();
  WEFT_ASSIGN_OR_RETURN(w.qkv,
                        loader.Stacked({{prefix + "q_proj", shape.q_width},
                                        {prefix + "k_proj", shape.kv_width},
                                        {prefix + "v_proj", shape.kv_width}},
                                       shape.hidden, config.qkv_bias));
  WEFT_ASSIGN_OR_RETURN(w.o, loader.Stacked({{prefix + "o_proj", shape.hidden}},
                                            shape.q_width, config.o_bias));
  if (!config.qk_norm) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(w.q_norm_C,
                        loader.Norm(prefix + "q_norm.weight", config.head_dim));
  WEFT_ASSIGN_OR_RETURN(w.k_norm_C,
                        loader.Norm(prefix + "k_norm.weight", config.head_dim));
  return absl::OkStatus();
}

absl::StatusOr<LayerWeights> LoadLayer(Loader& loader,
                                       const ModelConfig& config, int layer) {
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  const std::string mlp = prefix + "mlp.";
  const lora::ModelShape shape = config.shape();
  LayerWeights w;
  WEFT_RETURN_IF_ERROR(LoadNorms(loader, config, prefix, w));
  WEFT_RETURN_IF_ERROR(LoadAttention(loader, config, prefix + "self_attn.", w));
  WEFT_ASSIGN_OR_RETURN(w.gate_up,
                        loader.Stacked({{mlp + "gate_proj", shape.ffn},
                                        {mlp + "up_proj", shape.ffn}},
                                       shape.hidden, config.mlp_bias));
  WEFT_ASSIGN_OR_RETURN(
      w.down, loader.Stacked({{mlp + "down_proj", shape.hidden}}, shape.ffn,
                             config.mlp_bias));
  return w;
}

}  // namespace

absl::StatusOr<DecoderWeights> LoadDecoderWeights(
    const weights::Checkpoint& checkpoint, const ModelConfig& config,
    at::ScalarType dtype, at::Device device) {
  Loader loader(checkpoint, config,
                at::TensorOptions().dtype(dtype).device(device));
  DecoderWeights w;
  WEFT_ASSIGN_OR_RETURN(
      w.embedding_VH,
      loader.Matrix("model.embed_tokens.weight", config.vocab, config.hidden));
  w.layers.reserve(config.num_layers);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    WEFT_ASSIGN_OR_RETURN(LayerWeights layer_weights,
                          LoadLayer(loader, config, layer));
    w.layers.push_back(std::move(layer_weights));
  }
  WEFT_ASSIGN_OR_RETURN(w.final_norm_H,
                        loader.Norm("model.norm.weight", config.hidden));
  w.head_VH = w.embedding_VH;
  if (!config.tied_embeddings) {
    WEFT_ASSIGN_OR_RETURN(
        w.head_VH,
        loader.Matrix("lm_head.weight", config.vocab, config.hidden));
  }
  return w;
}

}  // namespace weft::model
