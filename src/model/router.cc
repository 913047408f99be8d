#include "src/model/router.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/TopKImpl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/ops/matmul.h"
#include "src/ops/pointwise.h"

namespace weft::model {
namespace {

// The dtype of scores: f32, or f64 if the tensor is f64.
at::ScalarType WideType(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Returns x or the router in the dtype of the products with it.
at::Tensor Operand(const at::Tensor& tensor,
                   const model_config::MoeConfig& config) {
  return config.wide_logits ? tensor.to(WideType(tensor)) : tensor;
}

at::Tensor Logits(const at::Tensor& x_TH, const RouterWeights& weights,
                  const model_config::MoeConfig& config) {
  at::Tensor logits_TE =
      ops::Linear(Operand(x_TH, config), Operand(weights.router_EH, config));
  if (weights.bias_E.defined()) logits_TE.add_(weights.bias_E);
  return logits_TE;
}

// Sorting costs about this many operations for each score.
constexpr int64_t kSortCost = 8;

at::Tensor Softmax(const at::Tensor& logits) {
  return at::softmax(logits, -1, WideType(logits));
}

// Returns what the weights of a token's experts are divided by.
at::Tensor Divisor(const at::Tensor& chosen_TK,
                   const model_config::MoeConfig& config) {
  at::Tensor sum_T1 = chosen_TK.sum(1, /*keepdim=*/true);
  return config.sum_epsilon > 0 ? sum_T1.add_(config.sum_epsilon) : sum_T1;
}

// Returns the weights of `experts_TK`, given the probabilities `scores_TE`.
// With softmax_of_chosen, `scores_TE` has logits, and the result is the logits
// of `experts_TK`.
at::Tensor ScoresOf(const at::Tensor& scores_TE, const at::Tensor& experts_TK,
                    const model_config::MoeConfig& config) {
  at::Tensor chosen_TK = scores_TE.gather(1, experts_TK);
  if (config.softmax_of_chosen || !config.normalizes_weights) return chosen_TK;
  return chosen_TK / Divisor(chosen_TK, config);
}

// Returns the scores by which a sigmoid router chooses: corrected, and -inf in
// groups of experts that a token may not use.
at::Tensor CorrectedScores(const at::Tensor& scores_TE,
                           const at::Tensor& correction_E,
                           const model_config::MoeConfig& config) {
  const at::Tensor corrected_TE = scores_TE + correction_E;
  if (config.groups == 1) return corrected_TE;
  const at::Tensor by_group_TGE =
      corrected_TE.unflatten(1, {config.groups, -1});
  const at::Tensor group_scores_TG =
      std::get<0>(at::topk(by_group_TGE, 2, /*dim=*/2)).sum(2);
  const at::Tensor chosen =
      std::get<1>(at::topk(group_scores_TG, config.chosen_groups, /*dim=*/1));
  const at::Tensor absent_TG =
      at::ones_like(group_scores_TG, at::kBool).scatter_(1, chosen, false);
  return by_group_TGE
      .masked_fill(absent_TG.unsqueeze(2),
                   -std::numeric_limits<double>::infinity())
      .flatten(1);
}

at::Tensor Choose(const at::Tensor& scores_TE, int64_t per_token,
                  const at::Tensor& given_TK) {
  at::Tensor experts_TK =
      std::get<1>(at::topk(scores_TE, per_token, /*dim=*/1));
  if (!given_TK.defined()) return experts_TK;
  return at::where(given_TK.lt(0), experts_TK, given_TK);
}

// Divides the weights by their sum, as ScoresOf does. Adds the weights in the
// order in which at::sum on x86 adds at most 31 numbers: in 4 lanes if there
// are fewer than 8 weights, otherwise in 8 lanes. The last weights may not fill
// all lanes. With 4 lanes, the last weights are added to the first lane. With 8
// lanes, the last weights have a sum of their own, to which the lanes are
// added.
void NormalizeRow(float* weights_K, int64_t per_token) {
  const int64_t width = per_token < 8 ? 4 : 8;
  const int64_t whole = per_token / width * width;
  float lanes[8] = {};
  float rest = 0;
  for (int64_t k = 0; k < whole; ++k) lanes[k % width] += weights_K[k];
  float& end = width == 4 ? lanes[0] : rest;
  for (int64_t k = whole; k < per_token; ++k) end += weights_K[k];
  float sum = rest;
  for (int64_t lane = 0; lane < width; ++lane) sum += lanes[lane];
  for (int64_t k = 0; k < per_token; ++k) weights_K[k] /= sum;
}

// Does what Choose and ScoresOf do, row by row. For few rows, LibTorch's
// operators take longer to set up than to run.
class RowChoice {
 public:
  // The tensors outlive the object. Run writes `experts_TK` and `chosen_TK`.
  RowChoice(const at::Tensor& scores_TE, const at::Tensor& given_TK,
            const at::Tensor& experts_TK, const at::Tensor& chosen_TK,
            const model_config::MoeConfig& config)
      : scores_(scores_TE.const_data_ptr<float>()),
        given_(given_TK.defined() ? given_TK.const_data_ptr<int64_t>()
                                  : nullptr),
        experts_(experts_TK.mutable_data_ptr<int64_t>()),
        chosen_(chosen_TK.mutable_data_ptr<float>()),
        num_experts_(scores_TE.size(1)),
        per_token_(experts_TK.size(1)),
        normalizes_(config.normalizes_weights && !config.softmax_of_chosen) {}

  // Chooses the experts of the tokens [begin, end).
  void Run(int64_t begin, int64_t end) const {
    const int64_t first = begin * per_token_, last = end * per_token_;
    if (given_ == nullptr ||
        std::any_of(given_ + first, given_ + last,
                    [](int64_t expert) { return expert < 0; })) {
      TakeLargest(begin, end);
    }
    if (given_ != nullptr) {
      for (int64_t pair = first; pair < last; ++pair) TakeGiven(pair);
    }
    if (!normalizes_) return;
    for (int64_t pair = first; pair < last; pair += per_token_) {
      NormalizeRow(chosen_ + pair, per_token_);
    }
  }

 private:
  // Runs the loop of at::topk, so ties are broken in the same way.
  void TakeLargest(int64_t begin, int64_t end) const {
    // `data` has no const pointers, but the loop only reads the scores.
    char* data[] = {reinterpret_cast<char*>(chosen_ + begin * per_token_),
                    reinterpret_cast<char*>(experts_ + begin * per_token_),
                    reinterpret_cast<char*>(const_cast<float*>(scores_) +
                                            begin * num_experts_)};
    const int64_t strides[] = {
        per_token_ * static_cast<int64_t>(sizeof(float)),
        per_token_ * static_cast<int64_t>(sizeof(int64_t)),
        num_experts_ * static_cast<int64_t>(sizeof(float))};
    at::native::topk_impl_loop<float, float>(
        /*mode_values_stride=*/1, /*mode_indices_stride=*/1,
        /*tmp_values_stride=*/1, per_token_, num_experts_, /*largest=*/true,
        /*sorted=*/true, data, strides, end - begin);
  }

  void TakeGiven(int64_t pair) const {
    const int64_t expert = given_[pair], token = pair / per_token_;
    if (expert < 0) return;
    TORCH_CHECK(expert < num_experts_, "expert ", expert, " of token ", token,
                " is not in [0, ", num_experts_, ")");
    experts_[pair] = expert;
    chosen_[pair] = scores_[token * num_experts_ + expert];
  }

  const float* scores_;
  const int64_t* given_;  // Null if no experts are given.
  int64_t* experts_;
  float* chosen_;
  const int64_t num_experts_, per_token_;
  const bool normalizes_;
};

void ChooseRows(const at::Tensor& scores_TE, const at::Tensor& given_TK,
                const at::Tensor& experts_TK, const at::Tensor& chosen_TK,
                const model_config::MoeConfig& config) {
  at::Tensor given = given_TK;
  if (given.defined()) {
    TORCH_CHECK(given.sizes() == experts_TK.sizes(), "given experts are ",
                given.sizes(), ", wanted ", experts_TK.sizes());
    given = given.contiguous();
  }
  const RowChoice choice(scores_TE, given, experts_TK, chosen_TK, config);
  at::parallel_for(0, scores_TE.size(0),
                   ops::RowGrain(kSortCost * scores_TE.size(1)),
                   [&](int64_t begin, int64_t end) { choice.Run(begin, end); });
}

// Returns the scores by which the experts are chosen, before corrections.
at::Tensor Scores(const at::Tensor& x_TH, const RouterWeights& weights,
                  const model_config::MoeConfig& config) {
  at::Tensor logits_TE = Logits(x_TH, weights, config);
  if (config.sigmoid) return ops::Sigmoid(logits_TE.to(WideType(logits_TE)));
  return config.softmax_of_chosen ? logits_TE : Softmax(logits_TE);
}

// Returns dLoss/dlogits [T, E].
at::Tensor LogitsGradient(const at::Tensor& d_weights_TK,
                          const Routing& routing, int64_t num_experts,
                          const model_config::MoeConfig& config) {
  const at::Tensor& probs = routing.probs;
  at::Tensor d_chosen_TK = d_weights_TK.to(probs.scalar_type());
  const auto scatter = [&](const at::Tensor& d_TK) {
    return at::zeros({d_TK.size(0), num_experts}, d_TK.options())
        .scatter_(1, routing.experts_TK, d_TK);
  };
  if (config.softmax_of_chosen) {
    return scatter(at::_softmax_backward_data(d_chosen_TK, probs, /*dim=*/1,
                                              probs.scalar_type()));
  }
  if (config.sigmoid) d_chosen_TK = d_chosen_TK * config.weight_scale;
  if (config.normalizes_weights) {
    const at::Tensor chosen_TK = probs.gather(1, routing.experts_TK);
    const at::Tensor sum_T1 = Divisor(chosen_TK, config);
    const at::Tensor mean_T1 =
        (d_chosen_TK * chosen_TK).sum(1, /*keepdim=*/true) / sum_T1;
    d_chosen_TK = (d_chosen_TK - mean_T1) / sum_T1;
  }
  if (config.sigmoid) return at::sigmoid_backward(scatter(d_chosen_TK), probs);
  return at::_softmax_backward_data(scatter(d_chosen_TK), probs, /*dim=*/1,
                                    probs.scalar_type());
}

// Returns the segments of one expert's rows. `routing` has the segments of the
// batch, and [begin, end) are the tokens of the rows, in ascending order.
lora::LoraRouting RoutingOf(const int64_t* begin, const int64_t* end,
                            const lora::LoraRouting& routing) {
  lora::LoraRouting result;
  const int64_t* first = begin;
  for (const lora::LoraSegment& segment : routing) {
    first = std::lower_bound(first, end, segment.begin);
    const int64_t* last = std::lower_bound(first, end, segment.end);
    if (first == last) continue;
    result.push_back({.begin = first - begin,
                      .end = last - begin,
                      .version = segment.version});
    first = last;
  }
  return result;
}

}  // namespace

Routing Route(const at::Tensor& x_TH, const RouterWeights& weights,
              const model_config::MoeConfig& config, const at::Tensor& given_TK,
              bool all_given) {
  const at::Tensor scores_TE = Scores(x_TH, weights, config);
  const int64_t per_token = config.shape.per_token;
  Routing routing{.probs = scores_TE};
  at::Tensor weights_TK;
  if (!config.sigmoid && ops::HasCpuKernel(scores_TE) &&
      scores_TE.is_contiguous()) {
    const int64_t num_tokens = scores_TE.size(0);
    routing.experts_TK = at::empty({num_tokens, per_token},
                                   scores_TE.options().dtype(at::kLong));
    weights_TK = at::empty({num_tokens, per_token}, scores_TE.options());
    ChooseRows(scores_TE, given_TK, routing.experts_TK, weights_TK, config);
  } else {
    routing.experts_TK =
        all_given ? given_TK
                  : Choose(config.sigmoid
                               ? CorrectedScores(scores_TE,
                                                 weights.correction_E, config)
                               : scores_TE,
                           per_token, given_TK);
    weights_TK = ScoresOf(scores_TE, routing.experts_TK, config);
  }
  if (config.softmax_of_chosen)
    routing.probs = weights_TK = Softmax(weights_TK);
  if (config.sigmoid) weights_TK.mul_(config.weight_scale);
  routing.weights_TK = weights_TK.to(x_TH.scalar_type());
  return routing;
}

at::Tensor RouteBackward(const at::Tensor& d_weights_TK, const Routing& routing,
                         const at::Tensor& router_EH,
                         const model_config::MoeConfig& config) {
  const at::ScalarType dtype = routing.weights_TK.scalar_type();
  const at::Tensor router = Operand(router_EH, config);
  const at::Tensor d_logits_TE =
      LogitsGradient(d_weights_TK, routing, router.size(0), config)
          .to(config.wide_logits ? router.scalar_type() : dtype);
  return ops::MatMul(d_logits_TE, router).to(dtype);
}

at::Tensor SharedWeight(const at::Tensor& x_TH, const at::Tensor& gate_1H) {
  if (!gate_1H.defined()) return at::ones({x_TH.size(0), 1}, x_TH.options());
  return ops::Sigmoid(ops::Linear(x_TH, gate_1H.to(x_TH.scalar_type())));
}

void SharedWeightBackward(const at::Tensor& d_weight_T,
                          const at::Tensor& weight_T1,
                          const at::Tensor& gate_1H, at::Tensor& dx_TH) {
  if (!gate_1H.defined()) return;
  const at::Tensor d_gate_T1 =
      at::sigmoid_backward(d_weight_T.unsqueeze(1), weight_T1);
  dx_TH.add_(ops::MatMul(d_gate_T1, gate_1H.to(dx_TH.scalar_type())));
}

ExpertRows SortByExpert(const at::Tensor& experts_TK,
                        const model_config::ExpertShape& experts,
                        const lora::LoraRouting& routing) {
  at::Tensor on_host = experts_TK;
  ops::ToHost({&on_host});
  const auto* chosen = on_host.const_data_ptr<int64_t>();
  const int64_t num_pairs = on_host.numel();
  const int64_t per_token = on_host.size(1);
  const int num_experts = experts.count;
  std::vector<int64_t> begins(num_experts + 1);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    TORCH_CHECK(chosen[pair] >= 0 && chosen[pair] < num_experts, "expert ",
                chosen[pair], " of token ", pair / per_token, " is not in [0, ",
                num_experts, ")");
    if (experts.Has(chosen[pair])) ++begins[chosen[pair] + 1];
  }
  for (int i = 0; i < num_experts; ++i) begins[i + 1] += begins[i];

