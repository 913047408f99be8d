// The router of a mixture of experts. It chooses the experts of each token, and
// computes a routing weight for each chosen expert. The router is frozen, but
// gradients pass through the routing weights to the router's input.
//
// SortByExpert and SortOnDevice sort the rows of a batch by the chosen experts.
//
// Legend: T tokens, H hidden, E experts, K experts per token, N rows.
#ifndef WEFT_SRC_MODEL_ROUTER_H_
#define WEFT_SRC_MODEL_ROUTER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/lora/lora_linear.h"
#include "src/model_config/model_config.h"

namespace weft::model {

struct Routing {
  // i64. Each token's experts have descending probability, or corrected score,
  // except where the caller chose the expert.
  at::Tensor experts_TK;
  at::Tensor weights_TK;  // In the dtype of x.
  // The softmax, or the sigmoids, from which the weights come, in f32 or f64.
  // It is over all experts and has shape [T, E]. With softmax_of_chosen, it is
  // over the token's experts and has shape [T, K].
  at::Tensor probs;
};

// The frozen weights of a router.
struct RouterWeights {
  const at::Tensor& router_EH;
  const at::Tensor& bias_E;  // Undefined without bias.
  at::Tensor correction_E =
      {};  // Read only with model_config::MoeConfig::sigmoid.
};

// Routes the tokens. Breaks ties as torch.topk does. If `given_TK` is defined,
// each of its entries >= 0 replaces the chosen expert at the same place. If
// `all_given` is true, there is no other entry, and none is chosen.
// Shapes:  x_TH [T, H], router_EH [E, H], bias_E [E], given_TK [T, K] i64 or
//          undefined.
// Errors:  throws c10::Error.   Threads: engine thread only.
// Source:  Qwen3MoeTopKRouter, MixtralTopKRouter, GptOssTopKRouter and
// Glm4MoeTopkRouter of transformers 5.17.
Routing Route(const at::Tensor& x_TH, const RouterWeights& weights,
              const model_config::MoeConfig& config, const at::Tensor& given_TK,
              bool all_given = false);

// Returns the router's part of dLoss/dx [T, H], given dLoss/dweights [T, K].
at::Tensor RouteBackward(const at::Tensor& d_weights_TK, const Routing& routing,
                         const at::Tensor& router_EH,
                         const model_config::MoeConfig& config);

// Returns the weight [T, 1] of the shared expert: the sigmoid of x g, where g
// is gate_1H, or 1 if gate_1H is undefined.
at::Tensor SharedWeight(const at::Tensor& x_TH, const at::Tensor& gate_1H);
// Adds dLoss/dx of SharedWeight to dx_TH, given its result and dLoss/dweight.
void SharedWeightBackward(const at::Tensor& d_weight_T,
                          const at::Tensor& weight_T1,
                          const at::Tensor& gate_1H, at::Tensor& dx_TH);

// The rows [begin, end) of one expert, in the order of their tokens. So the
// rows that come from one segment of the batch are contiguous in [begin, end).
// `routing` has the segments of these rows. Its row 0 is row `begin`.
struct ExpertPart {
  int expert = 0;
  int64_t begin = 0;
  int64_t end = 0;
  lora::LoraRouting routing;
};

// The rows of a batch, sorted by expert. A token has one row for each of its
// experts that the rank has. There is no padding, and no row is dropped.
//
// Example: 3 tokens, each with 2 of 3 experts.
//   experts_TK  {2, 0} {0, 1} {2, 0}
//   tokens_N    0 1 2 | 1 | 0 2      (expert 0 | expert 1 | expert 2)
//   pairs_N     1 2 5 | 3 | 0 4      (index into the flat experts_TK)
//   places_TK   {4, 0} {1, 3} {5, 2} (the inverse of pairs_N)
//
// A token has no row for an expert of another rank. The place of such an expert
// is N, which follows the last row.
//
// N, the number of rows, is T K if the rank has all experts.
struct ExpertRows {
  at::Tensor tokens_N;            // i64
  at::Tensor pairs_N;             // i64
  at::Tensor places_TK;           // i64
  bool has_absent = false;        // True if an entry of places_TK is N.
  std::vector<ExpertPart> parts;  // The experts with rows, ascending.
  // Where the rows of each expert end, i32 on the device. Only SortOnDevice
  // sets it, and leaves `parts` empty, because the host does not know them.
  at::Tensor ends_E;
};

// Sorts the rows on the host by counting, in O(T K + experts.count). Then finds
// the segments of each expert. On CUDA, waits for experts_TK.
// Shapes:  experts_TK [T, K] i64 contiguous, each in [0, experts.count).
// Errors:  throws c10::Error.
// Threads: engine thread only.
ExpertRows SortByExpert(const at::Tensor& experts_TK,
                        const model_config::ExpertShape& experts,
                        const lora::LoraRouting& routing);

// Sorts the rows on a CUDA device in one launch, and does not wait. The rows
// are those of SortByExpert if the rank has all experts.
// Shapes:  as for SortByExpert. Does not check the entries of experts_TK.
ExpertRows SortOnDevice(const at::Tensor& experts_TK, int64_t num_experts);

// Returns the rows [N, H] of x_TH that `tokens_N` names.
// Shapes:  x_TH [T, H].   Errors:  throws c10::Error.
at::Tensor GatherRows(const at::Tensor& x_TH, const at::Tensor& tokens_N);

// Returns the sum [T, H] of every token's results. A token's results are added
// in the order of places_TK, so a sum does not depend on other tokens.
// Shapes:  rows_NH [N, H] contiguous. If places_TK contains N, rows_NH has one
//          more row, row N: the result of every expert of another rank.
// Errors:  throws c10::Error.
at::Tensor SumOfRows(const at::Tensor& rows_NH, const at::Tensor& places_TK);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_ROUTER_H_
