// Decides which tensors the kernels of kernels/cuda take, and calls the
// kernels. In a build without CUDA, kHasCudaKernels is false, and the functions
// of namespace cuda are neither defined nor called:
//
//   if constexpr (kHasCudaKernels) {
//     if (HasCudaKernel(x)) return cuda::RmsNorm(x, weight, eps, y);
//   }
// A function without a comment is the CUDA implementation of the op of the same
// name. The callers check the arguments (check_argument.h), and the functions
// pass raw pointers to a kernel. They throw c10::Error, also if a launch fails.
// A function that waits for the device says so in its comment.
#ifndef WEFT_SRC_OPS_CUDA_DISPATCH_H_
#define WEFT_SRC_OPS_CUDA_DISPATCH_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/activation.h"
#include "src/ops/attention_rule.h"
#include "src/ops/rotary.h"
#include "src/ops/vocab_rows.h"

struct CUstream_st;  // A CUDA stream.

namespace weft::ops {

#ifndef WEFT_WITH_CUDA
#error "List this source in weft_asks_for_cuda() of its CMakeLists.txt."
#endif
inline constexpr bool kHasCudaKernels = WEFT_WITH_CUDA;

// Returns whether the tensor is f32 or bf16 on a CUDA device. Other CUDA
// tensors go to the ATen reference.
inline bool HasCudaKernel(const at::Tensor& tensor) {
  return tensor.is_cuda() && (tensor.scalar_type() == at::kFloat ||
                              tensor.scalar_type() == at::kBFloat16);
}

namespace cuda {

// Returns the stream on which LibTorch queues the calling thread's work.
CUstream_st* CurrentStream();
// Waits until the device has done all work on CurrentStream().
void WaitForStream();
// Queue a copy of `bytes` bytes on CurrentStream(): from the device to pinned
// host memory, and from pinned host memory to the device. Until the device has
// made the copy, the caller neither frees nor writes the host memory.
void QueueDownload(const void* from, int64_t bytes, void* to);
void QueueUpload(const void* from, int64_t bytes, void* to);
// Copies the first tensor of each pair to the second, and waits for the copies.
// The first is on the device, and the second is in pinned host memory. Both are
// contiguous and have equal sizes and dtypes.
void CopyToHost(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies);

// Returns whether LibTorch has a kernel for the grouped product of bf16
// matrices on the current device: its compute capability is 9 or 10. On other
// devices at::_grouped_mm waits, and launches a product for each group.
bool HasGroupedProduct();

void RmsNorm(const at::Tensor& x_TD, const at::Tensor& weight_D, double eps,
             at::Tensor& y_TD);
void RmsNormBackward(const at::Tensor& dy_TD, const at::Tensor& x_TD,
                     const at::Tensor& weight_D, double eps, at::Tensor& dx_TD);
void AddRmsNorm(const at::Tensor& x_TD, const at::Tensor& weight_D, double eps,
                at::Tensor& sum_TD, at::Tensor& y_TD);
void PrepareHeads(const Heads& heads, const at::Tensor& positions_T,
                  const RotaryTable& table, const HeadNorms& norms,
                  const KvSlots& slots);
void PrepareHeadsBackward(const Heads& gradients, const at::Tensor& positions_T,
                          const RotaryTable& table, const HeadNorms& norms,
                          const Heads& raw, const Heads& into);
void GatedProduct(Activation activation, const at::Tensor& gate_up_T2F,
                  at::Tensor& out_TF);
void GatedProductBackward(Activation activation, const at::Tensor& dout_TF,
                          at::Tensor& gate_up_T2F);
// Computes MergeByLse of tree_attention.h. out_NHC and lse_NH are
// contiguous.
void MergeByLse(const at::Tensor& part_NHC, const at::Tensor& part_lse_NH,
                at::Tensor& out_NHC, at::Tensor& lse_NH);
// Computes ops::VocabRows for f32 logits.
void VocabRows(at::Tensor& logits_RV, const VocabRowsInput& input,
               bool softmax_in_place, at::Tensor& logprobs_E,
               at::Tensor& entropy_R);
void VocabWeights(const at::Tensor& logits_RV, const VocabRowsInput& input,
                  at::Tensor& weights_RV, at::Tensor& scale_R,
                  at::Tensor& logprobs_E, at::Tensor& entropy_R);
// Writes out[r] = factor[r] scale[r] projection[r] + s[r]. s[r] is the sum of
// coefficient[e] weight[targets[e]] over the entries e of row r, which are
// [row_offsets[r], row_offsets[r + 1]). All tensors are contiguous. out has the
// weight's dtype.
void HeadGradient(const at::Tensor& projection_RH, const at::Tensor& factor_R,
                  const at::Tensor& scale_R, const at::Tensor& row_offsets,
                  const at::Tensor& targets_E, const at::Tensor& coefficient_E,
                  const at::Tensor& weight_VH, at::Tensor& out_RH);
// Returns whether PagedAttention takes q: HasCudaKernel(q), and the kernel
// supports the width of its heads.
bool TakesPagedAttention(const at::Tensor& q_BHC);
void PagedAttention(const at::Tensor& q_BHC, const at::Tensor& k_pages_PSKC,
                    const at::Tensor& v_pages_PSKC,
                    const at::Tensor& page_table_BL,
                    const at::Tensor& lengths_B, const AttentionRule& rule,
                    const at::Tensor& sinks_H, at::Tensor& out_BHC);
// Returns whether WidenInt8Rows takes a weight (int8_weight.h) for this dtype.
bool TakesWidenInt8Rows(const at::Tensor& weight, at::ScalarType dtype);
// Widens inputs [begin, end) of every row of a weight of 8 bits to `dtype`.
// Returns [O, end - begin]. `begin` is the first input of a group.
at::Tensor WidenInt8Rows(const at::Tensor& weight, int64_t begin, int64_t end,
                         at::ScalarType dtype);
// Compute TakesInt8FewRows and Int8FewRows of int8_weight.h.
bool TakesInt8FewRows(const at::Tensor& x_MI, const at::Tensor& weight);
void Int8FewRows(const at::Tensor& x_MI, const at::Tensor& weight,
                 const at::Tensor& bias_O, at::Tensor& y_MO);
// Sorts the rows of tokens by expert, as SortByExpert of src/model/router.h
// does. All tensors are contiguous i64, but ends_E is i32. The host need not
// know the experts.
struct ExpertOrder {
  at::Tensor tokens_N, pairs_N, places_TK, ends_E;
};
ExpertOrder SortByExpert(const at::Tensor& experts_TK, int64_t num_experts);
// Computes SumOfRows of src/model/router.h, and adds in f32.
at::Tensor SumExpertRows(const at::Tensor& rows_NH,
                         const at::Tensor& places_TK);
// Writes the experts of tokens [T, K] i64 to columns [column, column + K) of
// their slots in experts_SW, i16. Skips tokens whose slot is negative.
void KeepExperts(const at::Tensor& experts_TK, const at::Tensor& slots_T,
                 int64_t column, const at::Tensor& experts_SW);
// Makes one AdamW update (KernelTable::adamw). All tensors are [N] f32.
void AdamW(const kernels::cpu::AdamWScalars& scalars,
           const at::Tensor& weights_N, const at::Tensor& gradient_N,
           at::Tensor& moment1_N, at::Tensor& moment2_N,
           at::Tensor& weights_out_N);
// Returns the sum of x^2 of f32 x [N]. Waits for the device.
double SumOfSquares(const at::Tensor& x_N);

}  // namespace cuda
}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_CUDA_DISPATCH_H_
