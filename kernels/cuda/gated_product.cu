#include "kernels/cuda/device.cuh"
#include "kernels/cuda/gated_product.h"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;
// Elements of a row that one block takes.
constexpr int64_t kBlockFeatures = 1024;

// Both activations are x sigmoid(z(x)): SiLU with z = x, GELU's tanh form with
// z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kGeluScale = 1.5957691216057308F;
constexpr float kGeluCubic = 0.044715F;

struct Gate {
  float value;
  float slope;
};

template <GateActivation kActivation>
__device__ Gate Activate(float x) {
  float z = x;
  float dz = 1;
  if constexpr (kActivation == GateActivation::kGeluTanh) {
    const float square = kGeluCubic * x * x;
    z = kGeluScale * x * (1 + square);
    dz = kGeluScale * (1 + 3 * square);
  }
  const float sigmoid = 1 / (1 + expf(-z));
  const float value = x * sigmoid;
  return {value, sigmoid + value * (1 - sigmoid) * dz};
}

// Calls run(i) for the features of this block that are this thread's.
template <typename Run>
__device__ void ForFeatures(int64_t features, Run run) {
  const int64_t begin = blockIdx.y * kBlockFeatures;
  const int64_t end =
      begin + kBlockFeatures < features ? begin + kBlockFeatures : features;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) run(i);
}

template <typename T, GateActivation kActivation>
__global__ void GatedProductKernel(int64_t features, const T* gate_up_T2F,
                                   T* out_TF) {
  const int64_t row = blockIdx.x;
  const T* gate = gate_up_T2F + row * 2 * features;
  const T* up = gate + features;
  T* out = out_TF + row * features;
  ForFeatures(features, [&](int64_t i) {
    Store(Activate<kActivation>(ToFloat(gate[i])).value * ToFloat(up[i]),
          out + i);
  });
}

template <typename T, GateActivation kActivation>
__global__ void GatedProductBackwardKernel(int64_t features, const T* dout_TF,
                                           T* gate_up_T2F) {
  const int64_t row = blockIdx.x;
  const T* dout = dout_TF + row * features;
  T* gate = gate_up_T2F + row * 2 * features;
  T* up = gate + features;
  ForFeatures(features, [&](int64_t i) {
    const Gate activated = Activate<kActivation>(ToFloat(gate[i]));
    const float d = ToFloat(dout[i]);
    Store(d * ToFloat(up[i]) * activated.slope, gate + i);
    Store(d * activated.value, up + i);
  });
}

template <typename T>
cudaError_t Forward(GateActivation activation, int64_t num_rows,
                    int64_t features, const void* gate_up_T2F, void* out_TF,
                    cudaStream_t stream) {
  const auto kernel = activation == GateActivation::kSilu
                          ? GatedProductKernel<T, GateActivation::kSilu>
                          : GatedProductKernel<T, GateActivation::kGeluTanh>;
  return Launch(kernel, num_rows, CeilDiv(features, kBlockFeatures), kThreads,
                stream, features, static_cast<const T*>(gate_up_T2F),
                static_cast<T*>(out_TF));
}

template <typename T>
cudaError_t Backward(GateActivation activation, int64_t num_rows,
                     int64_t features, const void* dout_TF, void* gate_up_T2F,
                     cudaStream_t stream) {
  const auto kernel =
      activation == GateActivation::kSilu
          ? GatedProductBackwardKernel<T, GateActivation::kSilu>
          : GatedProductBackwardKernel<T, GateActivation::kGeluTanh>;
  return Launch(kernel, num_rows, CeilDiv(features, kBlockFeatures), kThreads,
                stream, features, static_cast<const T*>(dout_TF),
                static_cast<T*>(gate_up_T2F));
}

}  // namespace

cudaError_t GatedProduct(DType dtype, GateActivation activation,
                         int64_t num_rows, int64_t features,
                         const void* gate_up_T2F, void* out_TF,
                         cudaStream_t stream) {
  if (num_rows == 0 || features == 0) return cudaSuccess;
  const auto forward =
      dtype == DType::kBf16 ? Forward<__nv_bfloat16> : Forward<float>;
  return forward(activation, num_rows, features, gate_up_T2F, out_TF, stream);
}

cudaError_t GatedProductBackward(DType dtype, GateActivation activation,
                                 int64_t num_rows, int64_t features,
                                 const void* dout_TF, void* gate_up_T2F,
                                 cudaStream_t stream) {
  if (num_rows == 0 || features == 0) return cudaSuccess;
  const auto backward =
      dtype == DType::kBf16 ? Backward<__nv_bfloat16> : Backward<float>;
  return backward(activation, num_rows, features, dout_TF, gate_up_T2F, stream);
}

}  // namespace weft::kernels::cuda
