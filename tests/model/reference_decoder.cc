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
  Reference(const model_config::ModelConfig& config,
            const model::DecoderWeights& weights,
            const model::PackedBatch& batch)
      : config_(config), weights_(weights), batch_(batch) {
    for (const lora::LoraSegment& segment : batch.routing) {
      flats_.push_back(
          F64(segment.version->compute_N).clone().requires_grad_(true));
    }
  }

  const std::vector<at::Tensor>& flats() const { return flats_; }

  at::Tensor Run() const {
    at::Tensor x = Embedding();
    if (config_.scaled_embeddings) {
      x = x * std::sqrt(static_cast<double>(config_.hidden));
    }
    for (int layer = 0; layer < config_.num_layers; ++layer) {
      const model::LayerWeights& w = weights_.layers[layer];
      const at::Tensor attended = Attention(layer, Norm(x, w.input_norm_H));
      x = x + OutputNorm(attended, w.attention_out_norm_H);
      x = x + OutputNorm(Mlp(layer, Norm(x, w.mlp_norm_H)), w.mlp_out_norm_H);
    }
    return Norm(x, weights_.final_norm_H);
  }

 private:
  // Returns the tokens' embeddings. Some models scale embeddings, but this
  // function does not.
  at::Tensor Embedding() const {
    at::Tensor x = F64(weights_.embedding_VH).index_select(0, batch_.tokens_T);
    for (size_t i = 0; i < batch_.routing.size(); ++i) {
      const lora::LoraSegment& segment = batch_.routing[i];
      const lora::AdapterVersion& version = *segment.version;
      for (const lora::LoraFactor& f :
           version.layout->group(0, ProjectionGroup::kEmbedTokens).factors) {
        const at::Tensor tokens =
            batch_.tokens_T.slice(0, segment.begin, segment.end);
        const at::Tensor a = version.A(flats_[i], f).index_select(1, tokens);
        const at::Tensor delta =
            at::mm(version.B(flats_[i], f), a).t() * f.scale;
        x = x + at::constant_pad_nd(
                    delta, {0, 0, segment.begin, x.size(0) - segment.end});
      }
    }
    return x;
  }

  // Applies RMSNorm to the last dimension.
  at::Tensor Norm(const at::Tensor& x, const at::Tensor& weight) const {
    const at::Tensor mean = x.pow(2).mean(-1, /*keepdim=*/true);
    return x * (mean + config_.rms_norm_eps).rsqrt() * F64(weight);
  }

  at::Tensor OutputNorm(const at::Tensor& x, const at::Tensor& weight) const {
    return config_.has_output_norms() ? Norm(x, weight) : x;
  }

  static int64_t ColumnOf(const lora::LoraFactor& factor,
                          const model_config::ModelShape& shape) {
    if (factor.module == TargetModule::kKProj) return shape.q_width;
    if (factor.module == TargetModule::kVProj) {
      return shape.q_width + shape.kv_width;
    }
    return factor.module == TargetModule::kUpProj ? factor.out : 0;
  }

  at::Tensor Linear(const at::Tensor& x, const lora::BaseLinear& base,
                    int layer, ProjectionGroup group,
                    int expert = lora::kNoExpert) const {
    at::Tensor y = at::mm(x, F64(base.weight_OI).t());
    if (base.bias_O.defined()) y = y + F64(base.bias_O);
    for (size_t i = 0; i < batch_.routing.size(); ++i) {
      const lora::LoraSegment& segment = batch_.routing[i];
      const lora::AdapterVersion& version = *segment.version;
      const at::Tensor rows = x.slice(0, segment.begin, segment.end);
      for (const lora::LoraFactor& f :
           version.layout->group(layer, group, expert).factors) {
        const at::Tensor a =
            flats_[i].narrow(0, f.a_offset, f.rank * f.in).view({f.rank, f.in});
        const at::Tensor b = flats_[i]
                                 .narrow(0, f.b_offset, f.out * f.rank)
                                 .view({f.out, f.rank});
        const at::Tensor delta = at::mm(at::mm(rows, a.t()), b.t()) * f.scale;
        const int64_t column = ColumnOf(f, config_.shape());
        y = y + at::constant_pad_nd(
                    delta, {column, y.size(1) - column - f.out, segment.begin,
                            y.size(0) - segment.end});
      }
    }
    return y;
  }

  at::Tensor Rotate(int layer, const at::Tensor& x) const {
    const at::Tensor frequencies = at::tensor(
        config_.rope_tables[config_.attention[layer].rope_table], at::kFloat);
    // The angles are f32, as in training (src/ops/rotary.cc).
    const at::Tensor angles =
        F64(at::outer(batch_.positions_T.to(at::kFloat), frequencies));
    const at::Tensor cos = F64(angles.cos().to(at::kFloat)).unsqueeze(1);
    const at::Tensor sin = F64(angles.sin().to(at::kFloat)).unsqueeze(1);
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    return at::cat(
        {halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin},
        -1);
  }

  // Returns [T, T], which is true at [i, j] if row i must not see row j. A row
  // sees itself, the earlier rows of its node and all rows of the node's
  // ancestors, but no row before its window.
  at::Tensor Hidden(int64_t window) const {
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
    if (window == 0) return hidden;
    const at::Tensor distance =
        batch_.positions_T.unsqueeze(1) - batch_.positions_T.unsqueeze(0);
    return hidden.logical_or(distance >= window);
  }

  at::Tensor Attention(int layer, const at::Tensor& x) const {
    const model::LayerWeights& w = weights_.layers[layer];
    const model_config::ModelShape shape = config_.shape();
    const std::vector<at::Tensor> qkv =
        Linear(x, w.qkv, layer, ProjectionGroup::kQkv)
            .split_with_sizes({shape.q_width, shape.kv_width, shape.kv_width},
                              1);
    const auto heads = [&](const at::Tensor& part) {
      return part.unflatten(1, {-1, config_.head_dim});
    };
    at::Tensor q = heads(qkv[0]), k = heads(qkv[1]), v = heads(qkv[2]);
    if (config_.qk_norm == model_config::QkNorm::kHead) {
      q = Norm(q, w.q_norm_C);
      k = Norm(k, w.k_norm_C);
    }
    const int64_t group = config_.num_heads / config_.num_kv_heads;
    q = Rotate(layer, q).transpose(0, 1);
    k = Rotate(layer, k).repeat_interleave(group, 1).transpose(0, 1);
    v = v.repeat_interleave(group, 1).transpose(0, 1);
    const ops::AttentionRule& rule = config_.attention[layer].rule;
    at::Tensor scores = at::matmul(q, k.transpose(1, 2)) * rule.scale;
    if (rule.softcap > 0)
      scores = (scores / rule.softcap).tanh() * rule.softcap;
    const at::Tensor hidden = Hidden(rule.window);
    const at::Tensor attended =
        at::matmul(scores.masked_fill(hidden, -INFINITY).softmax(-1), v);
    return Linear(attended.transpose(0, 1).flatten(1), w.o, layer,
                  ProjectionGroup::kO);
  }

  at::Tensor Mlp(int layer, const at::Tensor& x) const {
    const model::LayerWeights& w = weights_.layers[layer];
    if (config_.moe.shape.InLayer(layer)) return Mixture(layer, x);
    return Gated(x, w.gate_up, w.down, layer, lora::kNoExpert);
  }

  at::Tensor Gated(const at::Tensor& x, const lora::BaseLinear& gate_up,
                   const lora::BaseLinear& down, int layer, int expert) const {
    const std::vector<at::Tensor> parts =
        Linear(x, gate_up, layer, ProjectionGroup::kGateUp, expert).chunk(2, 1);
    const at::Tensor gate = config_.activation == ops::Activation::kSilu
                                ? at::silu(parts[0])
                                : at::gelu(parts[0], "tanh");
    return Linear(gate * parts[1], down, layer, ProjectionGroup::kDown, expert);
  }

  // Runs every expert on every row; the experts that a row does not have get
  // weight 0.
  at::Tensor Mixture(int layer, const at::Tensor& x) const {
    const model::ExpertWeights& w = weights_.layers[layer].experts;
    const model_config::ExpertShape& experts = config_.moe.shape;
    const at::Tensor probs = at::mm(x, F64(w.router_EH).t()).softmax(1);
    const at::Tensor chosen =
        std::get<1>(probs.topk(config_.moe.shape.per_token, 1));
    at::Tensor weights = probs * at::zeros_like(probs).scatter(1, chosen, 1.0);
    if (config_.moe.normalizes_weights) {
      weights = weights / weights.sum(1, /*keepdim=*/true);
    }
    at::Tensor y = at::zeros_like(x);
    for (int i = 0; i < experts.count; ++i) {
      const lora::BaseLinear gate_up = {w.gate_up_GH.chunk(experts.count)[i],
                                        {}};
      const lora::BaseLinear down = {w.down_DF.chunk(experts.count)[i], {}};
      y = y + weights.narrow(1, i, 1) * Gated(x, gate_up, down, layer, i);
    }
    if (experts.shared_ffn == 0) return y;
    const at::Tensor gate = at::mm(x, F64(w.shared_gate_1H).t()).sigmoid();
    return y + gate * Gated(x, {w.shared_gate_up_S2H, {}},
                            {w.shared_down_HS, {}}, layer, experts.count);
  }

  const model_config::ModelConfig& config_;
  const model::DecoderWeights& weights_;
  const model::PackedBatch& batch_;
  std::vector<at::Tensor> flats_;  // The weights of each segment, as leaves.
};

}  // namespace

ReferenceResult RunReference(const model_config::ModelConfig& config,
                             const model::DecoderWeights& weights,
                             const model::PackedBatch& batch,
                             const at::Tensor& dy_TH) {
  const Reference reference(config, weights, batch);
  const at::Tensor y = reference.Run();
  ReferenceResult result{.y_TH = y.detach()};
  if (!y.requires_grad()) return result;
  result.gradients = torch::autograd::grad(
      {y}, reference.flats(), {F64(dy_TH)}, /*retain_graph=*/{},
      /*create_graph=*/false, /*allow_unused=*/true);
  // An adapter without matrices in this model has no gradient.
  for (at::Tensor& gradient : result.gradients) {
    if (!gradient.defined()) gradient = at::empty({0});
  }
  return result;
}

}  // namespace weft::testing
