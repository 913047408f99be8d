#include "src/lora/lora_embedding.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "src/lora/lora_linear.h"
#include "src/ops/matmul.h"

namespace weft::lora {
namespace {

// Returns the embedding's factor, or null if the adapter does not have one.
const LoraFactor* FactorOf(const AdapterVersion& version) {
  // The embedding's group is the same for every layer.
  const GroupLayout& group =
      version.layout->group(/*layer=*/0, ProjectionGroup::kEmbedTokens);
  return group.factors.empty() ? nullptr : &group.factors.front();
}

// Computes gradient[:, tokens] += scale * d^T. First sums the rows of equal
// tokens, because index_add_ on a GPU adds equal indices in no fixed order.
void AddColumns(at::Tensor gradient_RV, const at::Tensor& tokens_n,
                const at::Tensor& d_nR, double scale) {
  const auto [tokens_U, index_n, counts] =
      at::_unique2(tokens_n, /*sorted=*/true, /*return_inverse=*/true);
  const at::Tensor sums_UR = at::embedding_dense_backward(
      d_nR.to(gradient_RV.scalar_type()), index_n, tokens_U.numel(),
      /*padding_idx=*/-1, /*scale_grad_by_freq=*/false);
  gradient_RV.index_add_(1, tokens_U, sums_UR.t(), scale);
}

}  // namespace

void AddLoraEmbedding(const at::Tensor& tokens_T, const LoraRouting& routing,
                      double embedding_scale, at::Tensor& x_TH) {
  for (const LoraSegment& segment : routing) {
    const AdapterVersion& version = *segment.version;
    const LoraFactor* factor = FactorOf(version);
    if (factor == nullptr) continue;
    const at::Tensor a_Rn =
        version.A(version.compute_N, *factor)
            .index_select(1, SegmentRows(tokens_T, segment));
    at::Tensor x_view = SegmentRows(x_TH, segment);
    ops::AddMatMul(x_view, a_Rn.t(), version.B(version.compute_N, *factor).t(),
                   embedding_scale * factor->scale);
  }
}

bool TrainsEmbedding(const LoraGradients& gradients) {
  return std::ranges::any_of(gradients, [](const LoraGradient& gradient) {
    return FactorOf(*gradient.version) != nullptr;
  });
}

void LoraEmbeddingBackward(const at::Tensor& dx_TH, const at::Tensor& tokens_T,
                           const LoraRouting& routing,
                           const LoraGradients& gradients,
                           double embedding_scale, int64_t padding) {
  for (const LoraSegment& segment : routing) {
    const AdapterVersion& version = *segment.version;
    const LoraFactor* factor = FactorOf(version);
    const at::Tensor gradient_N = GradientOf(gradients, segment.version);
    if (factor == nullptr || !gradient_N.defined()) continue;
    const double scale = embedding_scale * factor->scale;
    const at::Tensor tokens_n = SegmentRows(tokens_T, segment);
    const at::Tensor dx_nH = SegmentRows(dx_TH, segment);
    const at::Tensor a_Rn =
        version.A(version.compute_N, *factor).index_select(1, tokens_n);
    AddProduct(version.B(gradient_N, *factor), dx_nH.t(), a_Rn.t(), scale);
    at::Tensor d_nR = ops::MatMul(dx_nH, version.B(version.compute_N, *factor));
    if (padding >= 0) {
      d_nR.masked_fill_(tokens_n.eq(padding).unsqueeze(1), 0);
    }
    AddColumns(version.A(gradient_N, *factor), tokens_n, d_nR, scale);
  }
}

}  // namespace weft::lora
