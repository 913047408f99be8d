// Cuts a rank's part out of a decoder's whole weights.
#ifndef WEFT_TESTS_MODEL_SHARD_WEIGHTS_H_
#define WEFT_TESTS_MODEL_SHARD_WEIGHTS_H_

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "src/model/decoder_weights.h"
#include "src/model_config/model_shard.h"

namespace weft::testing {

// Returns rows of a stack of projections, part after part. Each part gives the
// first row of a projection in the stack and a range of rows within the
// projection.
inline at::Tensor RowsOf(
    const at::Tensor& stack,
    const std::vector<std::pair<int64_t, parallel::Range>>& parts) {
  if (!stack.defined()) return stack;
  std::vector<at::Tensor> rows;
  for (const auto& [begin, range] : parts) {
    rows.push_back(stack.slice(0, begin + range.begin, begin + range.end));
  }
  return at::cat(rows);
}

inline at::Tensor ColumnsOf(const at::Tensor& matrix,
                            const parallel::Range& range) {
  if (!matrix.defined()) return matrix;
  return matrix.slice(1, range.begin, range.end).contiguous();
}

inline lora::BaseLinear ColumnsOf(const lora::BaseLinear& linear,
                                  const parallel::Range& range, int rank) {
  return {.weight_OI = ColumnsOf(linear.weight_OI, range),
          .bias_O = rank == 0 ? linear.bias_O : at::Tensor()};
}

// Returns the rank's experts, each with only the rank's features.
inline model::ExpertWeights ExpertsOf(const model::ExpertWeights& whole,
                                      const model_config::ExpertShape& shape,
                                      const model_config::ModelShard& part) {
  model::ExpertWeights w = whole;
  std::vector<std::pair<int64_t, parallel::Range>> rows;
  for (int64_t i = 2 * part.experts.begin; i < 2 * part.experts.end; ++i) {
    rows.emplace_back(i * shape.ffn, part.expert_ffn);
  }
  w.gate_up_GH = RowsOf(whole.gate_up_GH, rows);
  w.gate_up_bias_G = RowsOf(whole.gate_up_bias_G, rows);
  const auto down_rows = [&part, count = shape.count](const at::Tensor& stack) {
    if (!stack.defined()) return stack;
    const int64_t hidden = stack.size(0) / count;
    return stack.narrow(0, part.experts.begin * hidden,
                        part.experts.size() * hidden);
  };
  w.down_DF = ColumnsOf(down_rows(whole.down_DF), part.expert_ffn);
  w.down_bias_D =
      part.has_expert_bias ? down_rows(whole.down_bias_D) : at::Tensor();
  w.shared_gate_up_S2H =
      RowsOf(whole.shared_gate_up_S2H,
             {{0, part.shared_ffn}, {shape.shared_ffn, part.shared_ffn}});
  w.shared_down_HS = ColumnsOf(whole.shared_down_HS, part.shared_ffn);
  return w;
}

inline model::DecoderWeights ShardWeights(
    const model::DecoderWeights& whole, const model_config::ModelConfig& config,
    const parallel::Shard& shard) {
  const model_config::ModelShape shape = config.shape();
  const model_config::ShapeRanges part =
      model_config::LocalRanges(config, shard);
  model::DecoderWeights w = whole;
  w.embedding_VH = RowsOf(whole.embedding_VH, {{0, part.vocab}});
  w.head_VH = RowsOf(whole.head_VH, {{0, part.vocab}});
  for (model::LayerWeights& layer : w.layers) {
    for (at::Tensor* qkv : {&layer.qkv.weight_OI, &layer.qkv.bias_O}) {
      *qkv = RowsOf(*qkv, {{0, part.q},
                           {shape.q_width, part.kv},
                           {shape.q_width + shape.kv_width, part.kv}});
    }
    for (at::Tensor* gate_up :
         {&layer.gate_up.weight_OI, &layer.gate_up.bias_O}) {
      *gate_up = RowsOf(*gate_up, {{0, part.ffn}, {shape.ffn, part.ffn}});
    }
    layer.o = ColumnsOf(layer.o, part.q, shard.rank);
    layer.down = ColumnsOf(layer.down, part.ffn, shard.rank);
    layer.experts = ExpertsOf(layer.experts, shape.experts,
                              model_config::ShardOf(config, shard));
  }
  return w;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_MODEL_SHARD_WEIGHTS_H_
