// Computes experts that have few rows each, as in decoding, on a CPU. The
// kernels run on raw memory, because making tensors for every expert would take
// much time compared to reading the expert's weights.
//
// Legend: as in experts.h; N rows of all experts, n of one.
#ifndef WEFT_SRC_MODEL_FEW_ROWS_H_
#define WEFT_SRC_MODEL_FEW_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "src/model/experts.h"
#include "src/ops/few_rows.h"

namespace weft::moe {

class FewRowExperts {
 public:
  // Returns whether the class supports these rows: f32 on a CPU, with at most
  // 32 rows for every expert.
  [[nodiscard]] static bool Take(const at::Tensor& x_NH,
                                 const ExpertRows& rows);

  // The arguments outlive the object.
  // Shapes:  x_NH and y_NH [N, H] contiguous, weights_TK as in Routing.
  // Errors:  throws c10::Error.
  FewRowExperts(const ExpertLayer& layer, const ExpertRows& rows,
                const at::Tensor& weights_TK, const at::Tensor& x_NH,
                const at::Tensor& y_NH);
  FewRowExperts(const FewRowExperts&) = delete;
  FewRowExperts& operator=(const FewRowExperts&) = delete;

  // Writes the part's rows of y: the output of the part's expert, multiplied by
  // the router's weights.
  // Errors:  throws c10::Error.   Threads: any, for distinct parts.
  void Run(const ExpertPart& part) const;

 private:
  void GateUp(const ExpertPart& part, float* gate_up_n2F) const;
  void Activate(const ExpertPart& part, const float* gate_up_n2F,
                float* activated_nF) const;
  void Down(const ExpertPart& part, const float* activated_nF) const;

  const ExpertLayer& layer_;
  const lora::ModelShape shape_;  // The shape of one expert.
  const ops::GatedRow gated_row_;
  // For each part: gate_up_n2F, then activated_nF.
  const at::Tensor scratch_N3F_;
  const int64_t* pairs_;
  const float* weights_;
  const float* x_;
  float* y_;
};

}  // namespace weft::moe

#endif  // WEFT_SRC_MODEL_FEW_ROWS_H_
