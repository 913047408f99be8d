#include "src/loss/head_products.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "src/lora/lora_linear.h"
#include "src/ops/int8_weight.h"
#include "src/ops/matmul.h"

namespace weft::loss {
namespace {

// On a CPU, one product computes about this many logits, and at least
// kCpuSliceLength vocabulary entries. This keeps the product's workspace small.
// The product's result (16 MiB) and a widened bf16 weight are still in a cache
// when they are read.
constexpr int64_t kCpuSliceLogits = int64_t{4} << 20;
constexpr int64_t kCpuSliceLength = 4096;

// On CUDA, a weight in 8 bits is widened in parts of this many vocabulary
// entries.
constexpr int64_t kCudaWidenedLength = 16384;

// A filter keeps or drops blocks of this many adjacent vocabulary entries.
constexpr int64_t kFilterLength = 512;

// Computes out = a b on CUDA, with sums in the dtype of `out`.
void CudaProduct(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  if (a.scalar_type() == out.scalar_type()) {
    at::mm_out(out, a, b);
  } else {
    at::mm_out(out, a, b, out.scalar_type());
  }
}

// Returns the weight that a product on CUDA reads: bf16 for a weight of 8 bits,
// otherwise the weight itself.
at::Tensor CudaWeight(const at::Tensor& weight_VH) {
  return ops::IsInt8(weight_VH) ? ops::Widened(weight_VH, at::kBFloat16)
                                : weight_VH;
}

// Calls visit(first vocabulary entry, widened rows) for each part of a head of
// 8 bits.
template <typename Visit>
void ForEachCudaPart(const at::Tensor& weight_VH, Visit visit) {
  const int64_t vocab = weight_VH.size(0);
  for (int64_t v = 0; v < vocab; v += kCudaWidenedLength) {
    visit(v, CudaWeight(weight_VH.narrow(
                 0, v, std::min(kCudaWidenedLength, vocab - v))));
  }
}

void CudaLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                at::Tensor& logits_RV) {
  if (!ops::IsInt8(weight_VH)) {
    return CudaProduct(hidden_RH, weight_VH.t(), logits_RV);
  }
  if (ops::TakesInt8FewRows(hidden_RH, weight_VH)) {
    ops::Int8FewRows(hidden_RH, weight_VH, /*bias_O=*/{}, logits_RV);
    return;
  }
  ForEachCudaPart(weight_VH, [&](int64_t v, const at::Tensor& part_VH) {
    at::Tensor part_RV =
        at::empty({hidden_RH.size(0), part_VH.size(0)}, logits_RV.options());
    CudaProduct(hidden_RH, part_VH.t(), part_RV);
    logits_RV.narrow(1, v, part_VH.size(0)).copy_(part_RV);
  });
}

void CudaProjection(const at::Tensor& p_RV, const at::Tensor& weight_VH,
                    at::Tensor& out_RH) {
  if (!ops::IsInt8(weight_VH)) {
    return CudaProduct(p_RV.to(weight_VH.scalar_type()), weight_VH, out_RH);
  }
  out_RH.zero_();
  ForEachCudaPart(weight_VH, [&](int64_t v, const at::Tensor& part_VH) {
    at::Tensor part_RH = at::empty_like(out_RH);
    CudaProduct(p_RV.narrow(1, v, part_VH.size(0)).to(part_VH.scalar_type()),
                part_VH, part_RH);
    out_RH.add_(part_RH);
  });
}

using lora::AdapterVersion;
using lora::GroupLayout;
using lora::LoraSegment;
using lora::ProjectionGroup;

}  // namespace

at::ScalarType HeadComputeType(const at::Tensor& weight_VH) {
  return weight_VH.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void ComputeLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                   at::Tensor& logits_RV) {
  const at::ScalarType type = logits_RV.scalar_type();
  if (!hidden_RH.is_cpu()) return CudaLogits(hidden_RH, weight_VH, logits_RV);
  const at::Tensor wide_RH = hidden_RH.to(type);
  const int64_t vocab = weight_VH.size(0);
  const int64_t rows = std::max<int64_t>(1, hidden_RH.size(0));
  const int64_t slice = std::max(kCpuSliceLength, kCpuSliceLogits / rows);
  for (int64_t v = 0; v < vocab; v += slice) {
    const int64_t count = std::min(slice, vocab - v);
    ops::MatMulInto(wide_RH, weight_VH.narrow(0, v, count).t(),
                    logits_RV.narrow(1, v, count));
  }
}

void ComputeProjection(const at::Tensor& p_RV, const at::Tensor& weight_VH,
                       at::Tensor& out_RH) {
  if (!p_RV.is_cpu()) return CudaProjection(p_RV, weight_VH, out_RH);
  ops::MatMulInto(p_RV, weight_VH, out_RH);
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
      const at::Tensor wide = CudaWeight(weight);
      out_RH.index_add_(
          0, kept,
          at::mm(rows_nV.to(wide.scalar_type()), wide, out_RH.scalar_type()));
    }
  }
}

