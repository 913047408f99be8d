// Loads dense models as the daemon does. Writes the tensors of each decoder to
// a safetensors file, for tests that compare bits:
//   dump_weights DTYPE (MODEL_DIR FILE)...
// DTYPE is f32, f16 or bf16. Stacked projections stay stacked. Names are those
// of LayerWeights without shape suffixes.
#include <ATen/ATen.h>

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/model/decoder_weights.h"
#include "src/model_config/model_config.h"
#include "src/weights/checkpoint.h"
#include "src/weights/safetensors.h"

namespace weft::model {
namespace {

weights::ScalarType TypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return weights::ScalarType::kBf16;
    case at::kHalf:
      return weights::ScalarType::kF16;
    default:
      return weights::ScalarType::kF32;
  }
}

// Collects views into the tensors, which the caller keeps alive.
class Dump {
 public:
  // Adds a tensor, unless the model lacks it.
  void Add(const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    tensors_.push_back(
        {name,
         {.dtype = TypeOf(tensor),
          .shape = tensor.sizes().vec(),
          .bytes = absl::MakeConstSpan(
              static_cast<const std::byte*>(tensor.const_data_ptr()),
              tensor.nbytes())}});
  }
  void Add(const std::string& name, const lora::BaseLinear& linear) {
    Add(name + ".weight", linear.weight_OI);
    Add(name + ".bias", linear.bias_O);
  }
  std::string File() const { return weights::WriteSafetensors(tensors_); }

 private:
  std::vector<weights::NamedTensor> tensors_;
};

void AddLayer(const std::string& prefix, const LayerWeights& layer,
              Dump& dump) {
  dump.Add(prefix + "input_norm", layer.input_norm_H);
  dump.Add(prefix + "qkv", layer.qkv);
  dump.Add(prefix + "q_norm", layer.q_norm_C);
  dump.Add(prefix + "k_norm", layer.k_norm_C);
  dump.Add(prefix + "o", layer.o);
  dump.Add(prefix + "attention_out_norm", layer.attention_out_norm_H);
  dump.Add(prefix + "mlp_norm", layer.mlp_norm_H);
  dump.Add(prefix + "gate_up", layer.gate_up);
  dump.Add(prefix + "down", layer.down);
  dump.Add(prefix + "mlp_out_norm", layer.mlp_out_norm_H);
}

absl::Status WriteHeldWeights(const std::string& model_dir,
                              at::ScalarType dtype, const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(const model_config::ModelConfig config,
                        model_config::ReadModelConfig(model_dir));
  WEFT_ASSIGN_OR_RETURN(const auto checkpoint,
                        weights::Checkpoint::Open(model_dir));
  WEFT_ASSIGN_OR_RETURN(
      const DecoderWeights weights,
      LoadDecoderWeights(*checkpoint, config, dtype, at::kCPU));
  Dump dump;
  dump.Add("embedding", weights.embedding_VH);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    AddLayer(absl::StrCat("layers.", i, "."), weights.layers[i], dump);
  }
  dump.Add("final_norm", weights.final_norm_H);
  dump.Add("head", weights.head_VH);
  std::ofstream file(path, std::ios::binary);
  file << dump.File() << std::flush;
  return file ? absl::OkStatus()
              : absl::InternalError(absl::StrCat("cannot write ", path));
}

}  // namespace
}  // namespace weft::model

int main(int argc, char** argv) {
  const absl::flat_hash_map<std::string, at::ScalarType> dtypes = {
      {"f32", at::kFloat}, {"f16", at::kHalf}, {"bf16", at::kBFloat16}};
  if (argc < 4 || argc % 2 != 0 || !dtypes.contains(argv[1])) {
    std::cerr << "usage: dump_weights f32|f16|bf16 (MODEL_DIR FILE)...\n";
    return 2;
  }
  for (int i = 2; i < argc; i += 2) {
    const absl::Status written =
        weft::model::WriteHeldWeights(argv[i], dtypes.at(argv[1]), argv[i + 1]);
    if (written.ok()) continue;
    std::cerr << written << "\n";
    return 1;
  }
  return 0;
}
