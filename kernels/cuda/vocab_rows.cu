#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/vocab_rows.h"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 512;
// The weight of a softcapped logit c is e^((c - reference) / temperature),
// times the softcap's slope. The kernel chooses the reference before it reads
// the whole row. If the largest exponent of the row turns out to be above
// kLargestPower, the kernel writes the weights again, with the row's maximum as
// the reference.
constexpr float kLargestPower = 60;

// Sums over a set of softcapped logits c of a row. `max` is the largest c of
// the set, and d = (c - max) / temperature.
struct RowSums {
  float max;
  float exps;      // Sum of e^d.
  float weighted;  // Sum of d e^d.
};

// Converts `sums` to a new maximum `max`, which is at least sums.max.
__device__ RowSums MoveTo(float max, RowSums sums, float inverse_temperature) {
  const float shift = (sums.max - max) * inverse_temperature;
  const float factor = expf(shift);
  // Before the first logit, `shift` may be -inf. `factor` is then 0, and 0 *
  // -inf would be NaN.
  const float moved =
      factor > 0 ? factor * (sums.weighted + sums.exps * shift) : 0.0F;
  return {max, sums.exps * factor, moved};
}

// Turns x into cap * tanh(x / cap). A cap of 0 changes nothing.
struct Softcap {
  __device__ explicit Softcap(float of) : cap(of), inverse(1 / of) {}

  __device__ float Of(float x) const {
    return cap > 0 ? cap * tanhf(x * inverse) : x;
  }
  // Returns the derivative of Of(x), given the capped value c = Of(x).
  __device__ float Slope(float c) const {
    const float tanh = cap > 0 ? c * inverse : 0.0F;
    return 1 - tanh * tanh;
  }

  float cap;
  float inverse;
};

template <int kN>
__device__ float LargestOf(const Pack<float, kN>& logits) {
  float max = logits[0];
#pragma unroll
  for (int k = 1; k < kN; ++k) max = fmaxf(max, logits[k]);
  return max;
}

// One row of logits, which one block computes. Every thread of the block must
// call the functions of Row.
template <int kN, VocabSoftmax kSoftmax>
class Row {
 public:
  __device__ Row(const VocabRows& rows, int64_t row)
      : rows_(rows),
        row_(row),
        x_(rows.logits_RV + row * rows.vocab),
        packs_(static_cast<int>(rows.vocab / kN)),
        inverse_temperature_(1 / rows.temperature_R[row]),
        softcap_(rows.softcap) {}

  // Returns the largest softcapped logit in the row's first kThreads packs.
  __device__ float Reference() const {
    float max = kLowest;
    if (static_cast<int>(threadIdx.x) < packs_) {
      max = fmaxf(max, LargestOf(Logits(static_cast<int>(threadIdx.x))));
    }
    return BlockReduce(max, Max());
  }

