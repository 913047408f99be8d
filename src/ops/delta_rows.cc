#include "src/ops/delta_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_delta.h"
#include "src/ops/host_copy.h"
#include "src/ops/pointwise.h"
#include "src/ops/thread_team.h"

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

Convolved ConvolveRows(const DeltaInputs& inputs, const DeltaParameters& p,
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

// Returns q, k and v by ATen, given the convolution, which it overwrites.
at::Tensor MixConvolved(const at::Tensor& conv_TW, const DeltaParameters& p) {
  const at::Tensor mixed_TW = conv_TW.mul_(conv_TW.sigmoid());
  const int64_t normed = NormedFeatures(p);
  mixed_TW.narrow(1, 0, normed)
      .copy_(NormalizeHeads(mixed_TW, p).n_ThK.reshape({-1, normed}));
  mixed_TW.narrow(1, 0, normed / 2).mul_(QueryScale(p));
  return mixed_TW;
}

// Adds the gates to q, k and v.
DeltaRows WithGates(const at::Tensor& mixed_TW, const DeltaInputs& inputs,
                    const DeltaParameters& p) {
  const at::ScalarType compute = mixed_TW.scalar_type();
  const at::Tensor softplus =
      Softplus(inputs.alpha_TH.to(compute) + p.dt_bias_H);
  return {mixed_TW, Sigmoid(inputs.beta_TH.to(compute)),
          softplus * p.a_log_H.exp().neg()};
}

// Rows of a convolution, with the stride between them.
struct TapRows {
  const float* data = nullptr;
  int64_t stride = 0;
};

TapRows TapRowsOf(const at::Tensor& x_TW) {
  return {x_TW.const_data_ptr<float>(), x_TW.stride(0)};
}

// Makes the arguments of the CPU kernel for each row.
class CpuMixer {
 public:
  CpuMixer(const DeltaInputs& inputs, const DeltaParameters& p,
           const at::Tensor& history_QRW)
      : num_rows_(inputs.qkv_TW.size(0)),
        x_(TapRowsOf(inputs.qkv_TW)),
        weights_(p.conv_WR1.to(at::kFloat).t().contiguous()) {
    if (history_QRW.defined()) {
      history_ = TapRowsOf(history_QRW.view({-1, inputs.qkv_TW.size(1)}));
    }
    if (p.conv_bias_W.defined()) {
      bias_ = p.conv_bias_W.to(at::kFloat).contiguous();
    }
    row_ = {.num_taps = weights_.size(0),
            .weights = weights_.const_data_ptr<float>(),
            .bias = bias_.defined() ? bias_.const_data_ptr<float>() : nullptr,
            .num_features = weights_.size(1),
            .num_key_heads = p.num_key_heads,
            .key_features = p.key_features,
            .l2_eps = static_cast<float>(p.l2_eps),
            .query_scale = static_cast<float>(QueryScale(p))};
  }

  // `earlier` has the rows that the convolution of row t reads before it, as in
  // DeltaPlan.
  kernels::cpu::DeltaMixRow Row(int64_t t, const int64_t* earlier) const {
    kernels::cpu::DeltaMixRow row = row_;
    for (int64_t r = 0; r + 1 < row.num_taps; ++r) {
      row.taps[r] = earlier[r] < num_rows_
                        ? At(x_, earlier[r])
                        : At(history_, earlier[r] - num_rows_);
    }
    row.taps[row.num_taps - 1] = At(x_, t);
    return row;
  }

  // The row of a step: its earlier rows are those of a slot in the history.
  kernels::cpu::DeltaMixRow StepRow(int64_t t, int64_t slot) const {
    kernels::cpu::DeltaMixRow row = row_;
    const int64_t num_earlier = row.num_taps - 1;
    for (int64_t r = 0; r < num_earlier; ++r) {
      row.taps[r] = At(history_, slot * num_earlier + r);
    }
    row.taps[num_earlier] = At(x_, t);
    return row;
  }

  const kernels::cpu::DeltaMixRow& shape() const { return row_; }

 private:
  static const float* At(const TapRows& rows, int64_t row) {
    return row < 0 ? nullptr : rows.data + row * rows.stride;
  }

  int64_t num_rows_;
  TapRows x_;
  TapRows history_;
  at::Tensor weights_;
  at::Tensor bias_;
  kernels::cpu::DeltaMixRow row_;
};

// Calls mix(t, row) for each row of the result [T, W], on several threads.
template <typename Mix>
at::Tensor MixOnCpu(const at::Tensor& qkv_TW, const Mix& mix) {
  const int64_t features = qkv_TW.size(1);
  at::Tensor mixed_TW = at::empty(qkv_TW.sizes(), qkv_TW.options());
  float* mixed = mixed_TW.mutable_data_ptr<float>();
  ParallelFor(qkv_TW.size(0), RowGrain(features),
              [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) {
                  mix(t, mixed + t * features);
                }
              });
  return mixed_TW;
}