  const int64_t num_rows = begins.back();
  const at::Tensor tokens_N = at::empty({num_rows}, at::kLong);
  const at::Tensor pairs_N = at::empty_like(tokens_N);
  const at::Tensor places_TK = at::empty_like(on_host);
  auto* tokens = tokens_N.mutable_data_ptr<int64_t>();
  auto* pairs = pairs_N.mutable_data_ptr<int64_t>();
  auto* places = places_TK.mutable_data_ptr<int64_t>();
  std::vector<int64_t> next(begins.begin(), begins.end() - 1);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (!experts.Has(chosen[pair])) {
      places[pair] = num_rows;
      continue;
    }
    const int64_t row = next[chosen[pair]]++;
    tokens[row] = pair / per_token;
    pairs[row] = pair;
    places[pair] = row;
  }

  const at::Device device = experts_TK.device();
  ExpertRows rows{.tokens_N = ops::ToDevice(tokens_N, device),
                  .pairs_N = ops::ToDevice(pairs_N, device),
                  .places_TK = ops::ToDevice(places_TK, device),
                  .has_absent = num_rows < num_pairs};
  for (int i = 0; i < num_experts; ++i) {
    if (begins[i] == begins[i + 1]) continue;
    rows.parts.push_back(
        {.expert = i,
         .begin = begins[i],
         .end = begins[i + 1],
         .routing =
             RoutingOf(tokens + begins[i], tokens + begins[i + 1], routing)});
  }
  return rows;
}

