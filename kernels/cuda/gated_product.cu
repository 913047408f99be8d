#include <type_traits>

#include "kernels/cuda/gated_product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

// Returns the first of the thread's kN features.
template <int kN>
__device__ int64_t Feature() {
  return (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kN;
}

template <typename T, int kN, GateActivation kActivation>
__global__ void __launch_bounds__(kThreads)
    GatedProductKernel(int64_t features, const T* gate_up_T2F, T* out_TF) {
  WaitForEarlierLaunches();
  const int64_t row = blockIdx.x;
  const int64_t i = Feature<kN>();
  if (i >= features) return;
  const T* from = gate_up_T2F + row * 2 * features + i;
  auto gate = LoadPack<kN>(from);
  const auto up = LoadPack<kN>(from + features);
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    gate.Set(k, Activate<kActivation>(gate[k]).value *
                    Factor<kActivation>(up[k]).value);
  }
  StorePack(gate, out_TF + row * features + i);
}

template <typename T, int kN, GateActivation kActivation>
__global__ void __launch_bounds__(kThreads)
    GatedProductBackwardKernel(int64_t features, const T* dout_TF,
                               T* gate_up_T2F) {
  const int64_t row = blockIdx.x;
  const int64_t i = Feature<kN>();
  if (i >= features) return;
  T* at = gate_up_T2F + row * 2 * features + i;
  auto gate = LoadPack<kN>(at);
  auto up = LoadPack<kN>(at + features);
  const auto dout = LoadPack<kN>(dout_TF + row * features + i);
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    const Gate activated = Activate<kActivation>(gate[k]);
    const Gate factor = Factor<kActivation>(up[k]);
    const float d = dout[k];
    gate.Set(k, d * factor.value * activated.slope);
    up.Set(k, d * activated.value * factor.slope);
  }
  StorePack(gate, at);
  StorePack(up, at + features);
}

// Calls run(const T*, width, activation). The types of these arguments give the
// kernel's template arguments: the element type, the features per thread and
// the activation. `narrow` is the tensor with F columns: out or dout.
template <typename Run>
cudaError_t WithKernel(DType dtype, GateActivation activation, int64_t features,
                       const void* gate_up, const void* narrow, Run run) {
  using Silu = std::integral_constant<GateActivation, GateActivation::kSilu>;
  using Gelu =
      std::integral_constant<GateActivation, GateActivation::kGeluTanh>;
  using Clamped =
      std::integral_constant<GateActivation, GateActivation::kClampedSilu>;
  return WithType(dtype, [&]<typename T>(const T* type) {
    const bool is_wide =
        IsWide<T>(gate_up, features) && IsWide<T>(narrow, features);
    return WithWidth<T>(is_wide, [&](auto width) {
      switch (activation) {
        case GateActivation::kSilu:
          return run(type, width, Silu());
        case GateActivation::kGeluTanh:
          return run(type, width, Gelu());
        default:
          return run(type, width, Clamped());
      }
    });
  });
}

}  // namespace

cudaError_t GatedProduct(DType dtype, GateActivation activation,
                         int64_t num_rows, int64_t features,
                         const void* gate_up_T2F, void* out_TF,
                         cudaStream_t stream) {
  if (num_rows == 0 || features == 0) return cudaSuccess;
  return WithKernel(dtype, activation, features, gate_up_T2F, out_TF,
                    [&]<typename T>(const T*, auto width, auto gate) {
                      constexpr int kN = decltype(width)::value;
                      return LaunchEarly(
                          GatedProductKernel<T, kN, decltype(gate)::value>,
                          num_rows, CeilDiv(features, kN * kThreads), kThreads,
                          stream, features, static_cast<const T*>(gate_up_T2F),
                          static_cast<T*>(out_TF));
                    });
}

cudaError_t GatedProductBackward(DType dtype, GateActivation activation,
                                 int64_t num_rows, int64_t features,
                                 const void* dout_TF, void* gate_up_T2F,
                                 cudaStream_t stream) {
  if (num_rows == 0 || features == 0) return cudaSuccess;
  return WithKernel(
      dtype, activation, features, gate_up_T2F, dout_TF,
      [&]<typename T>(const T*, auto width, auto gate) {
        constexpr int kN = decltype(width)::value;
        return Launch(GatedProductBackwardKernel<T, kN, decltype(gate)::value>,
                      num_rows, CeilDiv(features, kN * kThreads), kThreads,
                      stream, features, static_cast<const T*>(dout_TF),
                      static_cast<T*>(gate_up_T2F));
      });
}

}  // namespace weft::kernels::cuda
