#include "tests/model/reference_decoder.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdint>

namespace weft::testing {
namespace {

using lora::ProjectionGroup;

at::Tensor F64(const at::Tensor& tensor) { return tensor.to(at::kDouble); }

class Reference {
 public:
  Reference(const model::ModelConfig& config,
            const model::DecoderWeights& weights,
            const model::PackedBatch& batch)
      : config_(config), weights_(weights), batch_(batch) {
    for (const lora::LoraSegment& segment : batch.routing) {
      flats_.push_back(
          F64(segment.version->compute_N).clone().requires_grad_(true));
    }
    const at::Tensor frequencies =
        at::tensor(config.inverse_frequencies, at::kFloat);
    // f32, as the models were trained (src/ops/rotary.cc).
    const at::Tensor angles =
        F64(at::outer(batch.positions_T.to(at::kFloat), frequencies));
    cos_ = F64(angles.cos().to(at::kFloat)).unsqueeze(1);
    sin_ = F64(angles.sin().to(at::kFloat)).unsqueeze(1);
  }

  [[nodiscard]] const std::vector<at::Tensor>& flats() const { return flats_; }

  [[nodiscard]] at::Tensor Run() const {
    at::Tensor x = F64(weights_.embedding_VH).index_select(0, batch_.tokens_T);
    for (int layer = 0; layer < config_.num_layers; ++layer) {
      const model::LayerWeights& w = weights_.layers[layer];
      x = x + Attention(layer, Norm(x, w.input_norm_H));
      x = x + Mlp(layer, Norm(x, w.post_norm_H));
    }
    return Norm(x, weights_.final_norm_H);
  }

 private:
  // Over the last dimension.
  [[nodiscard]] at::Tensor Norm(const at::Tensor& x,
                                const at::Tensor& weight) const {
    const at::Tensor mean = x.pow(2).mean(-1, /*keepdim=*/true);
    return x * (mean + config_.rms_norm_eps).rsqrt() * F64(weight);
  }

  static int64_t ColumnOf(TargetModule module, const lora::ModelShape& shape) {
    if (module == TargetModule::kKProj) return shape.q_width;
    if (module == TargetModule::kVProj) return shape.q_width + shape.kv_width;
    return module == TargetModule::kUpProj ? shape.ffn : 0;
  }

  [[nodiscard]] at::Tensor Linear(const at::Tensor& x,
                                  const lora::BaseLinear& base, int layer,
                                  ProjectionGroup group) const {
    at::Tensor y = at::mm(x, F64(base.weight_OI).t());
    if (base.bias_O.defined()) y = y + F64(base.bias_O);
    for (size_t i = 0; i < batch_.routing.size(); ++i) {
      const lora::LoraSegment& segment = batch_.routing[i];
      const lora::AdapterVersion& version = *segment.version;
      const int64_t rank = version.layout->rank();
      const at::Tensor rows = x.slice(0, segment.begin, segment.end);
      for (const lora::LoraFactor& f :
           version.layout->group(layer, group).factors) {
        const at::Tensor a =
            flats_[i].narrow(0, f.a_offset, rank * f.in).view({rank, f.in});
        const at::Tensor b =
            flats_[i].narrow(0, f.b_offset, f.out * rank).view({f.out, rank});
        const at::Tensor delta =
            at::mm(at::mm(rows, a.t()), b.t()) * version.scale;
        const int64_t column = ColumnOf(f.module, config_.shape());
        y = y + at::constant_pad_nd(
                    delta, {column, y.size(1) - column - f.out, segment.begin,
                            y.size(0) - segment.end});
      }
    }
    return y;
  }

  [[nodiscard]] at::Tensor Rotate(const at::Tensor& x) const {
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    return at::cat({halves[0] * cos_ - halves[1] * sin_,
                    halves[1] * cos_ + halves[0] * sin_},
                   -1);
  }

  // Row i may see row j: an earlier row of its node, or any of an ancestor.
  [[nodiscard]] at::Tensor Hidden() const {
    const int64_t rows = batch_.tokens_T.numel();
    at::Tensor hidden = at::ones({rows, rows}, at::kBool);
    for (const ops::AttentionNode& node : batch_.nodes) {
      for (int64_t i = node.begin; i < node.end; ++i) {
        hidden[i].slice(0, node.begin, i + 1).fill_(false);
        for (int64_t up = node.parent; up >= 0; up = batch_.nodes[up].parent) {
          const ops::AttentionNode& parent = batch_.nodes[up];
          hidden[i].slice(0, parent.begin, parent.end).fill_(false);
        }
      }
    }
    return hidden;
  }

  [[nodiscard]] at::Tensor Attention(int layer, const at::Tensor& x) const {
    const model::LayerWeights& w = weights_.layers[layer];
    const lora::ModelShape shape = config_.shape();
    const std::vector<at::Tensor> qkv =
        Linear(x, w.qkv, layer, ProjectionGroup::kQkv)
            .split_with_sizes({shape.q_width, shape.kv_width, shape.kv_width},
                              1);
    const auto heads = [&](const at::Tensor& part) {
      return part.unflatten(1, {-1, config_.head_dim});
    };
    at::Tensor q = heads(qkv[0]), k = heads(qkv[1]), v = heads(qkv[2]);
    if (config_.qk_norm) {
      q = Norm(q, w.q_norm_C);
      k = Norm(k, w.k_norm_C);
    }
    const int64_t group = config_.num_heads / config_.num_kv_heads;
    q = Rotate(q).transpose(0, 1);
    k = Rotate(k).repeat_interleave(group, 1).transpose(0, 1);
    v = v.repeat_interleave(group, 1).transpose(0, 1);
    const at::Tensor scores = at::matmul(q, k.transpose(1, 2)) /
                              std::sqrt(static_cast<double>(config_.head_dim));
    const at::Tensor attended =
        at::matmul(scores.masked_fill(Hidden(), -INFINITY).softmax(-1), v);
    return Linear(attended.transpose(0, 1).flatten(1), w.o, layer,
                  ProjectionGroup::kO);
  }

  [[nodiscard]] at::Tensor Mlp(int layer, const at::Tensor& x) const {
    const model::LayerWeights& w = weights_.layers[layer];
    const std::vector<at::Tensor> parts =
        Linear(x, w.gate_up, layer, ProjectionGroup::kGateUp).chunk(2, 1);
    return Linear(parts[0] * parts[0].sigmoid() * parts[1], w.down, layer,
                  ProjectionGroup::kDown);
  }

  const model::ModelConfig& config_;
  const model::DecoderWeights& weights_;
  const model::PackedBatch& batch_;
  std::vector<at::Tensor> flats_;  // Weights of each segment, as leaves.
  at::Tensor cos_, sin_;
};

}  // namespace

ReferenceResult RunReference(const model::ModelConfig& config,
                             const model::DecoderWeights& weights,
                             const model::PackedBatch& batch,
                             const at::Tensor& dy_TH) {
  const Reference reference(config, weights, batch);
  const at::Tensor y = reference.Run();
  ReferenceResult result{.y_TH = y.detach()};
  if (!y.requires_grad()) return result;
  result.gradients =
      torch::autograd::grad({y}, reference.flats(), {F64(dy_TH)});
  return result;
}

}  // namespace weft::testing
