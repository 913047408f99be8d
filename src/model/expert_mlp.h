// The MLP of one expert, or of all experts of a layer at once, on sorted rows.
//
// On CUDA in bf16, the routed experts are computed at once. The base products
// are the grouped products of ops/grouped_matmul.h. The adapters' products take
// a table of experts (lora/expert_table.h). All other operations run on all
// rows. If the device has LibTorch's grouped product, the number of launches
// does not grow with the number of experts. One expert after another would take
// so many launches that the device would wait for the host.
//
// Legend: as in experts.h; n the rows of the MLP.
#ifndef WEFT_SRC_MODEL_EXPERT_MLP_H_
#define WEFT_SRC_MODEL_EXPERT_MLP_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "src/model/experts.h"
#include "src/ops/grouped_matmul.h"

namespace weft::moe {

// What a pass through all experts at once needs besides the rows.
struct AllExperts {
  ops::RowGroups groups;        // A group for each expert that the rank has.
  lora::RoutingTablePtr table;  // Null if no row has an adapter.
};

// Returns nullopt if each expert must be computed by itself: if `x` is not bf16
// on CUDA, if an adapter's weights are not bf16, if there are no rows, or if
// the table cannot have all segments (FitsExpertTable). Otherwise queues
// uploads and does not wait. `gradients` is empty in a forward pass, and its
// tensors outlive the result.
// Errors:  throws c10::Error.   Threads: engine thread only.
[[nodiscard]] std::optional<AllExperts> AllAtOnce(
    const ExpertLayer& layer, const at::Tensor& x, const ExpertRows& rows,
    const lora::LoraGradients& gradients);

// The arguments of the constructors outlive the object.
// Errors:  the methods throw c10::Error.
// Threads: on a CPU, any thread, if no other thread runs the same expert; on
// CUDA, the engine thread.
class ExpertMlp {
 public:
  // The MLP of one expert. `routing` has the segments of the expert's rows,
  // counted from the expert's first row. If `expert` is the layer's number of
  // experts, it is the shared expert.
  ExpertMlp(const ExpertLayer& layer, int expert,
            const lora::LoraRouting& routing);
  // The MLPs of all experts that the rank has, without the shared one.
  ExpertMlp(const ExpertLayer& layer, const AllExperts& all);
  ExpertMlp(const ExpertMlp&) = delete;
  ExpertMlp& operator=(const ExpertMlp&) = delete;

  // Returns the output [n, H], multiplied by the router's weights.
  // Shapes:  x_nH [n, H] contiguous, weight_n1 [n, 1]. `tape` may be null.
  [[nodiscard]] at::Tensor Forward(const at::Tensor& x_nH,
                                   const at::Tensor& weight_n1,
                                   PartTape* tape) const;
  // Fills the tape as Forward does, but skips the product by `down`.
  void Recompute(const at::Tensor& x_nH, const at::Tensor& weight_n1,
                 PartTape& tape) const;

  // dLoss/dx and dLoss/dweight.
  struct InputGradients {
    at::Tensor x_nH;
    at::Tensor weight_n;
  };
  // Adds the adapters' gradients to `gradients`. If the object has all experts,
  // AllAtOnce must have been called with the same `gradients`.
  [[nodiscard]] InputGradients Backward(const at::Tensor& dy_nH,
                                        const at::Tensor& x_nH,
                                        const at::Tensor& weight_n1,
                                        const lora::LoraGradients& gradients,
                                        PartTape tape) const;

 private:
  [[nodiscard]] lora::LoraSite Site(lora::ProjectionGroup group) const;
  [[nodiscard]] at::Tensor GateUp(const at::Tensor& x_nH, PartTape* tape) const;
  [[nodiscard]] at::Tensor Activated(const at::Tensor& gate_up_n2F) const;
  // Add what the bias of `down` contributes to the output and to dLoss/dweight.
  void AddDownBias(const at::Tensor& weight_n1, at::Tensor& y_nH) const;
  void AddDownBiasGradient(const at::Tensor& dy_nH, at::Tensor& d_n) const;

  const ExpertLayer& layer_;
  const int expert_;  // kNoExpert for all experts.
  const lora::ModelShape shape_;
  const lora::LoraPass pass_;
  lora::BaseLinear gate_up_;
  lora::BaseLinear down_;
  // The biases of down, one row for each expert; undefined if there are none.
  // They are not in down_, because down_ would add them without the router's
  // weight, which multiplies the input of down_.
  at::Tensor down_bias_PH_;
};

}  // namespace weft::moe

#endif  // WEFT_SRC_MODEL_EXPERT_MLP_H_