ExpertRows SortOnDevice(const at::Tensor& experts_TK, int64_t num_experts) {
  if constexpr (ops::kHasCudaKernels) {
    ops::cuda::ExpertOrder order =
        ops::cuda::SortByExpert(experts_TK, num_experts);
    return {.tokens_N = std::move(order.tokens_N),
            .pairs_N = std::move(order.pairs_N),
            .places_TK = std::move(order.places_TK),
            .ends_E = std::move(order.ends_E)};
  }
  TORCH_CHECK(false, "a build without CUDA has no sort on a device");
}

at::Tensor GatherRows(const at::Tensor& x_TH, const at::Tensor& tokens_N) {
  if (!ops::HasCpuKernel(x_TH) || !x_TH.is_contiguous()) {
    return x_TH.index_select(0, tokens_N);
  }
  const int64_t hidden = x_TH.size(1);
  at::Tensor x_NH = at::empty({tokens_N.size(0), hidden}, x_TH.options());
  const auto* tokens = tokens_N.const_data_ptr<int64_t>();
  const auto* from = x_TH.const_data_ptr<float>();
  auto* to = x_NH.mutable_data_ptr<float>();
  at::parallel_for(0, tokens_N.size(0), ops::RowGrain(hidden),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t n = begin; n < end; ++n) {
                       std::copy_n(from + tokens[n] * hidden, hidden,
                                   to + n * hidden);
                     }
                   });
  return x_NH;
}