// Mixes the next rows of sequences, and moves the rows in their slots.
at::Tensor StepRowsOnCpu(const DeltaInputs& inputs, const DeltaParameters& p,
                         const DeltaStates& states) {
  const CpuMixer mixer(inputs, p, states.conv_NRW);
  const int64_t features = inputs.qkv_TW.size(1);
  const int64_t num_earlier = mixer.shape().num_taps - 1;
  const auto* slots = states.slots_Q.const_data_ptr<int64_t>();
  float* conv = states.conv_NRW.mutable_data_ptr<float>();
  return MixOnCpu(inputs.qkv_TW, [&](int64_t t, float* mixed) {
    const kernels::cpu::DeltaMixRow row = mixer.StepRow(t, slots[t]);
    kernels::cpu::Kernels().delta_mix_row(row, mixed);
    float* first = conv + slots[t] * num_earlier * features;
    float* last =
        std::copy(first + features, first + num_earlier * features, first);
    std::copy_n(row.taps[num_earlier], features, last);
  });
}

// Writes the gradients of the rows before the convolution, given those after
// it. Threads share the features, because a row adds to the rows before it.
void ScatterOnCpu(const at::Tensor& d_TW, const DeltaPlan& plan,
                  const kernels::cpu::DeltaMixRow& shape,
                  const at::Tensor& into_TW) {
  constexpr int64_t kColumns = 64;
  const int64_t features = d_TW.size(1), num_earlier = shape.num_taps - 1;
  const float* d = d_TW.const_data_ptr<float>();
  float* into = into_TW.mutable_data_ptr<float>();
  const auto multiply = kernels::cpu::Kernels().multiply_row;
  ParallelFor(CeilDiv(features, kColumns), 1, [&](int64_t begin, int64_t end) {
    const int64_t column = begin * kColumns;
    const int64_t count = std::min(end * kColumns, features) - column;
    for (int64_t t = 0; t < d_TW.size(0); ++t) {
      const float* row = d + t * features + column;
      const float* weight = shape.weights + column;
      const auto add = [&](int64_t tap, int64_t target, bool adds) {
        multiply(row, weight + tap * features, count, adds,
                 into + target * into_TW.stride(0) + column);
      };
      add(num_earlier, t, /*adds=*/false);
      for (int64_t r = 0; r < num_earlier; ++r) {
        const int64_t target = plan.earlier_TR[t * num_earlier + r];
        if (target >= 0) add(r, target, /*adds=*/true);
      }
    }
  });
}

void QkvBackwardOnCpu(const at::Tensor& d_TW, const DeltaInputs& inputs,
                      const DeltaParameters& p, const DeltaPlan& plan,
                      const at::Tensor& into_TW) {
  const CpuMixer mixer(inputs, p, {});
  const int64_t features = d_TW.size(1);
  const int64_t num_earlier = mixer.shape().num_taps - 1;
  float* d = d_TW.mutable_data_ptr<float>();
  ParallelFor(d_TW.size(0), RowGrain(features),
              [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) {
                  kernels::cpu::Kernels().delta_mix_backward_row(
                      mixer.Row(t, plan.earlier_TR.data() + t * num_earlier),
                      d + t * features);
                }
              });
  ScatterOnCpu(d_TW, plan, mixer.shape(), into_TW);
}