HeadLora::HeadLora(const lora::LoraRouting& routing,
                   at::ScalarType compute_type)
    : routing_(routing), compute_type_(compute_type) {}

const GroupLayout& HeadLora::Group(size_t segment) const {
  // The head's group is the same for every layer.
  return routing_[segment].version->layout->group(/*layer=*/0,
                                                  ProjectionGroup::kLmHead);
}

bool HeadLora::Trains(size_t segment) const {
  return !Group(segment).factors.empty();
}

const lora::LoraFactor& HeadLora::Factor(size_t segment) const {
  return Group(segment).factors.front();
}

at::Tensor HeadLora::A(size_t segment) const {
  const AdapterVersion& version = *routing_[segment].version;
  return version.A(version.compute_N, Factor(segment)).to(compute_type_);
}

at::Tensor HeadLora::B(size_t segment) const {
  const AdapterVersion& version = *routing_[segment].version;
  return version.B(version.compute_N, Factor(segment)).to(compute_type_);
}

std::vector<HeadLora::Overlap> HeadLora::OverlapsOf(int64_t chunk_begin,
                                                    int64_t chunk_rows) const {
  std::vector<Overlap> overlaps;
  for (size_t s = 0; s < routing_.size(); ++s) {
    const int64_t begin = std::max(routing_[s].begin, chunk_begin);
    const int64_t end = std::min(routing_[s].end, chunk_begin + chunk_rows);
    if (begin < end && Trains(s)) {
      overlaps.push_back({.segment = s, .begin = begin, .count = end - begin});
    }
  }
  return overlaps;
}

std::vector<at::Tensor> HeadLora::Shrink(const at::Tensor& hidden_RH) const {
  std::vector<at::Tensor> shrunk_nR(routing_.size());
  for (size_t s = 0; s < routing_.size(); ++s) {
    if (!Trains(s)) continue;
    const LoraSegment& segment = routing_[s];
    const at::Tensor rows =
        hidden_RH.narrow(0, segment.begin, segment.end - segment.begin);
    shrunk_nR[s] = ops::Linear(rows.to(compute_type_), A(s));
  }
  return shrunk_nR;
}

void HeadLora::AddLogits(const std::vector<at::Tensor>& shrunk_nR,
                         int64_t chunk_begin, at::Tensor& logits_RV) const {
  for (const Overlap& rows : OverlapsOf(chunk_begin, logits_RV.size(0))) {
    const LoraSegment& segment = routing_[rows.segment];
    at::Tensor part = logits_RV.narrow(0, rows.begin - chunk_begin, rows.count);
    ops::AddMatMul(part,
                   shrunk_nR[rows.segment].narrow(0, rows.begin - segment.begin,
                                                  rows.count),
                   B(rows.segment).t(), Factor(rows.segment).scale);
  }
}

void HeadLora::Project(const at::Tensor& p_RV, int64_t chunk_begin,
                       std::vector<at::Tensor>& projected_nR) const {
  projected_nR.resize(routing_.size());
  for (const Overlap& rows : OverlapsOf(chunk_begin, p_RV.size(0))) {
    const LoraSegment& segment = routing_[rows.segment];
    const at::Tensor b_VR = B(rows.segment);
    at::Tensor& all = projected_nR[rows.segment];
    if (!all.defined()) {
      all = at::empty({segment.end - segment.begin, b_VR.size(1)},
                      p_RV.options());
    }
    at::Tensor part = all.narrow(0, rows.begin - segment.begin, rows.count);
    ComputeProjection(p_RV.narrow(0, rows.begin - chunk_begin, rows.count),
                      b_VR, part);
  }
}

void HeadLora::AddGradientOfHidden(size_t s, const at::Tensor& ds_nR,
                                   at::Tensor& dhidden_RH) const {
  const LoraSegment& segment = routing_[s];
  ops::AddMatMul(
      dhidden_RH.narrow(0, segment.begin, segment.end - segment.begin), ds_nR,
      A(s), Factor(s).scale);
}

void HeadLora::AddGradientOfA(size_t s, const at::Tensor& ds_nR,
                              const at::Tensor& hidden_RH,
                              const at::Tensor& gradient_N) const {
  const LoraSegment& segment = routing_[s];
  const int64_t count = segment.end - segment.begin;
  lora::AddProduct(segment.version->A(gradient_N, Factor(s)), ds_nR.t(),
                   hidden_RH.narrow(0, segment.begin, count).to(compute_type_),
                   Factor(s).scale);
}

void HeadLora::AddGradientOfB(size_t s, const at::Tensor& dz_RV, int64_t begin,
                              const at::Tensor& shrunk_nR,
                              const at::Tensor& gradient_N) const {
  const LoraSegment& segment = routing_[s];
  lora::AddProduct(segment.version->B(gradient_N, Factor(s)), dz_RV.t(),
                   shrunk_nR.narrow(0, begin - segment.begin, dz_RV.size(0)),
                   Factor(s).scale);
}

}  // namespace weft::loss