  // Returns the sums of the whole row, the same in every thread. If kSoftmax is
  // kWeights, also writes the weights for `reference`.
  __device__ RowSums Sum(float reference) {
    RowSums sums = {kLowest, 0, 0};
    float factor = 0;  // e^((sums.max - reference) / temperature).
    for (int i = static_cast<int>(threadIdx.x); i < packs_; i += kThreads) {
      auto logits = Logits(i);
      const float max = LargestOf(logits);
      if (max > sums.max) {
        sums = MoveTo(max, sums, inverse_temperature_);
        factor = expf((max - reference) * inverse_temperature_);
      }
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        const float c = logits[k];
        const float d = (c - sums.max) * inverse_temperature_;
        const float e = expf(d);
        sums.exps += e;
        // Skips a logit of -inf, which would add -inf * 0 = NaN.
        sums.weighted += e > 0 ? d * e : 0.0F;
        logits.elements[k] = e * factor * softcap_.Slope(c);
      }
      if constexpr (kSoftmax == VocabSoftmax::kWeights) Write(i, logits);
    }
    const float max = BlockReduce(sums.max, Max());
    sums = MoveTo(max, sums, inverse_temperature_);
    return {max, BlockReduce(sums.exps, Add()),
            BlockReduce(sums.weighted, Add())};
  }

  // Writes the log-probabilities of the row's entries and, if wanted, the row's
  // entropy.
  __device__ void Score(const RowSums& sums) const {
    const float log_sum = logf(sums.exps);
    const int64_t first = rows_.row_offsets[0];
    const int64_t end = rows_.row_offsets[row_ + 1];
    for (int64_t e = rows_.row_offsets[row_] + threadIdx.x; e < end;
         e += kThreads) {
      const float c = softcap_.Of(x_[rows_.targets_E[e - first]]);
      rows_.logprobs_E[e - first] =
          (c - sums.max) * inverse_temperature_ - log_sum;
    }
    if (rows_.entropy_R != nullptr && threadIdx.x == 0) {
      rows_.entropy_R[row_] = log_sum - sums.weighted / sums.exps;
    }
  }

  // Writes e^((c - max) / temperature) * factor * softcap'(x) for each logit x,
  // where c = softcap(x).
  __device__ void WriteAgainst(float max, float factor) {
    for (int i = static_cast<int>(threadIdx.x); i < packs_; i += kThreads) {
      auto logits = Logits(i);
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        const float c = logits[k];
        logits.elements[k] =
            expf((c - max) * inverse_temperature_) * factor * softcap_.Slope(c);
      }
      Write(i, logits);
    }
  }

  __device__ void ClearTargets() const {
    const int64_t first = rows_.row_offsets[0];
    const int64_t end = rows_.row_offsets[row_ + 1];
    for (int64_t e = rows_.row_offsets[row_] + threadIdx.x; e < end;
         e += kThreads) {
      Store(0.0F, Out() + rows_.targets_E[e - first]);
    }
  }

  // Returns the factor that turns the weights for `reference` into
  // probabilities.
  __device__ float ScaleOf(float reference, const RowSums& sums) const {
    return expf((reference - sums.max) * inverse_temperature_) / sums.exps;
  }
  __device__ bool IsFar(float reference, float max) const {
    return !((max - reference) * inverse_temperature_ <= kLargestPower);
  }

 private:
  __device__ Pack<float, kN> Logits(int i) const {
    auto logits = LoadPack<kN>(x_ + int64_t{i} * kN);
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      logits.elements[k] = softcap_.Of(logits[k]);
    }
    return logits;
  }
  __device__ auto* Out() const {
    if constexpr (kSoftmax == VocabSoftmax::kWeights) {
      return static_cast<__nv_bfloat16*>(rows_.weights_RV) + row_ * rows_.vocab;
    } else {
      return x_;
    }
  }
  __device__ void Write(int i, const Pack<float, kN>& values) const {
    Pack<std::remove_pointer_t<decltype(Out())>, kN> out;
#pragma unroll
    for (int k = 0; k < kN; ++k) out.Set(k, values[k]);
    StorePack(out, Out() + int64_t{i} * kN);
  }

  const VocabRows& rows_;
  const int64_t row_;
  float* const x_;
  const int packs_;
  const float inverse_temperature_;
  const Softcap softcap_;
};

template <int kN, VocabSoftmax kSoftmax>
__global__ void __launch_bounds__(kThreads) VocabRowsKernel(VocabRows rows) {
  Row<kN, kSoftmax> row(rows, blockIdx.x);
  constexpr bool kWeights = kSoftmax == VocabSoftmax::kWeights;
  float reference = kWeights ? row.Reference() : kLowest;
  const RowSums sums = row.Sum(reference);
  row.Score(sums);
  if constexpr (kSoftmax == VocabSoftmax::kNone) return;
  if (!kWeights || row.IsFar(reference, sums.max)) {
    reference = sums.max;
    // With kInPlace, the softmax overwrites the logits. So this barrier waits
    // until all threads have read the targets' logits in Score.
    __syncthreads();
    row.WriteAgainst(sums.max, kWeights ? 1 : 1 / sums.exps);
  }
  if (kWeights && threadIdx.x == 0) {
    rows.scale_R[blockIdx.x] = row.ScaleOf(reference, sums);
  }
  if (!rows.clear_targets) return;
  __syncthreads();
  row.ClearTargets();
}

template <VocabSoftmax kSoftmax>
cudaError_t LaunchRows(const VocabRows& rows, cudaStream_t stream) {
  using Out = std::conditional_t<kSoftmax == VocabSoftmax::kWeights,
                                 __nv_bfloat16, float>;
  const bool is_wide = IsWide<float>(rows.logits_RV, rows.vocab) &&
                       IsWide<Out>(rows.weights_RV, rows.vocab);
  return WithWidth<Out>(is_wide, [&](auto width) {
    return Launch(VocabRowsKernel<decltype(width)::value, kSoftmax>,
                  rows.num_rows, 1, kThreads, stream, rows);
  });
}

}  // namespace

cudaError_t ScoreVocabRows(const VocabRows& rows, cudaStream_t stream) {
  if (rows.num_rows == 0) return cudaSuccess;
  switch (rows.softmax) {
    case VocabSoftmax::kInPlace:
      return LaunchRows<VocabSoftmax::kInPlace>(rows, stream);
    case VocabSoftmax::kWeights:
      return LaunchRows<VocabSoftmax::kWeights>(rows, stream);
    case VocabSoftmax::kNone:
      break;
  }
  return LaunchRows<VocabSoftmax::kNone>(rows, stream);
}

}  // namespace weft::kernels::cuda