void QkvBackwardByAten(const at::Tensor& d_TW, const DeltaInputs& inputs,
                       const DeltaParameters& p, const DeltaPlan& plan,
                       const at::Tensor& into_TW) {
  const Convolved c = ConvolveRows(inputs, p, plan, {});
  const at::Tensor sigmoid = c.conv_TW.sigmoid();
  const NormedHeads norm = NormalizeHeads(c.conv_TW * sigmoid, p);
  const int64_t normed = NormedFeatures(p), num_rows = d_TW.size(0);
  d_TW.narrow(1, 0, normed / 2).mul_(QueryScale(p));
  const at::Tensor dn =
      d_TW.narrow(1, 0, normed).unflatten(1, {-1, p.key_features});
  dn.copy_((dn - norm.n_ThK * (dn * norm.n_ThK).sum(2, true)) *
           norm.inverse_Th1);
  d_TW.mul_(sigmoid * (1 + c.conv_TW * (1 - sigmoid)));
  const at::Tensor weight = p.conv_WR1.to(d_TW.scalar_type());
  const int64_t num_earlier = weight.size(1) - 1;
  const at::Tensor dx = at::zeros({num_rows + 1, d_TW.size(1)}, d_TW.options());
  dx.narrow(0, 0, num_rows).copy_(d_TW * weight.select(1, num_earlier));
  for (int64_t r = 0; r < num_earlier; ++r) {
    dx.index_add_(0, c.earlier_TR.select(1, r), d_TW * weight.select(1, r));
  }
  into_TW.copy_(dx.narrow(0, 0, num_rows));
}

void QkvBackward(const at::Tensor& d_TW, const DeltaInputs& inputs,
                 const DeltaParameters& p, const DeltaPlan& plan,
                 const at::Tensor& into_TW) {
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(inputs.qkv_TW)) {
      return cuda::MixDeltaRowsBackward(d_TW, inputs, p, plan, into_TW);
    }
  }
  const auto run =
      HasCpuKernel(inputs.qkv_TW) ? QkvBackwardOnCpu : QkvBackwardByAten;
  run(d_TW, inputs, p, plan, into_TW);
}

}  // namespace

DeltaRows MixDeltaRows(const DeltaInputs& inputs, const DeltaParameters& p,
                       const DeltaPlan& plan, const at::Tensor& history_QRW) {
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(inputs.qkv_TW)) {
      return cuda::MixDeltaRows(inputs, p, &plan, history_QRW);
    }
  }
  if (!HasCpuKernel(inputs.qkv_TW)) {
    const Convolved c = ConvolveRows(inputs, p, plan, history_QRW);
    return WithGates(MixConvolved(c.conv_TW, p), inputs, p);
  }
  const CpuMixer mixer(inputs, p, history_QRW);
  const int64_t num_earlier = mixer.shape().num_taps - 1;
  const at::Tensor mixed_TW =
      MixOnCpu(inputs.qkv_TW, [&](int64_t t, float* mixed) {
        kernels::cpu::Kernels().delta_mix_row(
            mixer.Row(t, plan.earlier_TR.data() + t * num_earlier), mixed);
      });
  return WithGates(mixed_TW, inputs, p);
}

DeltaRows MixDeltaStepRows(const DeltaInputs& inputs, const DeltaParameters& p,
                           const DeltaStates& states) {
  if (HasCpuKernel(inputs.qkv_TW)) {
    return WithGates(StepRowsOnCpu(inputs, p, states), inputs, p);
  }
  const at::Tensor history_QRW =
      states.conv_NRW.index_select(0, states.slots_Q);
  const at::Tensor rows = at::cat({history_QRW, inputs.qkv_TW.unsqueeze(1)}, 1);
  states.conv_NRW.index_copy_(0, states.slots_Q, rows.slice(1, 1));
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(inputs.qkv_TW)) {
      return cuda::MixDeltaRows(inputs, p, /*plan=*/nullptr, history_QRW);
    }
  }
  const at::ScalarType compute = ComputeType(rows);
  const at::Tensor conv_TW =
      (rows.to(compute) * p.conv_WR1.t().to(compute)).sum(1);
  if (p.conv_bias_W.defined()) conv_TW.add_(p.conv_bias_W);
  return WithGates(MixConvolved(conv_TW, p), inputs, p);
}

void MixDeltaRowsBackward(const DeltaRows& gradient, const DeltaInputs& inputs,
                          const DeltaParameters& p, const DeltaPlan& plan,
                          const DeltaInputs& into) {
  QkvBackward(gradient.mixed_TW, inputs, p, plan, into.qkv_TW);
  const at::ScalarType compute = gradient.g_TH.scalar_type();
  const at::Tensor beta = Sigmoid(inputs.beta_TH.to(compute));
  into.beta_TH.copy_(gradient.beta_TH * beta * (1 - beta));
  const at::Tensor slope = Sigmoid(inputs.alpha_TH.to(compute) + p.dt_bias_H);
  into.alpha_TH.copy_(gradient.g_TH * slope * p.a_log_H.exp().neg());
}

}  // namespace weft::ops
