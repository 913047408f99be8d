// Experts that have few rows each, as in decoding, on a CPU.
// Legend: as in experts.h; N rows of all experts, n of one.
#ifndef WEFT_SRC_MODEL_FEW_ROW_EXPERTS_H_
#define WEFT_SRC_MODEL_FEW_ROW_EXPERTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "src/model/experts.h"
#include "src/model/router.h"
#include "src/ops/gated_product.h"

namespace weft::model {

// Computes experts that have few rows each, as in decoding, on a CPU. The
// kernels run on raw memory, because making tensors for every expert would take
// much time compared to reading the expert's weights.
class FewRowExperts {
 public:
  // Returns whether the class supports these rows: f32 arithmetic on a CPU,
  // with at most 32 rows for every expert.
  static bool Take(const ExpertLayer& layer, const at::Tensor& x_NH,
                   const ExpertRows& rows);

  // The arguments outlive the object.
  // Shapes:  x_NH and y_NH [N, H] contiguous, weights_TK as in Routing.
  FewRowExperts(const ExpertLayer& layer, const ExpertRows& rows,
                const at::Tensor& weights_TK, const at::Tensor& x_NH,
                const at::Tensor& y_NH);

  // Writes the part's rows of y: the output of the part's expert, multiplied by
  // the router's weights. Threads: any, for distinct parts.
  void Run(const ExpertPart& part) const;

 private:
  void GateUp(const ExpertPart& part, float* gate_up_n2F) const;
  void Activate(const ExpertPart& part, const float* gate_up_n2F,
                float* activated_nF) const;
  void Down(const ExpertPart& part, const float* activated_nF) const;

  const ExpertLayer& layer_;
  const model_config::ModelShape shape_;  // The shape of one expert.
  const ops::GatedRow gated_row_;
  // For each part: gate_up_n2F, then activated_nF.
  const at::Tensor scratch_N3F_;
  const int64_t* pairs_;
  const float* weights_;
  const float* x_;
  float* y_;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_FEW_ROW_EXPERTS_H_
