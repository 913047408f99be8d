#include "src/loss/head_lora.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "src/lora/add_product.h"
#include "src/loss/head_products.h"

namespace weft::loss {

using lora::AdapterVersion;
using lora::GroupLayout;
using lora::LoraSegment;
using lora::ProjectionGroup;

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
    shrunk_nR[s] = at::mm(rows.to(compute_type_), A(s).t());
  }
  return shrunk_nR;
}

void HeadLora::AddLogits(const std::vector<at::Tensor>& shrunk_nR,
                         int64_t chunk_begin, at::Tensor& logits_RV) const {
  for (const Overlap& rows : OverlapsOf(chunk_begin, logits_RV.size(0))) {
    const LoraSegment& segment = routing_[rows.segment];
    at::Tensor part = logits_RV.narrow(0, rows.begin - chunk_begin, rows.count);
    part.addmm_(shrunk_nR[rows.segment].narrow(0, rows.begin - segment.begin,
                                               rows.count),
                B(rows.segment).t(), /*beta=*/1, Factor(rows.segment).scale);
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
  dhidden_RH.narrow(0, segment.begin, segment.end - segment.begin)
      .addmm_(ds_nR, A(s), /*beta=*/1, Factor(s).scale);
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
