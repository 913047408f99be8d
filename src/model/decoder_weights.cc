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
        progress_("loading weights",
                  static_cast<int64_t>(config.num_parameters() *
                                       options.dtype().itemsize()),
                  "B") {}

  absl::StatusOr<at::Tensor> Vector(const std::string& name, int64_t size) {
    at::Tensor tensor = at::empty({size}, options_);
    WEFT_RETURN_IF_ERROR(Read(name, tensor));
    return tensor;
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
  Progress progress_;
};

absl::StatusOr<LayerWeights> LoadLayer(Loader& loader,
                                       const ModelConfig& config, int layer) {
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const lora::ModelShape shape = config.shape();
  LayerWeights w;
  WEFT_ASSIGN_OR_RETURN(
      w.input_norm_H,
      loader.Vector(prefix + "input_layernorm.weight", shape.hidden));
  WEFT_ASSIGN_OR_RETURN(w.qkv,
                        loader.Stacked({{attention + "q_proj", shape.q_width},
                                        {attention + "k_proj", shape.kv_width},
                                        {attention + "v_proj", shape.kv_width}},
                                       shape.hidden, config.attention_bias));
  if (config.qk_norm) {
    WEFT_ASSIGN_OR_RETURN(w.q_norm_C, loader.Vector(attention + "q_norm.weight",
                                                    config.head_dim));
    WEFT_ASSIGN_OR_RETURN(w.k_norm_C, loader.Vector(attention + "k_norm.weight",
                                                    config.head_dim));
  }
  WEFT_ASSIGN_OR_RETURN(
      w.o, loader.Stacked({{attention + "o_proj", shape.hidden}}, shape.q_width,
                          config.attention_bias));
  WEFT_ASSIGN_OR_RETURN(
      w.post_norm_H,
      loader.Vector(prefix + "post_attention_layernorm.weight", shape.hidden));
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
                        loader.Vector("model.norm.weight", config.hidden));
  w.head_VH = w.embedding_VH;
  if (!config.tied_embeddings) {
    WEFT_ASSIGN_OR_RETURN(
        w.head_VH,
        loader.Matrix("lm_head.weight", config.vocab, config.hidden));
  }
  return w;
}

}  // namespace weft::model
