#include "src/loss/muon.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <vector>

#include "src/loss/adamw.h"
#include "src/ops/check_argument.h"

namespace weft::loss {
namespace {

// The coefficients of torch.optim.Muon, and its smallest norm.
constexpr double kLinear = 3.4445;
constexpr double kCubic = -4.7750;
constexpr double kQuintic = 2.0315;
constexpr double kMinNorm = 1e-7;
// The most elements of one batch of matrices.
constexpr int64_t kBatchElements = int64_t{4} << 20;
// The most multiplications of a part. A core makes about 8e9 in a second.
constexpr double kPartProducts = 2e9;

struct MatrixShape {
  int64_t rows = 0;
  int64_t columns = 0;

  friend auto operator<=>(const MatrixShape&, const MatrixShape&) = default;
};

// The places of matrices in a flat buffer.
using Offsets = std::span<const int64_t>;

// Returns the places of all A and B by their shapes, so that one product serves
// many matrices.
std::map<MatrixShape, std::vector<int64_t>> MatricesOf(
    const lora::AdapterLayout& layout) {
  std::map<MatrixShape, std::vector<int64_t>> matrices;
  for (const lora::LoraFactor& factor : layout.factors()) {
    matrices[{factor.rank, factor.in}].push_back(factor.a_offset);
    matrices[{factor.out, factor.rank}].push_back(factor.b_offset);
  }
  return matrices;
}

std::vector<at::Tensor> ViewsOf(const at::Tensor& flat_N, MatrixShape shape,
                                Offsets offsets) {
  std::vector<at::Tensor> views;
  views.reserve(offsets.size());
  for (const int64_t offset : offsets) {
    views.push_back(flat_N.narrow(0, offset, shape.rows * shape.columns)
                        .view({shape.rows, shape.columns}));
  }
  return views;
}

// Returns q [M, S, S] f64 for matrices u with u u^T = gram_MSS, so that q u is
// u after the iteration. Overwrites gram_MSS.
at::Tensor Orthogonalizer(int steps, at::Tensor gram_MSS) {
  const at::Tensor norm_M11 =
      gram_MSS.diagonal(0, 1, 2).sum(-1).sqrt().clamp_min(kMinNorm).view(
          {-1, 1, 1});
  gram_MSS.div_(norm_M11).div_(norm_M11);
  at::Tensor q_MSS;
  for (int step = 0; step < steps; ++step) {
    at::Tensor p_MSS =
        at::baddbmm(gram_MSS, gram_MSS, gram_MSS, kCubic, kQuintic);
    p_MSS.diagonal(0, 1, 2).add_(kLinear);
    q_MSS = step == 0 ? p_MSS : at::bmm(p_MSS, q_MSS);
    if (step + 1 < steps) {
      gram_MSS = at::bmm(at::bmm(p_MSS, gram_MSS), p_MSS);
    }
  }
  return q_MSS.div_(norm_M11);
}

// Matrices of one shape that are updated together.
struct Batch {
  MatrixShape shape;
  std::vector<int64_t> offsets;
  double products = 0;  // How many multiplications they take.
};

// Returns how many multiplications a matrix of this shape takes.
double ProductsOf(MatrixShape shape, int ns_steps) {
  const auto small = static_cast<double>(std::min(shape.rows, shape.columns));
  const auto large = static_cast<double>(std::max(shape.rows, shape.columns));
  return small * small * (2 * large + 3 * ns_steps * small);
}

std::vector<Batch> BatchesOf(const lora::AdapterLayout& layout, int ns_steps) {
  std::vector<Batch> batches;
  for (const auto& [shape, offsets] : MatricesOf(layout)) {
    const double products = ProductsOf(shape, ns_steps);
    const auto size = static_cast<size_t>(std::clamp(
        kPartProducts / products, 1.0,
        std::max(1.0, static_cast<double>(kBatchElements /
                                          (shape.rows * shape.columns)))));
    for (size_t first = 0; first < offsets.size(); first += size) {
      const size_t count = std::min(size, offsets.size() - first);
      const auto from = offsets.begin() + static_cast<int64_t>(first);
      batches.push_back({.shape = shape,
                         .offsets = {from, from + static_cast<int64_t>(count)},
                         .products = products * static_cast<double>(count)});
    }
  }
  return batches;
}

// Writes what the step adds to these matrices to their places in update_N.
void UpdateMatrices(const MuonConfig& config, double gradient_scale,
                    MatrixShape shape, Offsets offsets,
                    const at::Tensor& gradient_N, const at::Tensor& momentum_N,
                    const at::Tensor& update_N) {
  const double share = (1 - config.momentum) * gradient_scale;
  at::Tensor u = at::stack(ViewsOf(momentum_N, shape, offsets));
  {
    const at::Tensor g = at::stack(ViewsOf(gradient_N, shape, offsets));
    u.mul_(config.momentum).add_(g, share);
    if (config.nesterov) u.mul_(config.momentum).add_(g, share);
  }
  const bool tall = shape.rows > shape.columns;
  at::Tensor gram_MSS;
  {
    const at::Tensor exact = u.to(at::kDouble);
    gram_MSS = tall ? at::bmm(exact.mT(), exact) : at::bmm(exact, exact.mT());
  }
  const double size = -config.learning_rate * 0.2 *
                      std::sqrt(std::max(shape.rows, shape.columns));
  const at::Tensor q_MSS = Orthogonalizer(config.ns_steps, std::move(gram_MSS))
                               .mul_(size)
                               .to(u.scalar_type());
  const at::Tensor change = tall ? at::bmm(u, q_MSS) : at::bmm(q_MSS, u);
  at::_foreach_copy_(ViewsOf(update_N, shape, offsets), change.unbind(0));
}

}  // namespace

bool MuonPart(size_t part, const MuonConfig& config, double grad_norm,
              const lora::AdapterLayout& layout, const at::Tensor& weights_N,
              const at::Tensor& gradient_N, at::Tensor& momentum_N,
              at::Tensor& update_N, at::Tensor& weights_out_N) {
  TORCH_CHECK(config.ns_steps >= 1, "Muon makes at least 1 step, got ",
              config.ns_steps);
  const auto check = [&](const char* name, const at::Tensor& tensor_N) {
    ops::CheckArgument(name, tensor_N, weights_N, weights_N.scalar_type(),
                       {layout.num_parameters()});
  };
  check("weights_N", weights_N);
  check("gradient_N", gradient_N);
  check("momentum_N", momentum_N);
  check("update_N", update_N);
  check("weights_out_N", weights_out_N);
  const double scale = GradientScale(config.max_grad_norm, grad_norm);
  size_t last = 0;  // The part of the batch.
  double products = 0;
  for (const Batch& batch : BatchesOf(layout, config.ns_steps)) {
    if (products > 0 && products + batch.products > kPartProducts) {
      ++last;
      products = 0;
    }
    products += batch.products;
    if (last != part) continue;
    UpdateMatrices(config, scale, batch.shape, batch.offsets, gradient_N,
                   momentum_N, update_N);
  }
  if (part < last) return false;
  // From here on nothing is allocated, so nothing can fail.
  momentum_N.mul_(config.momentum)
      .add_(gradient_N, (1 - config.momentum) * scale);
  at::add_out(weights_out_N, update_N, weights_N,
              1 - config.learning_rate * config.weight_decay);
  return true;
}

}  // namespace weft::loss
