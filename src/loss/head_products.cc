#include "src/loss/head_products.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "src/ops/matmul.h"

namespace weft::loss {
namespace {

// The number of logits that a CPU computes at a time, but at least
// kCpuSliceLength vocabulary entries. So the product's workspace stays small.
// The result (16 MiB) and a widened bf16 weight are still in a cache when they
// are read.
constexpr int64_t kCpuSliceLogits = int64_t{4} << 20;
constexpr int64_t kCpuSliceLength = 4096;

// With fewer rows, BLAS libraries use matrix-vector kernels, which sum a whole
// column number by number. Over V 49152 this has a relative error of 1e-4,
// where sums by block have 5e-7. So few rows are summed over this many
// vocabulary entries at a time.
constexpr int64_t kCpuFewRows = 64;
constexpr int64_t kCpuSumLength = 512;

// The number of adjacent vocabulary entries that a filter keeps or drops
// together.
constexpr int64_t kFilterLength = 512;

}  // namespace

at::ScalarType HeadComputeType(const at::Tensor& weight_VH) {
  return weight_VH.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void ComputeLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                   at::Tensor& logits_RV) {
  const at::ScalarType type = logits_RV.scalar_type();
  if (!hidden_RH.is_cpu()) {
    if (hidden_RH.scalar_type() == type) {
      at::mm_out(logits_RV, hidden_RH, weight_VH.t());
    } else {
      at::mm_out(logits_RV, hidden_RH, weight_VH.t(), type);
    }
    return;
  }
  const at::Tensor wide_RH = hidden_RH.to(type);
  const int64_t vocab = weight_VH.size(0);
  const int64_t rows = std::max<int64_t>(1, hidden_RH.size(0));
  const int64_t slice = std::max(kCpuSliceLength, kCpuSliceLogits / rows);
  for (int64_t v = 0; v < vocab; v += slice) {
    const int64_t count = std::min(slice, vocab - v);
    logits_RV.narrow(1, v, count)
        .copy_(ops::MatMul(wide_RH, weight_VH.narrow(0, v, count).t()));
  }
}

void ComputeProjection(const at::Tensor& p_RV, const at::Tensor& weight_VH,
                       at::Tensor& out_RH) {
  if (!p_RV.is_cpu()) {
    if (weight_VH.scalar_type() == out_RH.scalar_type()) {
      at::mm_out(out_RH, p_RV, weight_VH);
    } else {
      at::mm_out(out_RH, p_RV.to(weight_VH.scalar_type()), weight_VH,
                 out_RH.scalar_type());
    }
    return;
  }
  const bool same_type = p_RV.scalar_type() == weight_VH.scalar_type();
  const bool few_rows = p_RV.size(0) < kCpuFewRows;
  if (same_type && !few_rows) {
    out_RH.copy_(ops::MatMul(p_RV, weight_VH));
    return;
  }
  out_RH.zero_();
  const int64_t vocab = weight_VH.size(0);
  const int64_t block = few_rows ? kCpuSumLength : kCpuSliceLength;
  for (int64_t v = 0; v < vocab; v += block) {
    const int64_t count = std::min(block, vocab - v);
    // addmm could take a matrix-vector kernel, which sums number by number.
    out_RH.add_(ops::MatMul(p_RV.narrow(1, v, count).contiguous(),
                            weight_VH.narrow(0, v, count)));
  }
}

void ComputeFilteredProjection(const at::Tensor& p_RV,
                               const at::Tensor& weight_VH,
                               const at::Tensor& filter_R, at::Tensor& out_RH) {
  out_RH.zero_();
  const int64_t vocab = weight_VH.size(0);
  for (int64_t v = 0; v < vocab; v += kFilterLength) {
    const int64_t count = std::min(kFilterLength, vocab - v);
    const at::Tensor block_RV = p_RV.narrow(1, v, count);
    // Rows with NaN are kept, so that the result has the NaN too.
    const at::Tensor kept =
        at::amax(block_RV, 1).lt(filter_R).logical_not_().nonzero().squeeze(1);
    if (kept.numel() == 0) continue;
    const at::Tensor rows_nV = block_RV.index_select(0, kept);
    const at::Tensor weight = weight_VH.narrow(0, v, count);
    if (p_RV.is_cpu()) {
      out_RH.index_add_(0, kept, ops::MatMul(rows_nV, weight));
    } else {
      out_RH.index_add_(0, kept,
                        at::mm(rows_nV.to(weight.scalar_type()), weight,
                               out_RH.scalar_type()));
    }
  }
}

}  // namespace weft::loss