at::Tensor SumOfRows(const at::Tensor& rows_NH, const at::Tensor& places_TK) {
  const int64_t per_token = places_TK.size(1);
  if constexpr (ops::kHasCudaKernels) {
    if (ops::HasCudaKernel(rows_NH)) {
      return ops::cuda::SumExpertRows(rows_NH, places_TK);
    }
  }
  if (!ops::HasCpuKernel(rows_NH)) {
    at::Tensor sum_TH = rows_NH.index_select(0, places_TK.select(1, 0));
    for (int64_t k = 1; k < per_token; ++k) {
      sum_TH.add_(rows_NH.index_select(0, places_TK.select(1, k)));
    }
    return sum_TH;
  }
  const int64_t hidden = rows_NH.size(1);
  at::Tensor sum_TH = at::empty({places_TK.size(0), hidden}, rows_NH.options());
  const auto* places = places_TK.const_data_ptr<int64_t>();
  const auto* rows = rows_NH.const_data_ptr<float>();
  auto* sums = sum_TH.mutable_data_ptr<float>();
  const auto add_row = kernels::cpu::Kernels().add_row;
  at::parallel_for(0, places_TK.size(0), ops::RowGrain(per_token * hidden),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t t = begin; t < end; ++t) {
                       const int64_t* places_K = places + t * per_token;
                       float* sum_H = sums + t * hidden;
                       std::copy_n(rows + places_K[0] * hidden, hidden, sum_H);
                       for (int64_t k = 1; k < per_token; ++k) {
                         add_row(rows + places_K[k] * hidden, hidden, sum_H);
                       }
                     }
                   });
  return sum_TH;
}

}  // namespace weft::model
