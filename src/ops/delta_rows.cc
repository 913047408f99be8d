#include "src/ops/delta_rows.h"

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

#include "src/ops/cpu_dispatch.h"
#include "src/ops/host_copy.h"

namespace weft::ops {
namespace {

// The columns of q and k, which are before those of v.
int64_t NormedFeatures(const DeltaParameters& p) {
  return 2 * p.num_key_heads * p.key_features;
}

// The convolution of all rows by ATen, and the table of its earlier rows.
struct Convolved {
  at::Tensor earlier_TR;  // Row T of qkv_TW has zeros.
  at::Tensor conv_TW;
};

Convolved Convolve(const DeltaInputs& inputs, const DeltaParameters& p,
                   const DeltaPlan& plan, const at::Tensor& history_QRW) {
  const at::Tensor x_TW = inputs.qkv_TW.to(ComputeType(inputs.qkv_TW));
  const int64_t num_rows = x_TW.size(0), features = x_TW.size(1);
  const int64_t num_earlier = p.conv_WR1.size(1) - 1;
  const at::Tensor before =
      history_QRW.defined()
          ? history_QRW.reshape({-1, features}).to(x_TW.scalar_type())
          : at::zeros({1, features}, x_TW.options());
  const at::Tensor all = at::cat({x_TW, before});
  at::Tensor earlier_TR =
      ToDevice(plan.earlier_TR, x_TW.device()).view({num_rows, num_earlier});
  earlier_TR = earlier_TR.masked_fill(earlier_TR < 0, num_rows);
  const at::Tensor weight = p.conv_WR1.to(x_TW.scalar_type());
  at::Tensor conv_TW = x_TW * weight.select(1, num_earlier);
  for (int64_t r = 0; r < num_earlier; ++r) {
    conv_TW.add_(all.index_select(0, earlier_TR.select(1, r)) *
                 weight.select(1, r));
  }
  if (p.conv_bias_W.defined()) conv_TW.add_(p.conv_bias_W);
  return {earlier_TR, conv_TW};
}

// The heads of q and k with their norms' factors.
struct NormedHeads {
  at::Tensor n_ThK;  // Of length 1; first the heads of q, then those of k.
  at::Tensor inverse_Th1;  // 1 / length.
};

NormedHeads NormalizeHeads(const at::Tensor& y_TW, const DeltaParameters& p) {
  const at::Tensor heads =
      y_TW.narrow(1, 0, NormedFeatures(p))
          .reshape({y_TW.size(0), 2 * p.num_key_heads, p.key_features});
  const at::Tensor inverse =
      heads.square().sum(2, true).add_(p.l2_eps).rsqrt_();
  return {heads * inverse, inverse};
}

double QueryScale(const DeltaParameters& p) {
  return 1 / std::sqrt(static_cast<double>(p.key_features));
}

}  // namespace

DeltaRows MixDeltaRows(const DeltaInputs& inputs, const DeltaParameters& p,
                       const DeltaPlan& plan, const at::Tensor& history_QRW) {
  const at::ScalarType compute = ComputeType(inputs.qkv_TW);
  at::Tensor mixed_TW = Convolve(inputs, p, plan, history_QRW).conv_TW;
  mixed_TW = mixed_TW * mixed_TW.sigmoid();
  const int64_t normed = NormedFeatures(p);
  mixed_TW.narrow(1, 0, normed)
      .copy_(NormalizeHeads(mixed_TW, p).n_ThK.reshape({-1, normed}));
  mixed_TW.narrow(1, 0, normed / 2).mul_(QueryScale(p));
  const at::Tensor softplus =
      at::softplus(inputs.alpha_TH.to(compute) + p.dt_bias_H);
  return {mixed_TW, inputs.beta_TH.to(compute).sigmoid(),
          softplus * p.a_log_H.exp().neg()};
}

void MixDeltaRowsBackward(const DeltaRows& gradient, const DeltaInputs& inputs,
                          const DeltaParameters& p, const DeltaPlan& plan,
                          const DeltaInputs& into) {
  const Convolved c = Convolve(inputs, p, plan, {});
  const at::Tensor sigmoid = c.conv_TW.sigmoid();
  const NormedHeads norm = NormalizeHeads(c.conv_TW * sigmoid, p);
  const int64_t normed = NormedFeatures(p);
  const int64_t num_rows = inputs.qkv_TW.size(0);
  at::Tensor d_TW = gradient.mixed_TW.clone();
  d_TW.narrow(1, 0, normed / 2).mul_(QueryScale(p));
  const at::Tensor dn = d_TW.narrow(1, 0, normed).view(norm.n_ThK.sizes());
  dn.copy_((dn - norm.n_ThK * (dn * norm.n_ThK).sum(2, true)) *
           norm.inverse_Th1);
  d_TW.mul_(sigmoid * (1 + c.conv_TW * (1 - sigmoid)));

  const at::Tensor weight = p.conv_WR1.to(d_TW.scalar_type());
  const int64_t num_earlier = weight.size(1) - 1;
  at::Tensor dx = at::zeros({num_rows + 1, d_TW.size(1)}, d_TW.options());
  dx.narrow(0, 0, num_rows).copy_(d_TW * weight.select(1, num_earlier));
  for (int64_t r = 0; r < num_earlier; ++r) {
    dx.index_add_(0, c.earlier_TR.select(1, r), d_TW * weight.select(1, r));
  }
  into.qkv_TW.copy_(dx.narrow(0, 0, num_rows));

  const at::Tensor beta =
      inputs.beta_TH.to(gradient.beta_TH.scalar_type()).sigmoid();
  into.beta_TH.copy_(gradient.beta_TH * beta * (1 - beta));
  const at::Tensor slope =
      (inputs.alpha_TH.to(gradient.g_TH.scalar_type()) + p.dt_bias_H).sigmoid();
  into.alpha_TH.copy_(gradient.g_TH * slope * p.a_log_H.exp().neg());
}

}  // namespace weft::ops
